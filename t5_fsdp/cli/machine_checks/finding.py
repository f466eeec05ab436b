"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
GIB = 2**30
_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        state: ok; note: worth knowing, stops nothing; problem: a run would fail over it.
        subject: what was looked at, in a word or two.
        text: what was found and, where it is no ok, what to do.
    """

    state: State
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, text)


def note(subject: str, text: str) -> Finding:
    """Worth knowing; a run goes on all the same."""
    return Finding("note", subject, text)


def problem(subject: str, text: str) -> Finding:
    """To be mended before a run; the text says how."""
    return Finding("problem", subject, text)


def shorten(text: str) -> str:
    """A path, or another text that a user gave, as a line can hold it."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
