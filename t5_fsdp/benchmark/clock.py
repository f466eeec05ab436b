"""Time and tokens of training steps, taken in segments that contestants run in turn.

Every contestant's loop calls `Clock.tick` at the start of each step. After the warm-up, and after
each segment, the ranks stop there until it is their turn again: A B C A B C. What disturbs the
machine for a while so hits all of them, and none pays for starting up.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from t5_fsdp.benchmark.ranks import report
from t5_fsdp.model.flops import T5Shape, training_flops

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StepTokens:
    """What a rank is given to compute in a step.

    Attributes:
        rows: examples.
        source, target: real tokens, end marks included.
        padded: rows x (width of the sources + width of the targets), over its micro-batches.
    """

    rows: int
    source: int
    target: int
    padded: int


@dataclass
class Segment:
    """Some steps in a row: of one rank, or of all of them together.

    Attributes:
        seconds: from the start of the first to the start of the one behind the last.
        cpu_seconds: of all threads of the process; on a busy machine more telling than `seconds`.
        padded_tokens: as of `StepTokens`.
        flops: of a model that computes real tokens alone, forward and backward.
        peak_memory_bytes: largest so far: allocated on a GPU, resident on a CPU.
        resident_bytes: of the host's memory at the end of it; 0 where the system does not tell.
    """

    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rows: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    peak_memory_bytes: int = 0
    resident_bytes: int = 0

    @property
    def real_tokens(self) -> int:
        return self.source_tokens + self.target_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / max(1e-9, self.seconds)

    def add(self, step: StepTokens, shape: T5Shape) -> None:
        """Count a step."""
        self.steps += 1
        self.rows += step.rows
        self.source_tokens += step.source
        self.target_tokens += step.target
        self.padded_tokens += step.padded
        rows = max(1, step.rows)
        self.flops += training_flops(shape, step.source // rows, step.target // rows, step.rows)


def joined(segments: list[Segment]) -> Segment:
    """Of all ranks: the slowest one's time, the largest memory, everybody's tokens."""
    largest = ("steps", "seconds", "peak_memory_bytes", "resident_bytes")
    whole = {}
    for item in fields(Segment):
        values = [getattr(segment, item.name) for segment in segments]
        whole[item.name] = max(values) if item.name in largest else sum(values)
    return Segment(**whole)


class Clock:
    """One rank's clock.

    Args:
        shape: of the model, for the FLOPs.
        device: where it computes.
        warmup_steps: before the first segment, not counted.
        segment_steps: counted in a segment, after one that is not.
        segments: how many of them.
    """

    def __init__(
        self,
        shape: T5Shape,
        device: torch.device,
        *,
        warmup_steps: int,
        segment_steps: int,
        segments: int,
    ) -> None:
        self._shape, self._device = shape, device
        self._warmup_steps = warmup_steps
        # What ran meanwhile has taken the caches: the first step after a pause is not counted.
        self._period = 1 + segment_steps
        self._ticks = 0
        self._peak_memory_bytes = 0
        self._segment = Segment()
        self._began = self._cpu_began = 0.0
        # The start of one more step ends the last segment.
        self.total_steps = warmup_steps + segments * self._period + 1

    def tick(self, step: StepTokens) -> None:
        """At the start of a step: its inputs are there, nothing of it is computed yet."""
        counted = self._ticks - self._warmup_steps
        self._ticks += 1
        # A contestant may reset the statistics at its own rows.
        self._peak_memory_bytes = max(self._peak_memory_bytes, peak_memory_bytes(self._device))
        if counted < 0:
            return
        place = counted % self._period
        if place == 0:
            found = self._closed_segment() if counted else None
            _give_memory_back()
            report(found)
            return
        if place == 1:
            wait_for_device(self._device)
            self._segment = Segment()
            self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._segment.add(step, self._shape)

    def _closed_segment(self) -> Segment:
        from t5_fsdp.training.memory_use import resident_bytes

        wait_for_device(self._device)
        self._segment.seconds = time.perf_counter() - self._began
        self._segment.cpu_seconds = time.process_time() - self._cpu_began
        self._segment.peak_memory_bytes = self._peak_memory_bytes
        self._segment.resident_bytes = resident_bytes()
        return self._segment


def wait_for_device(device: torch.device) -> None:
    """Until a GPU has computed what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _give_memory_back() -> None:
    """What a step has used and freed, so that many contestants can wait in memory together."""
    # glibc's, which keeps it for the next step; elsewhere there is no such function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest so far: allocated on a GPU since its statistics were reset, resident on a CPU."""
    import torch

    from t5_fsdp.training.memory_use import peak_resident_bytes

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
