"""A result as a table of 80 columns, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from t5_fsdp.errors import UserError

WIDTH = 80


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


def write_results(
    results: dict[str, Any],
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """To the files that were asked for.

    Raises:
        UserError: one can't be written.
    """
    texts = {
        json_file: lambda: json.dumps(results, indent=1) + "\n",
        markdown_file: lambda: f"{title}\n\n{markdown_table(header, rows)}",
    }
    for path, make in texts.items():
        if path is None:
            continue
        try:
            path.write_text(make(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} can't be written ({error.strerror}); give another") from None


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """A cell; a dash for what is not known."""
    return "-" if value is None else f"{value:{form}}{unit}"
