"""The summaries that a page shows: which evaluations, and how much of their texts fits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from t5_fsdp.evaluation.predictions import read_predictions, references_of
from t5_fsdp.report.markup import script_text
from t5_fsdp.report.runs import METRICS, Evaluated, Run, as_number

# A page of this size opens at once, is sent by mail, and searches in a blink.
MOST_BYTES = 12_000_000
# Characters.
_DOCUMENT_LIMITS = (8000, 6000, 4000, 3000, 2000, 1500, 1000, 500, 250)
# References and summaries are what is compared: cut later than documents.
_SUMMARY_LIMIT = 2000
_ID_LIMIT = 200
_NAME_LIMIT = 80
_MOST_REFERENCES = 20  # of an example
_MOST_FIELDS = 30
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


def browsable(runs: Sequence[Run], most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The summaries of all runs, as the page's script reads them.

    Each evaluation has "label", "file" (where all of it is), "metric" (by which to sort first),
    "fields" (names of the numbers) and "rows": [id, document, list of references, prediction,
    number, ...]. A text of which the page has the beginning alone is [text, characters left out].
    "cut" says in words what was left out to keep the page small.

    Args:
        most_bytes: of all texts and numbers together, about.

    Raises:
        UserError: a predictions file can't be read.
    """
    chosen = [(run, evaluated) for run in runs for evaluated in chosen_evaluations(run)]
    made = []
    for run, evaluated in chosen:
        bad_lines: list[str] = []
        rows = read_predictions(evaluated.predictions, bad_lines.append)
        metric = run.best_metric if run.best_metric in METRICS else "rougeLsum"
        fitted = _fit(rows, metric, most_bytes // len(chosen))
        if bad_lines:
            fitted["cut"] += (
                f" Bytes that are no UTF-8 are shown as \ufffd in {len(bad_lines):,} lines."
            )
        label = evaluated.where if len(runs) == 1 else f"{run.name}: {evaluated.where}"
        file = str(evaluated.predictions.relative_to(run.folder))
        about = {"label": label, "run": run.name, "split": evaluated.split, "file": file}
        made.append({**about, **fitted})
    return made


def _fit(rows: list[dict[str, Any]], metric: str, most_bytes: int) -> dict[str, Any]:
    """As much of the rows as has room."""
    every_field = _fields(rows)
    fields = [name for name in every_field if len(name) <= _NAME_LIMIT][:_MOST_FIELDS]
    numbered = [{"id": number, **row} for number, row in enumerate(rows, start=1)]
    notes = []
    for limit in _DOCUMENT_LIMITS:
        shown = [_row_of(row, fields, limit) for row in numbered]
        sizes = [len(script_text(row).encode(errors="backslashreplace")) for row in shown]
        if sum(sizes) <= most_bytes:
            break
    else:
        shown = [shown[index] for index in _both_ends(rows, metric, sizes, most_bytes)]
        notes.append(
            f"To keep this page small it has {len(shown):,} of {len(rows):,} examples: the worst "
            f"and the best by {METRICS[metric]}."
        )
    num_cut = sum(_is_cut(row) for row in shown)
    if num_cut:
        notes.append(
            f"Documents are shown up to {limit:,} characters, summaries and references up to "
            f"{max(limit, _SUMMARY_LIMIT):,}: {num_cut:,} examples are cut here, not in "
            "predictions.jsonl."
        )
    if len(fields) < len(every_field):
        notes.append(f"It has {len(fields)} of the {len(every_field):,} columns of numbers.")
    most_references = max(len(references_of(row)) for row in rows)
    if most_references > _MOST_REFERENCES:
        notes.append(f"Of up to {most_references:,} references it has {_MOST_REFERENCES}.")
    return {
        "metric": metric if metric in fields else "",
        "fields": fields,
        "rows": shown,
        "cut": " ".join(notes),
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


def _row_of(row: Mapping[str, Any], fields: Sequence[str], limit: int) -> list[Any]:
    """A row as the page has it.

    Args:
        limit: characters of the document that are shown.
    """
    document, long = row.get("document"), max(limit, _SUMMARY_LIMIT)
    return [
        str(row["id"])[:_ID_LIMIT],
        None if document is None else _cut(document, limit),
        [_cut(text, long) for text in references_of(row)[:_MOST_REFERENCES]],
        _cut(row["prediction"], long),
        *(_number(row.get(name)) for name in fields),
    ]


def _cut(text: str, limit: int) -> str | list[str | int]:
    num_left_out = len(text) - limit
    return text if num_left_out <= 0 else [text[:limit], num_left_out]


def _is_cut(row: Sequence[Any]) -> bool:
    _, document, references, prediction = row[:4]
    return any(isinstance(text, list) for text in (document, *references, prediction))


def _both_ends(
    rows: Sequence[Mapping[str, Any]], metric: str, sizes: Sequence[int], most_bytes: int
) -> list[int]:
    """Places of the rows that have room, the worst and the best ones in turn, in their order."""
    values = [as_number(row.get(metric)) for row in rows]
    order = deque(
        sorted(
            range(len(rows)),
            key=lambda i: -math.inf if values[i] is None else values[i],  # type: ignore[arg-type,return-value]
        )
    )
    kept: list[int] = []
    num_bytes = 0
    while order:
        index = order.pop() if len(kept) % 2 else order.popleft()
        num_bytes += sizes[index]
        if num_bytes > most_bytes and len(kept) >= 2:
            break
        kept.append(index)
    return sorted(kept)
