"""What rouge.json and predictions.jsonl hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from t5_fsdp.evaluation import scoring
from t5_fsdp.evaluation.predictions import read_predictions
from t5_fsdp.evaluation.rouge import METRICS, RougeSettings
from t5_fsdp.evaluation.scoring import evaluate_rows
from t5_fsdp.evaluation.text_statistics import STATISTICS, mean_statistics

ROWS = [
    {"note": 1, "prediction": "a dog", "reference": "a dog ran", "document": "a dog ran off",
     "id": "x", "cut": True, "sentinels": 3},
    {"prediction": "...", "references": ["b", "c"], "id": "y", "cut": "yes", "rouge1": 9},
]  # fmt: skip


def test_rows_hold_texts_then_scores_then_statistics():
    rows = evaluate_rows(ROWS, RougeSettings()).rows
    texts = ["id", "document", "reference", "prediction"]
    assert list(rows[0]) == [*texts, *METRICS, *STATISTICS, "note"]
    assert list(rows[1])[:3] == ["id", "references", "prediction"]
    assert rows[0]["rouge1"] == 0.8 and rows[1]["rouge1"] == 0.0
    assert (rows[0]["cut"], rows[0]["sentinels"]) == (True, 3)
    assert (rows[1]["cut"], rows[1]["sentinels"]) == (None, 0)  # "yes" is no measurement


def test_the_summary_holds_counts_means_and_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    evaluation = evaluate_rows(ROWS, RougeSettings("t5"))
    summary = evaluation.summary
    assert summary["counts"]["predictions_without_words"] == 1
    assert summary["statistics"] == mean_statistics(evaluation.rows)
    assert any("score 0" in hint for hint in summary["hints"])
    evaluation.write(tmp_path / "new", {"num_beams": 2})
    stored = json.loads((tmp_path / "new" / "rouge.json").read_text())
    assert (stored["settings"]["preset"], stored["settings"]["num_beams"]) == ("t5", 2)
    assert stored["scores"] == summary["scores"] and "num_beams" not in summary["settings"]
    # Killed in between, an evaluation leaves no settings of other predictions behind.
    (tmp_path / "new" / "comparison.json").write_text("{}")
    monkeypatch.setattr(scoring, "write_predictions", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluation.write(tmp_path / "new", {})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["predictions.jsonl"]
    # Scoring the file again changes nothing.
    again = evaluate_rows(
        read_predictions(tmp_path / "new" / "predictions.jsonl"), RougeSettings("t5")
    )
    assert again.rows == evaluation.rows and again.summary == summary
