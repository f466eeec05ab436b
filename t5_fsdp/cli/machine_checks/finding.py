"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
GIB = 2**30


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
    return Finding("ok", subject, text)


def note(subject: str, text: str) -> Finding:
    return Finding("note", subject, text)


def problem(subject: str, text: str) -> Finding:
    return Finding("problem", subject, text)
