"""Scores of several systems as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}


def format_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """An aligned plain-text table: a line a system, its mean F-measures in points (0 to 100).

    Args:
        rows: `Scores.summary` by the name of the system, e.g. "model" and "lead baseline".
    """
    width = max((len(name) for name in rows), default=0)
    lines = ["  ".join([" " * width, *TITLES.values()])]
    for name, summary in rows.items():
        cells = [
            f"{100 * summary['scores'][metric]['fmeasure']:.1f}".rjust(len(title))
            for metric, title in TITLES.items()
        ]
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)
