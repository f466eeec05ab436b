"""A signal in the middle of training: an agreed stop, a checkpoint, and on from there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.conftest import read_metrics, tiny_options
from tests.workers import run_command


def train_with_signal(argv: list[str], metrics: Path, signalled_rank: int) -> tuple[int, str, str]:
    """On a rank of the pool: train, and get SIGUSR1 once three steps are logged."""

    def send() -> None:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    if int(os.environ["RANK"]) == signalled_rank:
        threading.Thread(target=send, daemon=True).start()
    return run_command("train", argv)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    options = {"train.max_steps": 60, "evaluation.max_examples": 2}
    whole = tmp_path / "whole"
    code, _, err = pools(2).command("train", tiny_options(corpus, whole, **options))
    assert code == 0, err
    for rank in (0, 1):
        run_dir = tmp_path / f"run-{rank}"
        argv = tiny_options(corpus, run_dir, **options)
        results = pools(2).run(train_with_signal, argv, run_dir / "metrics.jsonl", rank)
        assert [code for code, _, _ in results] == [75, 75], results
        status = json.loads((run_dir / "status.json").read_text())
        assert status["state"] == "preempted" and 3 <= status["step"] < 60
        assert status["checkpoint"].endswith(f"step-{status['step']:08d}")
        assert not read_metrics(run_dir, "validation")
        code, out, err = pools(2).command("train", argv)
        assert code == 0, err
        assert f"(step {status['step']})" in out
        assert [row["loss"] for row in read_metrics(run_dir, "train")] == [
            row["loss"] for row in read_metrics(whole, "train")
        ]


def train_with_signal_in_validation(argv: list[str], signalled_rank: int) -> Any:
    """On a rank of the pool: train, and get SIGTERM when the first summaries are decoded."""
    from t5_fsdp.evaluation import generation

    deal = generation.deal_batches

    def deal_and_send(*args: Any) -> list[int]:
        if int(os.environ["RANK"]) == signalled_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return deal(*args)

    generation.deal_batches = deal_and_send  # type: ignore[assignment]
    try:
        return run_command("train", argv)
    finally:
        generation.deal_batches = deal


def test_a_signal_in_a_validation_stops_it(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = {"train.max_steps": 6, "evaluation.every_steps": 3}
    for rank in (0, 1):
        run_dir = tmp_path / f"run-{rank}"
        argv = tiny_options(corpus, run_dir, **options)
        results = pools(2).run(train_with_signal_in_validation, argv, rank)
        assert [code for code, _, _ in results] == [75, 75], results
        status = json.loads((run_dir / "status.json").read_text())
        assert status["state"] == "preempted" and status["step"] == 3
        assert status["checkpoint"].endswith("step-00000003")
        assert not read_metrics(run_dir, "validation")
        code, _, err = pools(2).command("train", argv)
        assert code == 0, err
        # The one that was left out is made up for.
        assert [row["step"] for row in read_metrics(run_dir, "validation")] == [3, 6]
