"""Sentences, one a line, found without a download."""

from __future__ import annotations

import re

SENTENCE_LANGUAGE = "en"
LONE_SURROGATES = re.compile("[\ud800-\udfff]")


def split_sentences(text: str) -> str:
    """The text with one sentence a line, as rougeLsum needs it.

    A text with several lines that are not blank is left as it is: its lines count as sentences.
    Any other is cut by sentencex, offline.
    """
    from sentencex import segment

    if sum(1 for line in text.split("\n") if line.strip()) > 1:
        return text
    # JSON can carry lone surrogates, which sentencex cannot encode; ROUGE ignores both characters.
    return "\n".join(segment(SENTENCE_LANGUAGE, LONE_SURROGATES.sub("\ufffd", text)))
