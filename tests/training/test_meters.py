"""A step's time is divided exactly, on a host's clock and on a GPU's; a row has every figure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from t5_fsdp.data.batching import StepBatch
from t5_fsdp.data.token_sums import TokenSums
from t5_fsdp.model.flops import T5Shape, training_flops
from t5_fsdp.training.memory_use import MemoryMeter, largest, peak_resident_bytes, resident_bytes
from t5_fsdp.training.meters import PHASES, Meters, Window, slowest
from t5_fsdp.training.metrics import describe, describe_briefly, scalar_name
from t5_fsdp.training.stopwatch import DeviceTimeline, HostTimeline, Stopwatch
from tests.conftest import read_metrics, tiny_options
from tests.measure_overhead import measure
from tests.workers import joined_world, run_command

SHAPE = T5Shape(
    d_model=8, inner=8, d_ff=16, decoder_d_ff=16, ff_matrices=2, vocab=32,
    encoder_layers=1, decoder_layers=1,
)  # fmt: skip


class Device:
    """A GPU's queue: work takes device time, and events pass when it is done up to them."""

    def __init__(self) -> None:
        self.asked = self.done = 0.0  # milliseconds of work
        self.waits = 0

    def make_event(self) -> Any:
        device = self

        class Event:
            at = math.nan

            def record(self) -> None:
                self.at = device.asked

            def query(self) -> bool:
                return device.done >= self.at

            def synchronize(self) -> None:
                device.waits += 1
                device.done = max(device.done, self.at)

            def elapsed_time(self, other: Event) -> float:
                assert self.query() and other.query()  # CUDA raises
                return other.at - self.at

        return Event()


def test_laps_on_a_device_are_read_without_waiting_for_it() -> None:
    device = Device()
    stopwatch = Stopwatch(DeviceTimeline(device.make_event))
    for _ in range(3):
        stopwatch.begin()
        for name, milliseconds in (("forward", 10.0), ("backward", 20.0), ("forward", 5.0)):
            device.asked += milliseconds
            stopwatch.lap(name)
        device.done = device.asked - 5.0  # the host is ahead by a lap
        device.asked += 100.0  # between two steps
        assert device.waits == 0
    assert len(stopwatch._open) <= 4  # what is past is not kept
    found = stopwatch.take()
    assert device.waits == 1
    assert found == pytest.approx({"forward": 0.045, "backward": 0.060})
    assert stopwatch.take() == {} and device.waits == 1


def test_laps_on_the_host_add_up_to_the_step() -> None:
    clock = itertools.accumulate([100.0, 0.5, 1.0, 2.0, 0.25])
    stopwatch = Stopwatch(HostTimeline(lambda: next(clock)))
    stopwatch.begin()
    for name in ("data", "forward", "backward", "forward"):
        stopwatch.lap(name)
    assert stopwatch.take() == {"data": 0.5, "forward": 1.25, "backward": 2.0}


def test_spans_are_of_the_modules_alone_and_only_meanwhile() -> None:
    now = [0.0]

    class Layer(nn.Module):
        def forward(self, seconds: float) -> float:
            now[0] += seconds
            return seconds

    first, second = Layer(), Layer()
    stopwatch = Stopwatch(HostTimeline(lambda: now[0]))
    with stopwatch.spans_of([first, second], "work"):
        first(3.0)
        now[0] += 100.0
        second(4.0)
    first(50.0)
    assert stopwatch.take() == {"work": 7.0}
    assert not first._forward_hooks and not first._forward_pre_hooks


def make_batch(step: int, examples: int) -> StepBatch:
    return StepBatch(
        step=step,
        epoch=0.5,
        micro_batches=[],
        micro_batch_names=lambda: [],
        num_examples=examples,
        examples_seen=step * examples,
        tokens=TokenSums.of_equal(10, 4, examples),
        padded_tokens=20 * examples,
    )


def measured_rows(work: list[float]) -> list[dict[str, Any]]:
    """On a rank of the pool: a row of three steps on a clock that is given, and one of one step."""
    now = [50.0]
    rows = []

    def wait(seconds: float) -> None:
        now[0] += seconds

    with joined_world() as world:
        block = nn.Identity()
        block.register_forward_hook(lambda *_: wait(work[world.rank]))

        def make_meters(window: dict[str, Any]) -> Meters:
            return Meters(
                world,
                shape=SHAPE,
                peak_flops=1e6,
                window=json.loads(json.dumps(window)),
                blocks=[block],
                now=lambda: now[0],
                timeline=HostTimeline(lambda: now[0]),
            )

        meters = make_meters({})
        for step in (1, 2, 3, 4):
            meters.begin_step(is_sampled=step >= 3)
            wait(0.25)
            meters.lap("data")
            block(torch.ones(1))
            meters.lap("forward")
            wait(10.0 - work[world.rank])
            meters.lap("backward")
            wait(0.5 + world.rank)
            meters.lap("optimizer")
            wait(1.5 - world.rank)
            meters.lap("communication")
            meters.end_step()
            meters.count(make_batch(step, 6), 12.0, True)
            with meters.outside_steps("checkpoint"):
                wait(3.0)
            with meters.outside_steps("evaluation"):
                wait(5.0)
            if step == 2:  # a resume
                meters = make_meters(meters.to_json())
            if step >= 3:
                rows.append(meters.row())
        share = meters.evaluation_share
    return [*rows, {"share": share}]


def test_rows_of_two_ranks_are_right_by_hand(pools: Any) -> None:
    results = pools(2).run(measured_rows, [2.0, 5.0])
    for three, one, end in results:
        assert one["loss"] == three["loss"] == 12.0 / 24
        assert three["step_seconds"] == one["step_seconds"] == pytest.approx(12.25)
        assert three["sequences_per_second"] == pytest.approx(18 / 36.75, rel=1e-12)
        assert one["tokens_per_second"] == pytest.approx(6 * 14 / 12.25, rel=1e-12)
        assert three["padding_share"] == pytest.approx(0.3)
        # Means of the ranks and steps.
        expected = {"data": 0.25, "forward": 3.5, "backward": 6.5, "optimizer": 1.0,
                    "communication": 1.0}  # fmt: skip
        for row in (three, one):
            found = {phase: row[f"{phase}_seconds"] for phase in PHASES}
            assert found == pytest.approx(expected)
        # In between steps; a window's row comes before the step's own checkpoint.
        assert (three["checkpoint_seconds"], one["checkpoint_seconds"]) == (9.0, 3.0)
        assert (three["evaluation_seconds"], one["evaluation_seconds"]) == (15.0, 5.0)
        # Of the last step, with its data: 2.25 and 5.25 seconds.
        assert three["slowest_rank"] == 1
        assert three["slowest_rank_ratio"] == pytest.approx(5.25 / 3.75)
        assert one["mfu"] == pytest.approx(training_flops(SHAPE, 10, 4, 6) / 12.25 / 1e6)
        assert end["share"] == pytest.approx(10.0 / (2 * 20.25))


def test_the_slowest_rank_is_unknown_where_no_blocks_are() -> None:
    assert slowest([1.0, 0.0]) == {"slowest_rank": None, "slowest_rank_ratio": None}
    assert slowest([1.0, 4.0, 2.0]) == {"slowest_rank": 1, "slowest_rank_ratio": 2.0}


def test_a_window_is_resumed_also_from_another_version() -> None:
    window = Window(steps=2, examples=8, seconds=3.0, data_seconds=1.0, checkpoint_seconds=2.0)
    assert Window.from_json(json.loads(json.dumps(window.to_json()))) == window
    old = Window.from_json({"steps": 1, "loss_sum": 4.0, "target_tokens": 2, "of_another": 1.0})
    assert old.row()["loss"] == 2.0 and old.data_seconds == 0.0


def test_memory_of_a_host() -> None:
    before = resident_bytes()
    block = torch.ones(2**24)  # 64 MiB
    now = resident_bytes()
    assert now - before == pytest.approx(block.nbytes, rel=0.1)
    assert peak_resident_bytes() >= 0.99 * now
    found = MemoryMeter(torch.device("cpu")).read()
    figures = largest([found, [value / 2 for value in found]])
    assert figures["resident_memory_bytes"] == int(found[4])
    assert figures["peak_memory_bytes"] >= figures["resident_memory_bytes"]
    assert figures["allocated_memory_bytes"] is figures["allocator_retries"] is None
    assert largest([[1.0, 2.0, 3.0, 0.0, 5.0], [2.0, 1.0, 1.0, 4.0, 1.0]]) == {
        "peak_memory_bytes": 2, "allocated_memory_bytes": 2, "reserved_memory_bytes": 3,
        "allocator_retries": 4, "resident_memory_bytes": 5,
    }  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_and_laps_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    meter = MemoryMeter(device)
    meter.read()
    block = torch.ones(2**26, device=device)
    del block
    small = torch.ones(2**20, device=device)
    figures = largest([meter.read()])
    assert figures["peak_memory_bytes"] - figures["allocated_memory_bytes"] >= 2**28 - 2**22
    assert figures["allocated_memory_bytes"] >= small.nbytes
    assert figures["allocator_retries"] == 0
    again = largest([meter.read()])
    assert again["peak_memory_bytes"] == again["allocated_memory_bytes"]
    stopwatch = Stopwatch(DeviceTimeline())
    matrix = torch.ones(4096, 4096, device=device)
    matrix @ matrix
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stopwatch.begin()
    began.record()
    for _ in range(20):
        matrix @ matrix
    ended.record()
    stopwatch.lap("forward")
    found = stopwatch.take()["forward"]
    assert found == pytest.approx(began.elapsed_time(ended) / 1e3, rel=0.05, abs=1e-4)


ROW = {
    "loss": 2.5, "tokens_per_second": 1234.0, "sequences_per_second": 10.0, "step_seconds": 2.0,
    "peak_memory_bytes": 3 * 2**30, "mfu": 0.42, "data_seconds": 0.1, "allocator_retries": 0,
    "slowest_rank": 3, "slowest_rank_ratio": 1.05,
}  # fmt: skip


def test_a_line_tells_what_is_odd() -> None:
    assert describe(ROW) == ("loss 2.500, 1,234 tokens/s, peak 3.0 GiB a rank, MFU 42%")
    odd = {"data_seconds": 1.0, "allocator_retries": 2, "slowest_rank_ratio": 1.6, "loss": None,
           "mfu": None}  # fmt: skip
    assert describe(ROW | odd).endswith(
        "loss not finite, 1,234 tokens/s, peak 3.0 GiB a rank, 50% waiting for data, "
        "2 allocator retries, rank 3 takes 1.6 x as long"
    )
    assert describe(ROW | {"allocator_retries": None, "slowest_rank_ratio": None})
    assert describe_briefly(ROW) == "loss 2.500, 1,234 tokens/s"
    assert "50% waiting for data" in describe_briefly(ROW | odd)


def test_scalars_are_grouped() -> None:
    assert scalar_name("train", "loss") == "train/loss"
    assert scalar_name("train", "data_seconds") == "time/data_seconds"
    assert scalar_name("train", "peak_memory_bytes") == "memory/peak_memory_bytes"
    assert scalar_name("train", "allocator_retries") == "memory/allocator_retries"
    assert scalar_name("validation", "seconds") == "validation/seconds"


def train_with_a_slow_rank(argv: list[str], slow: int, seconds: float) -> tuple[int, str, str]:
    """On a rank of the pool: train; one rank's blocks take longer."""
    import os
    import time

    from t5_fsdp.parallel.wrapping import blocks_at_work
    from t5_fsdp.training.trainer import Trainer

    run = Trainer.run

    def run_slowly(self: Any) -> str:
        for block in blocks_at_work(self._engine.model):
            forward = block.forward

            def slow(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                time.sleep(seconds)
                return forward(*args, **kwargs)

            block.forward = slow  # type: ignore[method-assign]
        return run(self)

    if os.environ["RANK"] == str(slow):
        Trainer.run = run_slowly  # type: ignore[method-assign]
    try:
        return run_command("train", argv)
    finally:
        Trainer.run = run  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=["fsdp2", "fsdp1", "ddp"])
def slow_run(
    request: Any, pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("slow") / "run"
    options = {
        "parallel.engine": request.param, "train.max_steps": 6, "logging.every_steps": 3,
        "checkpoint.every_steps": 2, "evaluation.every_steps": 3,
        "parallel.activation_checkpointing": "none",
    }  # fmt: skip
    argv = tiny_options(corpus, run_dir, **options)
    for code, _, err in pools(2).run(train_with_a_slow_rank, argv, 1, 0.03):
        assert code == 0, err
    yield read_metrics(run_dir, "train")


def test_a_slow_rank_is_found_under_every_engine(slow_run: list[dict[str, Any]]) -> None:
    for row in slow_run:
        assert row["slowest_rank"] == 1 and row["slowest_rank_ratio"] > 1.2


@pytest.mark.exhaustive  # needs quiet cores
def test_meters_are_cheap(tmp_path: Path) -> None:
    found = measure(tmp_path, steps=300, ranks=1, small=True)
    # The meters' own share of a step; a row with TensorBoard is for every tenth.
    assert found["marks"] + (found["hooks"] + found["log"]) / 10 < 0.02 * found["step"]


def test_the_parts_of_a_real_step_add_up(slow_run: list[dict[str, Any]]) -> None:
    for row in slow_run:
        parts = sum(row[f"{phase}_seconds"] for phase in PHASES)
        assert parts == pytest.approx(row["step_seconds"], rel=0.02)
        # Four blocks, slow on one of two ranks, whichever phase the other waits in.
        assert row["forward_seconds"] + row["backward_seconds"] > 0.06
    first, second = slow_run
    assert first["checkpoint_seconds"] > 0 and first["evaluation_seconds"] == 0
    assert second["checkpoint_seconds"] > 0 and second["evaluation_seconds"] > 0
