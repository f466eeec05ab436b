"""All figures of an evaluation: what rouge.json and predictions.jsonl hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5_fsdp.console import Console
from t5_fsdp.data.tokenization import Encoder
from t5_fsdp.evaluation.hard_texts import count_hard_texts, count_lost_characters, hints_of
from t5_fsdp.evaluation.own_metric import Metric, call_metric
from t5_fsdp.evaluation.predictions import references_of, write_predictions, write_rouge
from t5_fsdp.evaluation.rouge import RougeSettings, Scores, score_pairs
from t5_fsdp.evaluation.text_statistics import Value, mean_statistics, text_statistics
from t5_fsdp.evaluation.workers import map_in_workers
from t5_fsdp.files import json_number

_TEXT_FIELDS = ("id", "document", "reference", "references", "prediction")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One system on some examples.

    Attributes:
        rows: of predictions.jsonl: texts, then ROUGE, then `text_statistics.STATISTICS`.
        summary: of rouge.json: `Scores.summary`, "counts", "statistics" (means) and "hints", and
            "metrics" of the caller's own metric, null where not finite.
        metrics: the latter as they are.
    """

    scores: Scores
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)

    def write(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """rouge.json and predictions.jsonl in `folder`.

        Args:
            settings: how the summaries were made, added to how they were scored.

        Raises:
            OSError: a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # Its settings vouch for the predictions beside it: `predictions.stored_rows`.
        (folder / "rouge.json").unlink(missing_ok=True)
        (folder / "comparison.json").unlink(missing_ok=True)  # it is of those predictions, too
        all_settings = {**self.summary["settings"], **settings}
        write_predictions(folder / "predictions.jsonl", self.rows)
        write_rouge(folder / "rouge.json", {**self.summary, "settings": all_settings})


def add_lead_baseline(folder: Path, scores: Scores) -> None:
    """Write the lead baseline's scores on the same examples into an evaluation's rouge.json.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = folder / "rouge.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    write_rouge(path, {**summary, "lead_baseline": scores.summary()["scores"]})


def evaluate_rows(
    rows: Sequence[Mapping[str, Any]],
    settings: RougeSettings,
    *,
    processes: int = 1,
    encoder: Encoder | None = None,
    console: Console | None = None,
    metric: Metric | None = None,
) -> Evaluation:
    """Score examples.

    Args:
        rows: "prediction" and "reference" or "references" of each, and what is known of "id",
            "document", "cut" and "sentinels"; other fields are kept.
        settings: of ROUGE.
        processes: how many work at the same time; the figures don't depend on it.
        encoder: of the model's tokenizer, to count what its vocabulary can't write.
        console: tells how far it is.
        metric: one of the caller's own, whose figures are "metrics" of the summary.

    Raises:
        UserError: there is no row, or the metric gives no figures.
    """
    predictions = [row["prediction"] for row in rows]
    references = [references_of(row) for row in rows]
    scores = score_pairs(predictions, references, settings, processes, console)
    statistics = map_in_workers(_statistics_of, rows, processes, console, "statistics")
    counts = count_hard_texts(predictions, references, settings.tokenizer)
    if encoder is not None:
        counts |= count_lost_characters(encoder, references)
    means = mean_statistics(statistics)
    summary = scores.summary() | {
        "counts": counts,
        "statistics": means,
        "hints": hints_of(counts, means, len(rows), settings.tokenizer),
    }
    metrics: dict[str, float] = {}
    if metric is not None:
        metrics = call_metric(metric, predictions, references)
        summary["metrics"] = {name: json_number(value) for name, value in metrics.items()}
    joined = [*map(_joined, rows, scores.rows(), statistics)]
    return Evaluation(scores, joined, summary, metrics)


def _statistics_of(row: Mapping[str, Any]) -> dict[str, Value]:
    cut, sentinels = row.get("cut"), row.get("sentinels")
    return text_statistics(
        row["prediction"],
        references_of(row),
        row.get("document"),
        # In a file from elsewhere the names may mean something else.
        cut if isinstance(cut, bool) else None,
        sentinels if type(sentinels) is int and sentinels >= 0 else None,
    )


def _joined(
    row: Mapping[str, Any], scores: Mapping[str, float], statistics: Mapping[str, Value]
) -> dict[str, Any]:
    texts = {name: row[name] for name in _TEXT_FIELDS if name in row}
    return {**texts, **scores, **statistics, **{k: v for k, v in row.items()
            if k not in texts and k not in scores and k not in statistics}}  # fmt: skip
