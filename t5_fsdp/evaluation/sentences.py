"""Sentences, found offline by sentencex."""

from __future__ import annotations

import re

SENTENCE_LANGUAGE = "en"
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


def split_sentences(text: str) -> str:
    """The text with one sentence a line, as rougeLsum needs it.

    A text with several lines that are not blank is left as it is: its lines count as sentences.
    Any other is cut by sentencex.
    """
    if sum(1 for line in text.split("\n") if line.strip()) > 1:
        return text
    return cut_sentences(text)


def cut_sentences(text: str) -> str:
    """The text with a newline behind each sentence; its own newlines stay."""
    from sentencex import segment

    # JSON can carry lone surrogates, which sentencex cannot encode; ROUGE ignores both characters.
    return "\n".join(segment(SENTENCE_LANGUAGE, _LONE_SURROGATES.sub("\ufffd", text)))


def list_sentences(text: str) -> list[str]:
    """The sentences of a text, none blank, without white space round them; a line ends one."""
    return [line.strip() for line in cut_sentences(text).split("\n") if line.strip()]
