"""A rank that hangs is named by the others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.conftest import tiny_options
from tests.workers import run_command


def train_with_a_hang(argv: list[str], step: int, seconds: float) -> tuple[int, str, str]:
    """On a rank of the pool: train; rank 1 sleeps in front of a step."""
    from t5_fsdp.training.trainer import Trainer

    if os.environ["RANK"] != "1":
        return run_command("train", argv)
    take = Trainer._update

    def hang(self: Any, batch: Any, *args: Any) -> Any:
        if batch.step == step:
            time.sleep(seconds)
        return take(self, batch, *args)

    Trainer._update = hang  # type: ignore[method-assign]
    try:
        return run_command("train", argv)
    finally:
        Trainer._update = take  # type: ignore[method-assign]


def test_a_rank_that_hangs_is_named(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = {"train.collective_timeout_seconds": 3, "checkpoint.every_steps": 2}
    argv = tiny_options(corpus, tmp_path / "run", **options)
    results = pools(2).run(train_with_a_hang, argv, 4, 12.0)
    assert [code for code, _, _ in results] == [1, 1]
    said = results[0][2]
    assert "no answer from rank 1: it hangs, or is gone" in said
    assert "last good checkpoint:" in said and "step-00000002" in said
    assert results[1][2] == ""
