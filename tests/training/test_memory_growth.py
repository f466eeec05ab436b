"""A long run holds no more memory than a short one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_options
from tests.measure_memory import growth_a_step, sampled_run

# The caches of shapes go on filling for some 180 steps; the longer the line, the less its noise.
STEPS, WARM_UP = 400, 200


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_no_step_leaves_memory_behind(
    engine: str, pools: Any, corpus: Path, tmp_path: Path
) -> None:
    options = {
        "parallel.engine": engine, "train.max_steps": STEPS, "train.epochs": 1000,
        "logging.every_steps": 10, "logging.tensorboard": "true",
    }  # fmt: skip
    argv = tiny_options(corpus, tmp_path / "run", **options)
    [(code, err, samples)] = pools(1).run(sampled_run, argv)
    assert code == 0, err
    kept = [sample for sample in samples if sample.step > WARM_UP]
    assert len(kept) == (STEPS - WARM_UP) // 10
    # A list with one tensor that is kept at each step is two allocations, a row two dozen.
    assert growth_a_step(kept, "num_allocations") < 1
    # Shapes that are met for the first time raise it, by up to 10 kB a step here.
    assert growth_a_step(kept, "live_bytes") < 50_000
