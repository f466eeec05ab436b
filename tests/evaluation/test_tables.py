"""Tables for the terminal."""

from __future__ import annotations

import numpy as np

from t5_fsdp.evaluation.rouge import Scores
from t5_fsdp.evaluation.tables import format_changes, format_comparison, format_table


def summary_of(fmeasure: np.ndarray) -> dict:
    return Scores(fmeasure, fmeasure, fmeasure).summary()


def test_table_is_aligned_and_in_points():
    rows = [
        ("model", summary_of(np.array([[0.4307, 0.197, 0.34789, 1.0]]))),
        ("lead baseline", summary_of(np.array([[0.316, 0.0, 0.278, 0.3]]))),
        ("model", summary_of(np.array([[0.1, 0.0, 0.0, 0.0]]))),  # a folder of that name
    ]
    assert format_table(rows).split("\n") == [
        "               ROUGE-1  ROUGE-2  ROUGE-L  ROUGE-Lsum",
        "model             43.1     19.7     34.8       100.0",
        "lead baseline     31.6      0.0     27.8        30.0",
        "model             10.0      0.0      0.0         0.0",
    ]


def test_differences_are_aligned_and_in_points():
    values = {"difference": 0.0123, "difference_low": -0.004, "difference_high": 0.0456,
              "share_below_zero": 0.031, "wins": 12, "ties": 3, "losses": 4}  # fmt: skip
    metrics = dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), values)
    lines = format_comparison(metrics, "lead").split("\n")
    assert lines[0].startswith("difference to lead;")
    assert lines[1] == "          points  95 % interval   below 0   win / tie / lose"
    assert lines[5] == "ROUGE-Lsum  +1.2  [-0.4, +4.6]      3.1 %   12 / 3 / 4"
    assert lines[2] == lines[5].replace("ROUGE-Lsum", "ROUGE-1   ")


def test_changes_are_shown_with_their_texts():
    change = {"id": "x", "fmeasure": 0.75, "baseline_fmeasure": 0.5, "reference": "r " * 99,
              "prediction": "p", "baseline_prediction": "b"}  # fmt: skip
    lines = format_changes({"gains": [change], "losses": []}, "lead").split("\n")
    assert lines[:2] == ["largest gains over lead", "ROUGE-Lsum +25.0, example x"]
    assert lines[2].startswith("  reference: r r r") and lines[2].endswith(" ...")
    assert lines[3:] == ["  prediction: p", "  lead: b"]
    assert format_changes({"gains": [], "losses": []}, "lead") == "no example differs"
