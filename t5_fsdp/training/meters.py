"""What a run measures about itself: the figures of a `train` row (docs/training-log.md)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from t5_fsdp.data.batching import StepBatch
from t5_fsdp.distributed import World
from t5_fsdp.model.flops import T5Shape, batch_flops
from t5_fsdp.training.memory_use import MemoryMeter, largest
from t5_fsdp.training.stopwatch import Stopwatch, Timeline, timeline_of

# What a step's time goes to, and a row has means of, under these names and `_seconds`.
PHASES = ("data", "forward", "backward", "optimizer", "communication")
_WORK = "work"  # on the stopwatch beside them: what a rank does without waiting for others


@dataclass
class Window:
    """Sums over the steps since the last `train` row; saved with a checkpoint and resumed.

    Attributes:
        loss_sum: nats over the target tokens of the window, except `lost_tokens`.
        lost_tokens: target tokens of steps whose loss was not finite.
        skipped_steps: steps that changed no weight, their loss or gradient not being finite.
        seconds: with waiting for data, without evaluation and checkpoints.
        data_seconds, ..., communication_seconds: parts of them on this rank, by phase.
        checkpoint_seconds, evaluation_seconds: beside them, that training waited.
    """

    steps: int = 0
    examples: int = 0
    loss_sum: float = 0.0
    source_tokens: int = 0
    target_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    lost_tokens: int = 0
    skipped_steps: int = 0
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    communication_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    evaluation_seconds: float = 0.0

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Window:
        """As a checkpoint holds it; of sums that its version did not know, what is yet to come."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in names})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def real_tokens(self) -> int:
        return self.source_tokens + self.target_tokens

    def count(self, batch: StepBatch, loss_sum: float, is_finite: bool, shape: T5Shape) -> None:
        """Add what a step did.

        Args:
            loss_sum: nats over the step's target tokens.
            is_finite: whether the weights were changed.
        """
        self.steps += 1
        self.examples += batch.num_examples
        self.skipped_steps += not is_finite
        if math.isfinite(loss_sum):
            self.loss_sum += loss_sum
        else:
            self.lost_tokens += batch.target_tokens
        self.source_tokens += batch.source_tokens
        self.target_tokens += batch.target_tokens
        self.padded_tokens += batch.padded_tokens
        self.flops += batch_flops(shape, batch.tokens)

    def row(self) -> dict[str, Any]:
        """The window's part of a `train` row; its loss is null when no step's was finite."""
        counted = self.target_tokens - self.lost_tokens
        seconds = max(1e-9, self.seconds)
        return {
            "loss": self.loss_sum / counted if counted else None,
            "source_tokens": self.source_tokens,
            "target_tokens": self.target_tokens,
            "padding_share": 1.0 - self.real_tokens / max(1, self.padded_tokens),
            "tokens_per_second": self.real_tokens / seconds,
            "sequences_per_second": self.examples / seconds,
            "step_seconds": self.seconds / max(1, self.steps),
        }


class Meters:
    """Measures the steps of one rank, and makes all ranks' measurements into a row.

    A step is `begin_step`, a `lap` behind each piece of its work, `end_step`, and `count`, which
    may come later, but before the row: the host runs ahead of a GPU.

    Args:
        peak_flops: of all devices together, FLOP a second, or None where unknown.
        window: as the checkpoint holds it that the run goes on from.
        blocks: modules whose forward passes wait for no other rank.
        now: the host's clock, in seconds.
        timeline: the device's.
    """

    def __init__(
        self,
        world: World,
        *,
        shape: T5Shape,
        peak_flops: float | None,
        window: Mapping[str, Any],
        blocks: Sequence[nn.Module] = (),
        now: Callable[[], float] = time.perf_counter,
        timeline: Timeline[Any] | None = None,
    ) -> None:
        self._world, self._shape, self._peak_flops = world, shape, peak_flops
        self._window = Window.from_json(window)
        self._blocks = blocks
        self._now = now
        self._stopwatch = Stopwatch(timeline or timeline_of(world.device))
        self._memory = MemoryMeter(world.device)
        self._sampling = ExitStack()
        self._is_sampled = False
        self._work_seconds = 0.0
        self._launched = self._began = now()
        self._evaluation_seconds = 0.0

    def begin_step(self, *, is_sampled: bool) -> None:
        """Before its batch is asked for.

        Args:
            is_sampled: find out, at some expense, how long this rank works in it by itself.
        """
        self._began = self._now()
        self._is_sampled = is_sampled
        if is_sampled:
            self._sampling.enter_context(self._stopwatch.spans_of(self._blocks, _WORK))
        self._stopwatch.begin()

    def lap(self, phase: str) -> None:
        """The time since the last lap went to `phase`, one of `PHASES`."""
        also = (_WORK,) if self._is_sampled and phase == "data" else ()
        self._stopwatch.lap(phase, *also)

    def end_step(self) -> None:
        """When all of its work was asked for."""
        self._sampling.close()
        self._window.seconds += self._now() - self._began

    def count(self, batch: StepBatch, loss_sum: float, is_finite: bool) -> None:
        """Add what a step did; arguments as of `Window.count`."""
        self._window.count(batch, loss_sum, is_finite, self._shape)

    def catch_up(self) -> None:
        """Wait until the device has done the steps that were asked for, as part of their time."""
        began = self._now()
        sums = self._stopwatch.take()
        for phase in PHASES:
            name = f"{phase}_seconds"
            setattr(self._window, name, getattr(self._window, name) + sums.get(phase, 0.0))
        self._work_seconds += sums.get(_WORK, 0.0)
        self._window.seconds += self._now() - began

    @contextmanager
    def outside_steps(self, what: str) -> Iterator[None]:
        """Count time between two steps, for "checkpoint" or "evaluation"."""
        began = self._now()
        try:
            yield
        finally:
            name, seconds = f"{what}_seconds", self._now() - began
            setattr(self._window, name, getattr(self._window, name) + seconds)
            self._evaluation_seconds += seconds * (what == "evaluation")

    @property
    def evaluation_share(self) -> float:
        """Of the time since this launch began to train."""
        return self._evaluation_seconds / max(1e-9, self._now() - self._launched)

    def describe_launch(self) -> str:
        """How long it has trained."""
        text = f"this launch {self._now() - self._launched:,.0f} s"
        if self._evaluation_seconds:
            text += f", {self.evaluation_share:.0%} of it validation"
        return text

    @property
    def skipped_steps(self) -> int:
        """Of the window."""
        return self._window.skipped_steps

    def to_json(self) -> dict[str, Any]:
        """The window, for a checkpoint; waits for the device."""
        self.catch_up()
        return self._window.to_json()

    def row(self) -> dict[str, Any]:
        """The figures of the window, all ranks together; a new one begins. A collective."""
        self.catch_up()
        window, self._window = self._window, Window()
        work, self._work_seconds = self._work_seconds if self._blocks else 0.0, 0.0
        phases = [getattr(window, f"{phase}_seconds") for phase in PHASES]
        found = self._world.gather([work, window.seconds, *phases, *self._memory.read()])
        means = [statistics.fmean(column) for column in zip(*found, strict=True)]
        # A rank that was quicker outside of steps waits in them; so the parts add up to the mean.
        window.seconds = means[1]
        steps = max(1, window.steps)
        return {
            **window.row(),
            **{
                f"{phase}_seconds": mean / steps
                for phase, mean in zip(PHASES, means[2:], strict=False)
            },
            "checkpoint_seconds": window.checkpoint_seconds,
            "evaluation_seconds": window.evaluation_seconds,
            **largest([rank[2 + len(PHASES) :] for rank in found]),
            "mfu": self._mfu(window),
            **slowest([rank[0] for rank in found]),
        }

    def _mfu(self, window: Window) -> float | None:
        if self._peak_flops is None:
            return None
        return window.flops / max(1e-9, window.seconds) / self._peak_flops


def slowest(work_seconds: list[float]) -> dict[str, Any]:
    """The rank that the others wait for: which one, and how much longer it works than the median.

    Args:
        work_seconds: of each rank, without waiting for others.

    Returns:
        Both None where a rank's are not known.
    """
    if not all(seconds > 0 for seconds in work_seconds):
        return {"slowest_rank": None, "slowest_rank_ratio": None}
    longest = max(work_seconds)
    return {
        "slowest_rank": work_seconds.index(longest),
        "slowest_rank_ratio": longest / statistics.median(work_seconds),
    }
