"""When memory runs out the user hears where and what helps, and no rank is left waiting."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from t5_fsdp.config import OptimizerConfig, ParallelConfig, TrainConfig
from t5_fsdp.errors import is_out_of_memory
from t5_fsdp.model.activations import MicroBatchShape
from t5_fsdp.parallel.wrapping import blocks_at_work
from t5_fsdp.training.out_of_memory import Settings, advice, remedies
from tests.conftest import tiny_options
from tests.workers import run_command

GIB = 2**30
SETTINGS = Settings(
    ParallelConfig(activation_checkpointing="none"),
    OptimizerConfig(),
    TrainConfig(micro_batch_tokens=8192),
    MicroBatchShape(rows=12, source=512, target=150),
    longest_example=662,
)


def estimate(settings: Settings) -> int:
    """Round numbers: 20 GiB of activations, 8 of which full checkpointing leaves 1, 16 of state."""
    forward, parallel = settings.forward, settings.parallel
    activations = 20 * GIB * forward.rows * (forward.source + forward.target) // (12 * 662)
    if parallel.activation_checkpointing == "full":
        activations //= 20
    state = 8 * GIB
    if settings.optimizer.name == "adafactor":
        state = 0
    elif settings.optimizer.moments_dtype == "bf16":
        state //= 2
    return activations + (0 if parallel.cpu_offload else 8 * GIB + state)


def test_advice_comes_with_its_bytes_and_the_cheapest_first() -> None:
    lines = advice(SETTINGS, estimate, world_size=8, on_gpu=True)
    assert lines == [
        "parallel.activation_checkpointing: full saves about 19.0 GiB of 36.0 GiB (up to a third "
        "more arithmetic)",
        "train.micro_batch_tokens: 3972 (now 8192; this one had 7944) saves about 10.0 GiB of "
        "36.0 GiB (the same numbers, in more micro-batches)",
        "parallel.cpu_offload: true saves about 16.0 GiB of 36.0 GiB (much slower; weights, "
        "gradients and optimizer state in host memory)",
        "optimizer.name: adafactor (with lr 1e-3, see docs/optimization.md) saves about 8.0 GiB of "
        "36.0 GiB (another optimizer: a run that AdamW began can't go on with it)",
        "optimizer.moments_dtype: bf16 saves about 4.0 GiB of 36.0 GiB (moments are rounded)",
    ]


def changes(settings: Settings, world_size: int = 8, on_gpu: bool = True) -> list[str]:
    found = remedies(settings, world_size=world_size, on_gpu=on_gpu)
    return [remedy.change.split(":")[0] for remedy in found]


def test_only_what_is_left_is_advised() -> None:
    sparing = Settings(
        ParallelConfig(cpu_offload=True, sync_every_micro_batch=True),
        OptimizerConfig(name="adafactor"),
        TrainConfig(loss_chunk_rows=32),
        MicroBatchShape(rows=1, source=512, target=150),
        longest_example=662,
    )
    assert changes(sparing) == ["data.max_source_tokens"]
    assert advice(sparing, lambda _: GIB, world_size=8, on_gpu=True) == [
        "no option is left that saves much: take more devices, or a smaller model"
    ]
    ddp = replace(SETTINGS, parallel=ParallelConfig(engine="ddp"))
    assert "parallel.engine" in changes(ddp)
    assert "parallel.engine" not in changes(ddp, world_size=1)
    kept = replace(SETTINGS, parallel=ParallelConfig(sharding="shard_grad_op"))
    assert "parallel.sharding" in changes(kept)
    assert "parallel.cpu_offload" not in changes(SETTINGS, on_gpu=False)
    fsdp1 = replace(SETTINGS, parallel=ParallelConfig(engine="fsdp1"))
    assert "optimizer.name" not in changes(fsdp1)
    bf16 = replace(SETTINGS, optimizer=OptimizerConfig(moments_dtype="bf16"))
    [adafactor] = [
        remedy
        for remedy in remedies(bf16, world_size=8, on_gpu=True)
        if remedy.change.startswith("optimizer")
    ]
    assert adafactor.after.optimizer == OptimizerConfig(name="adafactor")


@pytest.mark.parametrize(
    ("longest", "advised"), [(662, 3972), (5000, 5000), (7944, None), (8192, None)]
)
def test_a_micro_batch_has_to_hold_the_longest_example(longest: int, advised: int | None) -> None:
    lines = advice(replace(SETTINGS, longest_example=longest), None, world_size=8, on_gpu=True)
    found = [line for line in lines if line.startswith("train.micro_batch_tokens")]
    assert [int(line.split()[1]) for line in found] == ([advised] if advised else [])
    assert not any("max_source_tokens" in line for line in lines)


def test_without_an_estimate_all_are_named() -> None:
    lines = advice(SETTINGS, None, world_size=2, on_gpu=False)
    assert lines[0].startswith("train.micro_batch_tokens: 3972")
    assert any("bf16" in line for line in lines) and not any("GiB" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (MemoryError(), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("can't allocate memory"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
    ],
)
def test_errors_are_told_apart(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def train_with_too_little_memory(argv: list[str], poor: int, in_optimizer: bool) -> Any:
    """On a rank of the pool: train; one rank asks for a PiB in its fourth step."""
    from t5_fsdp.training.trainer import Trainer

    began, compute = time.monotonic(), Trainer._compute_gradients

    def ask(*_: Any) -> None:
        torch.empty(2**50, dtype=torch.uint8)

    def compute_and_ask(self: Any, batch: Any) -> Any:
        if batch.step == 4 and in_optimizer:
            self._optimizer.register_step_pre_hook(ask)
        elif batch.step == 4:
            blocks_at_work(self._engine.model)[-1].register_forward_pre_hook(ask)
        return compute(self, batch)

    if os.environ["RANK"] == str(poor):
        Trainer._compute_gradients = compute_and_ask  # type: ignore[method-assign]
    try:
        return *run_command("train", argv), time.monotonic() - began
    finally:
        Trainer._compute_gradients = compute  # type: ignore[method-assign]


@pytest.mark.parametrize(("poor", "in_optimizer"), [(1, False), (0, True)])
def test_one_rank_out_of_memory_ends_the_run_on_all(
    pools: Any, corpus: Path, tmp_path: Path, poor: int, in_optimizer: bool
) -> None:
    options = {
        "parallel.activation_checkpointing": "none",
        "checkpoint.every_steps": 2,
        "train.micro_batch_tokens": 5000,
        # The ranks of the pool live on, so only this ends what the other one waits for.
        "train.collective_timeout_seconds": 5,
    }
    argv = tiny_options(corpus, tmp_path / "run", **options)
    results = pools(2).run(train_with_too_little_memory, argv, poor, in_optimizer)
    assert [code for code, *_ in results] == [2, 2]
    assert results[1 - poor][2] == ""  # the other one has nothing to say
    lines = results[poor][2].splitlines()
    where = r"the optimizer's step" if in_optimizer else r"micro-batch 1 of 1 \(\d+ x \d+ source"
    assert re.match(rf"error: out of memory on rank {poor} at step 4, {where}", lines[0])
    assert "asking for 1125899906842624 bytes; this process takes" in lines[0]
    saving = [line for line in lines[1:] if " saves about " in line]
    assert "optimizer.name: adafactor" in "".join(saving)  # of so small a model it is the most
    assert "train.micro_batch_tokens" in "".join(saving)
    assert max(seconds for *_, seconds in results) < 25


def train_without_memory_for_validation(argv: list[str]) -> Any:
    """On a rank of the pool: train; the loss of the validation asks for a PiB."""
    from t5_fsdp.evaluation import evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            evaluate, "validation_loss", lambda *_, **__: torch.empty(2**50, dtype=torch.uint8)
        )
        return run_command("train", argv)


def test_a_validation_out_of_memory_is_told_and_its_traceback_is_in_the_log(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    argv = tiny_options(corpus, tmp_path / "run", **{"train.max_steps": 1})
    ((code, _, err),) = pools(1).run(train_without_memory_for_validation, argv)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: out of memory on rank 0, outside of training steps")
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert line in log and "Traceback" in log and "in validate" in log
