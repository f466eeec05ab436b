"""Optimizers through checkpoints: a resumed run equals the unbroken one, whatever its moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import read_metrics, tiny_options
from tests.distributed.test_training import DROPOUT, final_weights, losses, train

BF16 = {"optimizer.moments_dtype": "bf16"}
ADAFACTOR = {"optimizer.name": "adafactor"}
WHOLE = {"parallel.engine": "fsdp1", "parallel.sharding": "no_shard"}


@pytest.mark.parametrize(
    "options",
    [
        ADAFACTOR,
        BF16,
        {**BF16, "parallel.engine": "fsdp1"},
        pytest.param({**BF16, "parallel.engine": "ddp"}, marks=pytest.mark.long),
        pytest.param({**ADAFACTOR, "parallel.engine": "ddp"}, marks=pytest.mark.long),
        pytest.param({**ADAFACTOR, **WHOLE}, marks=pytest.mark.long),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_six_steps_equal_three_and_three(
    pools: Any, corpus: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    # Wide enough to be factored.
    shape = DROPOUT["model.config"].replace('"d_ff": 64', '"d_ff": 128').replace("32", "128")
    steps = {"model.config": shape, "train.max_steps": 6, "checkpoint.every_steps": 3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pools(2), corpus, whole, **{**DROPOUT, **steps, **options})
    half = whole / "checkpoints" / "step-00000003"
    train(pools(2), corpus, parts, **{**DROPOUT, **steps, **options, "checkpoint.resume": half})
    assert losses(parts) == losses(whole)[3:]
    expected, found = final_weights(whole, 6), final_weights(parts, 6)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        (4, {}),
        pytest.param(1, {"parallel.engine": "ddp"}, marks=pytest.mark.long),
        pytest.param(2, WHOLE, marks=pytest.mark.long),
    ],
)
def test_adafactor_goes_on_under_another_engine_and_number_of_ranks(
    pools: Any, corpus: Path, tmp_path: Path, world_size: int, engine: dict[str, str]
) -> None:
    whole = tmp_path / "whole"
    options = {**ADAFACTOR, "checkpoint.every_steps": 3, "train.max_steps": 6}
    train(pools(2), corpus, whole, **options)
    half = whole / "checkpoints" / "step-00000003"
    parts = tmp_path / "parts"
    train(pools(world_size), corpus, parts, **{**options, **engine, "checkpoint.resume": half})
    assert losses(parts) == pytest.approx(losses(whole)[3:], rel=1e-5)


def stored_dtypes(checkpoint: Path) -> set[torch.dtype]:
    from torch.distributed.checkpoint import FileSystemReader

    tensors = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        value.properties.dtype for name, value in tensors.items() if name.endswith("exp_avg_sq")
    }


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.long)])
def test_moments_are_converted_when_their_dtype_changes(
    pools: Any, corpus: Path, tmp_path: Path, engine: str
) -> None:
    options = {"parallel.engine": engine}
    run_dir, exact = tmp_path / "run", tmp_path / "exact"
    train(pools(2), corpus, exact, **options)
    for last, dtype in ((3, "fp32"), (6, "bf16"), (10, "fp32")):
        moments = {"optimizer.moments_dtype": dtype, "train.max_steps": last}
        train(pools(2), corpus, run_dir, **{**options, **moments})
        stored = stored_dtypes(run_dir / "checkpoints" / f"step-{last:08d}")
        assert stored == {torch.bfloat16 if dtype == "bf16" else torch.float32}
    assert losses(run_dir) == pytest.approx(losses(exact), rel=2e-3)
    assert losses(run_dir)[:4] == losses(exact)[:4] and losses(run_dir) != losses(exact)


def test_another_optimizer_cannot_go_on(pools: Any, corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(pools(2), corpus, run_dir, **{"train.max_steps": 2})
    before = sorted(run_dir.rglob("*"))
    options = tiny_options(corpus, run_dir, **{**ADAFACTOR, "train.max_steps": 4})
    code, _, err = pools(2).command("train", options)
    assert code == 2 and len(err.strip().splitlines()) == 1
    for part in ("error: ", "optimizer.name: adamw", "adafactor", "step-00000002", "model.name"):
        assert part in err
    assert sorted(run_dir.rglob("*")) == before and len(read_metrics(run_dir, "train")) == 2
