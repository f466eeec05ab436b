"""Tables for the terminal."""

from __future__ import annotations

import numpy as np

from t5_fsdp.evaluation.rouge import Scores
from t5_fsdp.evaluation.tables import format_table


def summary_of(fmeasure: np.ndarray) -> dict:
    return Scores(fmeasure, fmeasure, fmeasure).summary()


def test_table_is_aligned_and_in_points():
    rows = {
        "model": summary_of(np.array([[0.4307, 0.197, 0.34789, 1.0]])),
        "lead baseline": summary_of(np.array([[0.316, 0.0, 0.278, 0.3]])),
    }
    assert format_table(rows).split("\n") == [
        "               ROUGE-1  ROUGE-2  ROUGE-L  ROUGE-Lsum",
        "model             43.1     19.7     34.8       100.0",
        "lead baseline     31.6      0.0     27.8        30.0",
    ]
