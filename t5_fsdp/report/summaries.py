"""The summaries that a page shows: which evaluations, and how much of their texts fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from t5_fsdp.evaluation.predictions import read_predictions, references_of
from t5_fsdp.report.runs import METRICS, Evaluated, Run, as_number

# A page of this size opens at once, is sent by mail, and searches in a blink.
MOST_CHARACTERS = 12_000_000
_DOCUMENT_LIMITS = (8000, 6000, 4000, 3000, 2000, 1500, 1000, 500, 250)
# References and summaries are what is compared: cut later than documents.
_SUMMARY_LIMIT = 2000
_TEXT_FIELDS = ("id", "document", "reference", "references", "prediction")


def chosen_evaluations(run: Run) -> list[Evaluated]:
    """One of each split that has summaries: of the validations the best, else the newest.

    Test comes first, validation last.
    """
    present = [evaluated for evaluated in run.evaluations if evaluated.predictions.is_file()]
    by_split = {evaluated.split: evaluated for evaluated in present}
    best = run.best_validation
    for evaluated in present:
        if best is not None and (evaluated.split, evaluated.step) == ("validation", best["step"]):
            by_split["validation"] = evaluated
    rank = {"test": 0, "validation": 2}
    return sorted(by_split.values(), key=lambda e: (rank.get(e.split, 1), e.split))


def browsable(runs: Sequence[Run], most_characters: int = MOST_CHARACTERS) -> list[dict[str, Any]]:
    """The summaries of all runs, as the page's script reads them.

    Each evaluation has "label", "metric" (by which to sort first), "fields" (names of the numbers)
    and "rows": [id, document, list of references, prediction, number, ...]; "cut" says in words
    what was left out to keep the page small.

    Args:
        most_characters: of all texts and numbers together, about.

    Raises:
        UserError: a predictions file can't be read.
    """
    chosen = [(run, evaluated) for run in runs for evaluated in chosen_evaluations(run)]
    made = []
    for run, evaluated in chosen:
        rows = read_predictions(evaluated.predictions)
        metric = run.best_metric if run.best_metric in METRICS else "rougeLsum"
        fitted = _fit(rows, metric, most_characters // len(chosen))
        label = evaluated.where if len(runs) == 1 else f"{run.name}: {evaluated.where}"
        made.append({"label": label, "run": run.name, "split": evaluated.split, **fitted})
    return made


def _fit(rows: list[dict[str, Any]], metric: str, most_characters: int) -> dict[str, Any]:
    fields = _fields(rows)
    rows = [{"id": number, **row} for number, row in enumerate(rows, start=1)]
    kept, note = rows, ""
    for limit in _DOCUMENT_LIMITS:
        shown, num_cut = _rows_of(kept, fields, limit)
        length = sum(map(_length, shown))
        if length <= most_characters:
            break
    else:
        count = max(2, int(len(rows) * most_characters / length))
        kept = _both_ends(rows, metric, count)
        shown, num_cut = _rows_of(kept, fields, limit)
        note = (
            f"To keep this page small it has {len(kept):,} of {len(rows):,} examples: the worst "
            f"and the best by {METRICS[metric]}. "
        )
    if num_cut:
        note += (
            f"Documents are shown up to {limit:,} characters, summaries and references up to "
            f"{max(limit, _SUMMARY_LIMIT):,}: {num_cut:,} examples are cut here, not in "
            "predictions.jsonl."
        )
    return {
        "metric": metric if metric in fields else "",
        "fields": fields,
        "rows": shown,
        "cut": note,
    }


def _fields(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the numbers that the rows have, ROUGE first."""
    found = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name not in _TEXT_FIELDS and _number(value) is not None
    )
    first = [name for name in METRICS if name in found]
    return [*first, *(name for name in found if name not in METRICS)]


def _number(value: Any) -> float | None:
    number = as_number(int(value) if isinstance(value, bool) else value)
    return None if number is None else float(f"{number:.4g}")


def _rows_of(
    rows: Sequence[Mapping[str, Any]], fields: Sequence[str], limit: int
) -> tuple[list[list[Any]], int]:
    """The rows with shortened texts, and how many were shortened."""
    shown, num_cut = [], 0
    long = max(limit, _SUMMARY_LIMIT)
    for row in rows:
        document, references = row.get("document"), references_of(row)
        texts = [*references, row["prediction"]]
        num_cut += any(len(text) > long for text in texts) or len(document or "") > limit
        shown.append(
            [
                str(row["id"]),
                None if document is None else _cut(document, limit),
                [_cut(text, long) for text in references],
                _cut(row["prediction"], long),
                *(_number(row.get(name)) for name in fields),
            ]
        )
    return shown, num_cut


def _cut(text: str, limit: int) -> str:
    left_out = len(text) - limit
    return text if left_out <= 0 else f"{text[:limit]} … [{left_out:,} more characters]"


def _length(row: list[Any]) -> int:
    texts = [row[0], row[1] or "", *row[2], row[3]]
    return sum(map(len, texts)) + 6 * len(row)


def _both_ends(rows: list[dict[str, Any]], metric: str, count: int) -> list[dict[str, Any]]:
    """So many of the rows, the worst and the best ones, in their order."""
    values = [as_number(row.get(metric)) for row in rows]
    order = sorted(
        range(len(rows)),
        key=lambda i: -math.inf if values[i] is None else values[i],  # type: ignore[arg-type,return-value]
    )
    ends = {*order[: (count + 1) // 2], *order[len(order) - count // 2 :]}
    return [rows[index] for index in sorted(ends)]
