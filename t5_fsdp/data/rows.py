"""From a row of a table to document and summary: its columns, its id, and why it is left out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from t5_fsdp.config import DataConfig
from t5_fsdp.data.readers import BadRow, Row, cell_text, format_of
from t5_fsdp.errors import UserError

EMPTY_DOCUMENT, EMPTY_SUMMARY, MALFORMED = "empty document", "empty summary", "malformed row"


def columns_of(data: DataConfig) -> tuple[str, str]:
    """The names of the columns with document and summary."""
    if data.source == "sample":
        return ("document", "summary")
    return (data.document_column, data.summary_column)


def has_free_columns(place: str) -> bool:
    """Whether a later row may have other columns than the first: objects in JSON."""
    return format_of(Path(place)) in (".json", ".jsonl")


def check_columns(place: str, seen: Iterable[str], columns: tuple[str, str]) -> None:
    """Refuse data without one of the two columns, once any row was seen.

    Raises:
        UserError: naming the columns that are there.
    """
    names = list(seen)
    for option, name in zip(("document_column", "summary_column"), columns, strict=True):
        if names and name not in names:
            raise UserError(
                f"{place} has no column {name!r} (it has: {', '.join(names)}); "
                f"set data.{option} to one of them"
            )


def pair_of(row: Row, columns: tuple[str, str]) -> tuple[str, str] | BadRow:
    """Document and summary of a row as texts."""
    texts = []
    for name in columns:
        text = cell_text(row.get(name))
        if isinstance(text, BadRow):
            return BadRow(f"column {name!r} holds {text.reason}", text.remedy)
        texts.append(text)
    return texts[0], texts[1]


def empty_reason(document: str, summary: str) -> str | None:
    """Why a row with these texts is dropped, or None."""
    if not document.strip():
        return EMPTY_DOCUMENT
    return None if summary.strip() else EMPTY_SUMMARY


def row_id(value: Any) -> str | None:
    """The text of an id, or None where it can't serve as one."""
    if value is None or isinstance(value, list | dict | bytes):
        return None
    text = str(value)
    # Half a surrogate pair cannot be stored; the row number serves instead.
    return text if text.isascii() or text.encode("utf-8", "ignore").decode() == text else None


def malformed(place: str, number: int, row: BadRow) -> UserError:
    """The error for a malformed row under `on_bad_row: strict`."""
    return UserError(
        f"{place}, row {number}: {row.reason}; {row.remedy}, or leave such rows out with "
        "data.on_bad_row: tolerant"
    )
