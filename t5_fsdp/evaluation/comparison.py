"""Two systems on the same examples: paired differences, and where they differ most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.bootstrap import (
    CONFIDENCE,
    RESAMPLES,
    percentiles,
    resampled_means,
)
from t5_fsdp.evaluation.predictions import references_of
from t5_fsdp.evaluation.rouge import METRICS, Scores
from t5_fsdp.quantities import counted

CHANGE_METRIC = "rougeLsum"  # by which the largest changes are found
_NUM_CHANGES = 5
_SHOWN_CHARACTERS = 300


def align(
    rows: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    name: str,
    other_name: str,
) -> list[str]:
    """The predictions of `others` in the order of `rows`: by id where both have one, else by place.

    Raises:
        UserError: another number of examples, an id that the other one lacks, or an example with
            other references.
    """
    if len(rows) != len(others):
        raise UserError(
            f"{name} has {counted(len(rows), 'example')} and {other_name} {len(others):,}; compare "
            "predictions of the same examples"
        )
    if "id" in rows[0] and "id" in others[0]:
        by_id = {str(row["id"]): row for row in others}
        missing = [row["id"] for row in rows if str(row["id"]) not in by_id]
        if missing:
            raise UserError(
                f"{len(missing):,} of the {len(rows):,} ids of {name} are not in {other_name}, the "
                f"first is {missing[0]!r}; compare predictions of the same examples"
            )
        others = [by_id[str(row["id"])] for row in rows]
    for number, (row, other) in enumerate(zip(rows, others, strict=True), start=1):
        if references_of(row) != references_of(other):
            which = f"id {row['id']!r}" if "id" in row else f"number {number}"
            raise UserError(
                f"example {which} has another reference in {name} than in {other_name}; compare "
                "predictions of the same data"
            )
    return [other["prediction"] for other in others]


def compare(scores: Scores, baseline: Scores, seed: int = 1) -> dict[str, dict[str, float]]:
    """By metric: means of both, and the mean difference of the F-measures (`scores` - `baseline`).

    difference_low and difference_high bound its 95 % percentile interval over resamples of the
    examples, the same for both systems (paired bootstrap); share_below_zero is the share of the
    resamples in which the baseline is better. wins, ties and losses count examples.
    """
    differences = scores.fmeasure - baseline.fmeasure
    mean, means = differences.mean(axis=0), resampled_means(differences, seed)
    low, _, high = percentiles(means, mean)
    columns = {
        "fmeasure": scores.fmeasure.mean(axis=0),
        "baseline_fmeasure": baseline.fmeasure.mean(axis=0),
        "difference": mean,
        "difference_low": low,
        "difference_high": high,
        "share_below_zero": (means < 0).mean(axis=0),
        "wins": (differences > 0).sum(axis=0),
        "ties": (differences == 0).sum(axis=0),
        "losses": (differences < 0).sum(axis=0),
    }
    return {
        metric: {name: values[index].item() for name, values in columns.items()}
        for index, metric in enumerate(METRICS)
    }


def largest_changes(
    rows: Sequence[Mapping[str, Any]],
    baseline_predictions: Sequence[str],
    scores: Scores,
    baseline: Scores,
) -> dict[str, list[dict[str, Any]]]:
    """The examples with the largest gains and losses of rougeLsum, largest first, texts shortened.

    Without an id of their own, examples are named by their number, from 1.
    """
    column = METRICS.index(CHANGE_METRIC)
    differences = scores.fmeasure[:, column] - baseline.fmeasure[:, column]
    order = np.argsort(-differences, kind="stable")
    gains = [index for index in order[:_NUM_CHANGES] if differences[index] > 0]
    losses = [index for index in order[::-1][:_NUM_CHANGES] if differences[index] < 0]

    def describe(index: int) -> dict[str, Any]:
        return {
            "id": rows[index].get("id", int(index) + 1),
            "fmeasure": float(scores.fmeasure[index, column]),
            "baseline_fmeasure": float(baseline.fmeasure[index, column]),
            "reference": shorten(" / ".join(references_of(rows[index]))),
            "prediction": shorten(rows[index]["prediction"]),
            "baseline_prediction": shorten(baseline_predictions[index]),
        }

    return {"gains": [*map(describe, gains)], "losses": [*map(describe, losses)]}


def settings_of_comparison(seed: int = 1) -> dict[str, Any]:
    """Of comparison.json: how the intervals were made."""
    return {"confidence": CONFIDENCE, "bootstrap_resamples": RESAMPLES, "bootstrap_seed": seed}


def shorten(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """The text on one line, its end left out if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ..."
