"""A few summaries for people to look at while a model trains: as lines, and as Markdown."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from t5_fsdp.evaluation.rouge import METRICS

_COLUMNS = 80
_LABEL_COLUMNS = 12
_DOCUMENT_CHARACTERS = 200
_SUMMARY_CHARACTERS = 320
_MARKDOWN_CHARACTERS = 2000
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")

_Row = TypeVar("_Row")


def spread(rows: Sequence[_Row], count: int) -> list[_Row]:
    """At most `count` rows, evenly spread over all."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def as_lines(row: Mapping[str, Any], with_document: bool = True) -> str:
    """An example in lines of at most 80 columns; long texts are cut.

    Args:
        row: of predictions.jsonl, with scores.
        with_document: begin with what was summarized.
    """
    parts = [("reference", row["reference"], _SUMMARY_CHARACTERS),
             ("summary", row["prediction"], _SUMMARY_CHARACTERS)]  # fmt: skip
    if with_document:
        parts.insert(0, ("document", row["document"], _DOCUMENT_CHARACTERS))
    lines = [line for label, text, limit in parts for line in _wrap(label, text, limit)]
    return "\n".join([f"example {_plain(str(row['id']))}, {_scores(row)}", *lines])


def as_markdown(row: Mapping[str, Any]) -> str:
    """The same as Markdown paragraphs, in which no character of a text is markup."""
    parts = (("document", row["document"]), ("reference", row["reference"]),
             ("summary", row["prediction"]))  # fmt: skip
    texts = [f"**{name}** {_escape(_cut(text, _MARKDOWN_CHARACTERS))}" for name, text in parts]
    return "\n\n".join([f"**example {_escape(_plain(str(row['id'])))}**, {_scores(row)}", *texts])


def _scores(row: Mapping[str, Any]) -> str:
    return "ROUGE-1/2/L/Lsum " + " / ".join(f"{100 * row[name]:.1f}" for name in METRICS)


def _wrap(label: str, text: str, limit: int) -> list[str]:
    text = _cut(text, limit) or "(empty)"
    columns = _COLUMNS - 2 - _LABEL_COLUMNS
    if any(unicodedata.east_asian_width(character) in "WF" for character in text):
        columns //= 2  # such a character takes two
    lines = textwrap.wrap(text, columns)
    return [f"  {label if not number else '':{_LABEL_COLUMNS}}{line}"
            for number, line in enumerate(lines)]  # fmt: skip


def _cut(text: str, limit: int) -> str:
    """On one line, at most `limit` characters and what says how much is left out."""
    text = _plain(text)
    if len(text) <= limit:
        return text
    shown = text[:limit].rsplit(" ", 1)[0]
    return f"{shown} ... ({len(text) - len(shown):,} more characters)"


def _plain(text: str) -> str:
    """Without what would move a terminal's cursor or is no character."""
    words = "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text).split()
    return " ".join(words)


def _escape(text: str) -> str:
    # Markdown's backslash does not cover all punctuation; entities do, at a line's start as well.
    return _PUNCTUATION.sub(lambda found: f"&#{ord(found[0])};", text)
