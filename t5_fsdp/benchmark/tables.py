"""A result as a table of 80 columns, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5_fsdp.errors import UserError
from t5_fsdp.files import is_special, write_atomically, write_json

WIDTH = 80


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        figures: all of them, for JSON.
        title: what the table is about, in a line.
        header, rows: of the table.
    """

    figures: dict[str, Any]
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their cells; the first is on the left and shortened to fit 80 columns."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    others = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(8, WIDTH - others))
    lines = []
    for row in table:
        first = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "~"
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    lines.insert(1, "-" * min(WIDTH, sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a document."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] * len(header)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_result(
    result: Result, json_file: Path | None, markdown_file: Path | None, unfinished: str = ""
) -> None:
    """To the files that were asked for.

    Args:
        unfinished: how far it has come, e.g. "2 of 5 rounds", which the files say as well; what
            can't be written then is left to the end.

    Raises:
        UserError: a file can't be written.
    """
    files = [path for path in (json_file, markdown_file) if path is not None]
    if unfinished and any(is_special(path) for path in files):  # a pipe gets it once
        return
    figures, title = result.figures, result.title
    if unfinished:
        figures, title = {**figures, "unfinished": unfinished}, f"{title}; only {unfinished}"
    try:
        if json_file is not None:
            write_json(json_file, figures)
        if markdown_file is not None:
            table = markdown_table(result.header, result.rows)
            write_atomically(markdown_file, [f"{title}\n\n{table}"])
    except OSError as error:
        if unfinished:
            return
        raise UserError(
            f"{error.filename} can't be written ({error.strerror}); give another"
        ) from None


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """A cell; a dash for what is not known."""
    return "-" if value is None else f"{value:{form}}{unit}"
