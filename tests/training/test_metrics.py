"""metrics.jsonl survives a kill in mid-line; numbers that JSON has not become null."""

from __future__ import annotations

import json
from pathlib import Path

from t5_fsdp.training.meters import Window
from t5_fsdp.training.metrics import MetricsFile


def test_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    MetricsFile(path).write("train", 2, loss=float("nan"), epoch=0.5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"kind": "train", "step": 1},
        {"kind": "train", "step": 2, "loss": None, "epoch": 0.5},
    ]


def test_window_is_weighted_by_tokens() -> None:
    window = Window(steps=2, loss_sum=30.0, source_tokens=60, target_tokens=20, padded_tokens=100)
    row = window.row()
    assert row["loss"] == 1.5
    assert abs(row["padding_share"] - 0.2) < 1e-12
