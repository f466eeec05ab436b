"""Scores of several systems, and their differences, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t5_fsdp.evaluation.comparison import CHANGE_METRIC, shorten

TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
_SHOWN_CHANGES = 2
_SHOWN_CHARACTERS = 80


def format_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """An aligned plain-text table: a line a system, its mean F-measures in points (0 to 100).

    Args:
        rows: a system's name, e.g. "model" or "lead baseline", and its `Scores.summary`; names may
            be the same.
    """
    width = max((len(name) for name, _ in rows), default=0)
    lines = ["  ".join([" " * width, *TITLES.values()])]
    for name, summary in rows:
        cells = [
            f"{100 * summary['scores'][metric]['fmeasure']:.1f}".rjust(len(title))
            for metric, title in TITLES.items()
        ]
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)


def format_comparison(metrics: Mapping[str, Mapping[str, float]], baseline: str) -> str:
    """Differences to a baseline in points, a line a metric.

    Args:
        metrics: of `comparison.compare`.
        baseline: its name.
    """
    lines = [
        f"difference to {baseline}; below 0: in which share of the resamples it is",
        f"{'':<10}{'points':>6}  {'95 % interval':<14}{'below 0':>9}   win / tie / lose",
    ]
    for metric, title in TITLES.items():
        values = metrics[metric]
        low, high = 100 * values["difference_low"], 100 * values["difference_high"]
        interval = f"[{low:+.1f}, {high:+.1f}]"
        lines.append(
            f"{title:<10}{100 * values['difference']:+6.1f}  {interval:<14}"
            f"{100 * values['share_below_zero']:7.1f} %"
            f"   {values['wins']} / {values['ties']} / {values['losses']}"
        )
    return "\n".join(lines)


def format_changes(changes: Mapping[str, Sequence[Mapping[str, Any]]], baseline: str) -> str:
    """The examples of `comparison.largest_changes` that differ most, a few lines each."""
    lines = []
    for name, title, sign in (
        ("gains", f"largest gains over {baseline}", "+"),
        ("losses", f"largest losses to {baseline}", "-"),
    ):
        if changes[name]:
            lines.append(title)
        for change in changes[name][:_SHOWN_CHANGES]:
            points = 100 * abs(change["fmeasure"] - change["baseline_fmeasure"])
            lines.append(f"{TITLES[CHANGE_METRIC]} {sign}{points:.1f}, example {change['id']}")
            for label, field in (
                ("reference", "reference"),
                ("prediction", "prediction"),
                (baseline, "baseline_prediction"),
            ):
                lines.append(f"  {shorten(label, 20)}: {shorten(change[field], _SHOWN_CHARACTERS)}")
    return "\n".join(lines) or "no example differs"
