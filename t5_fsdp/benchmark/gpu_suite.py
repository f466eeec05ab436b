"""One table about one GPU: engines, attention, compiling and recomputation, on random weights.

It needs torch, transformers and numpy alone, and ends within a given time: a row that does not fit
into memory, or into the time that is left, says so, and the next one begins.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from t5_fsdp.benchmark.clock import Segment, joined
from t5_fsdp.benchmark.comparison import OUT_OF_MEMORY, start_ranks, train_function
from t5_fsdp.benchmark.ranks import RankFailed, Ranks, Turns
from t5_fsdp.benchmark.workload import Workload, random_examples
from t5_fsdp.console import Console

# Of the published models: values that differ from T5Config's defaults.
_LARGE = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
_3B = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
_TINY = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_SOURCE_TOKENS, _TARGET_TOKENS = 512, 128
_WARMUP_STEPS, _STEPS = 2, 5
_LEFT_OUT, _NOT_DONE = "left out, no time is left", "not done in"
# Without so much time left a row is not begun.
_LEAST_SECONDS = 15.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        engine: bare: a plain loop round transformers' model; none: this program's whole model in
            one process (its engine ddp); fsdp2.
        examples: in a step, on one device at a time.
        limit_seconds: for all of it: start, building, warm-up and measuring.
    """

    model: str
    engine: str
    recompute: str = "none"
    attention: str = "sdpa"
    compiled: bool = False
    examples: int = 32
    limit_seconds: float = 60.0

    @property
    def title(self) -> str:
        """As in the table, what differs first."""
        words = [self.model, "unsharded" if self.engine == "none" else self.engine]
        words += ["compiled"] if self.compiled else []
        words += [self.attention] if self.attention != "sdpa" else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(words)

    def workload(self, device: str, tiny: bool) -> Workload:
        """Random ids of full length, so that nothing is padded."""
        model: dict[str, Any] = {"vocab_size": 32128, "dropout_rate": 0.0}
        model |= _3B if self.model == "3B" else _LARGE
        lengths = _SOURCE_TOKENS, _TARGET_TOKENS
        examples = self.examples
        if tiny:
            model |= {**_TINY, "vocab_size": 256}
            lengths, examples = (16, 8), 2
        parallel: dict[str, Any] = {"compile": self.compiled}
        if self.compiled and device == "cpu":
            parallel["compile_backend"] = "aot_eager"  # a C++ compiler would take minutes
        return Workload(
            model=model,
            examples=random_examples(
                2 * examples,
                model["vocab_size"],
                source_tokens=lengths[0],
                target_tokens=lengths[1],
                max_source_tokens=lengths[0],
                max_target_tokens=lengths[1],
                seed=1,
                fixed=True,
            ),
            global_batch_size=examples,
            micro_batch_tokens=examples * sum(lengths) + 64 * examples,
            max_source_tokens=lengths[0],
            max_target_tokens=lengths[1],
            activation_checkpointing=self.recompute,
            device=device,
            parallel=parallel,
            attention=self.attention,
        )


# What matters most comes first; what takes long, last.
ROWS: tuple[Row, ...] = (
    Row("large", "bare"),
    Row("large", "none"),
    Row("large", "fsdp2"),
    Row("large", "fsdp2", attention="sdpa_per_layer"),
    Row("large", "fsdp2", attention="eager"),
    Row("large", "fsdp2", "selective"),
    Row("large", "fsdp2", "full"),
    Row("3B", "fsdp2", "full", examples=16),
    Row("3B", "none", "full", examples=16),
    Row("3B", "bare", "full", examples=16),
    Row("3B", "fsdp2", "selective", examples=16),
    Row("3B", "fsdp2", "none", examples=16),
    Row("large", "fsdp2", compiled=True, limit_seconds=120.0),
    Row("3B", "fsdp2", "full", compiled=True, examples=16, limit_seconds=120.0),
    Row("large", "none", compiled=True, limit_seconds=120.0),
    Row("large", "fsdp2", "full", compiled=True, limit_seconds=120.0),
)


@dataclass
class Measured:
    """What came of a row.

    Attributes:
        planned_bytes: the planner's peak, where it can say one.
        compiled_graphs: that torch.compile has made; None: nobody knows.
        note: why nothing was measured.
    """

    row: Row
    segment: Segment | None = None
    planned_bytes: int | None = None
    compiled_graphs: int | None = None
    note: str = ""

    @property
    def short_note(self) -> str:
        """For a cell of eight letters; "failed" where it is the program's fault."""
        if self.note.startswith(_NOT_DONE):
            return "time"
        return {OUT_OF_MEMORY: "memory", _LEFT_OUT: "left out"}.get(self.note, "failed")

    def to_json(self, peak_flops: float | None) -> dict[str, Any]:
        """All figures."""
        figures: dict[str, Any] = {**dataclasses.asdict(self.row), "note": self.note}
        figures["planned_bytes"] = self.planned_bytes
        figures["compiled_graphs"] = self.compiled_graphs
        if self.segment is not None:
            figures |= dataclasses.asdict(self.segment)
            figures["tokens_per_second"] = self.segment.tokens_per_second
            figures["mfu"] = self.mfu(peak_flops)
        return figures

    def mfu(self, peak_flops: float | None) -> float | None:
        """Share of the device's peak; None where it is unknown."""
        if peak_flops is None or self.segment is None:
            return None
        return self.segment.flops / self.segment.seconds / peak_flops


def measure(
    device: str,
    *,
    tiny: bool,
    only: str | None,
    deadline: float,
    console: Console,
    after_row: Callable[[list[Measured]], None] = lambda done: None,
) -> list[Measured]:
    """All rows, one after the other, in one process that is started anew when a row breaks it.

    Args:
        tiny: the same code on a model that any CPU trains in no time.
        only: rows whose title this regular expression matches somewhere; None: all.
        deadline: of `time.monotonic()`; what has not begun by then is left out, what has is ended.
        after_row: gets the rows that are done so far.
    """
    done: list[Measured] = []
    ranks: Ranks | None = None
    try:
        for row in chosen_rows(only):
            measured = Measured(row)
            done.append(measured)
            began = time.monotonic()
            if deadline - began < _LEAST_SECONDS:
                measured.note = _LEFT_OUT
                console.say(describe(measured))
                continue
            workload = row.workload(device, tiny)
            if row.engine != "bare":
                measured.planned_bytes = planned_peak_bytes(row, workload)
            ranks = ranks or start_ranks(device, 1, 1 if device == "cpu" else None)
            row_deadline = min(deadline, began + row.limit_seconds)
            try:
                _measure(ranks, measured, workload, row_deadline)
            except RankFailed as failure:
                is_late = time.monotonic() >= row_deadline
                reason = f"{_NOT_DONE} {row_deadline - began:.0f} s" if is_late else failure.reason
                measured.note = OUT_OF_MEMORY if failure.out_of_memory else reason
                ranks.close(force=True)
                ranks = None
            console.say(describe(measured))
            after_row(done)
    finally:
        if ranks is not None:
            ranks.close(force=True)
    return done


def chosen_rows(only: str | None) -> list[Row]:
    """Rows whose title the regular expression matches somewhere; None: all."""
    return [row for row in ROWS if only is None or re.search(only, row.title)]


def planned_peak_bytes(row: Row, workload: Workload) -> int:
    """What the planner's closed forms expect of a row of this program."""
    import torch
    from torch.distributed import HashStore

    from t5_fsdp.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
    from t5_fsdp.data.batch_division import round_up
    from t5_fsdp.distributed import Launch, World
    from t5_fsdp.model.activations import MicroBatchShape
    from t5_fsdp.planning.memory import estimate_memory
    from t5_fsdp.planning.run import PlannedRun

    lengths = workload.max_source_tokens, workload.max_target_tokens
    parallel = ParallelConfig(
        engine=_engine(row),  # type: ignore[arg-type]
        param_dtype="bf16",
        activation_checkpointing=row.recompute,  # type: ignore[arg-type]
        **workload.parallel,
    )
    multiple = workload.width_multiple
    run = PlannedRun.of(
        workload.spec(),
        row.attention,
        data=DataConfig(max_source_tokens=lengths[0], max_target_tokens=lengths[1]),
        parallel=parallel,
        optimizer=OptimizerConfig(),
        train=TrainConfig(
            global_batch_size=workload.global_batch_size,
            micro_batch_tokens=workload.micro_batch_tokens,
        ),
        width_multiple=multiple,
        world=World(Launch(), HashStore(), torch.device(workload.device)),
    )
    source, target = (round_up(length, multiple) for length in lengths)
    return estimate_memory(run, MicroBatchShape(workload.global_batch_size, source, target)).peak


def _engine(row: Row) -> str:
    return "ddp" if row.engine == "none" else row.engine


def _measure(ranks: Ranks, measured: Measured, workload: Workload, deadline: float) -> None:
    """Fill in the row's figures.

    Raises:
        RankFailed: what trains has failed, or the deadline has passed.
    """
    row = measured.row
    clock = {"warmup_steps": _WARMUP_STEPS, "segment_steps": _STEPS, "segments": 1}
    trained = ("bare_loop",) if row.engine == "bare" else ("ours", _engine(row))
    turns = Turns(ranks, math.inf, _train_row, workload, clock, *trained, deadline=deadline)
    segment = joined(turns.take())
    # Not before it has ended: a row that can't would hand its troubles on to the next one.
    measured.compiled_graphs = turns.end()[0]
    measured.segment = segment


def _train_row(workload: Workload, clock: dict[str, int], module: str, *arguments: Any) -> int:
    """On a rank: train; the graphs that were compiled for it."""
    import torch

    from t5_fsdp.parallel.compilation import num_compilations

    # Rows share blocks' code, and so dynamo's limit of graphs: the last would go uncompiled.
    torch.compiler.reset()
    before = num_compilations()
    train_function(module)(workload, clock, *arguments)
    return num_compilations() - before


def describe(measured: Measured) -> str:
    """A line as soon as a row is done."""
    if measured.segment is None:
        return f"{measured.row.title}: {measured.note}"
    segment = measured.segment
    return (
        f"{measured.row.title}: {segment.tokens_per_second:,.0f} tokens/s, "
        f"{1000 * segment.seconds / segment.steps:,.0f} ms a step, "
        f"{segment.peak_memory_bytes / 2**30:.1f} GiB"
        + (f", {measured.compiled_graphs} graphs compiled" if measured.row.compiled else "")
    )
