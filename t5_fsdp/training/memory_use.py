"""How much memory this rank uses, on its GPU and on its host."""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

_NAN = float("nan")  # what is not known; null in metrics.jsonl


@dataclass(frozen=True)
class MemoryUse:
    """What a `train` row says about memory; not a number where the device has no such figure.

    Attributes:
        peak_memory_bytes: most that tensors took: on a GPU since the last row, on the CPU the
            largest resident memory of the process so far.
        allocated_memory_bytes: of a GPU, that tensors take now.
        reserved_memory_bytes: of a GPU, that torch's allocator holds, the allocated part included.
        allocator_retries: since the last row; each freed all that was cached, to find room, and
            made the GPU wait.
        resident_memory_bytes: of the host, that the process takes now.
    """

    peak_memory_bytes: float
    allocated_memory_bytes: float
    reserved_memory_bytes: float
    allocator_retries: float
    resident_memory_bytes: float


def largest(ranks: list[list[float]]) -> dict[str, int | None]:
    """Of the figures of all ranks, each in the order of `MemoryUse`, the largest of each.

    Returns:
        None for what is not a number.
    """
    columns = [max(column) for column in zip(*ranks, strict=True)]
    names = MemoryUse.__dataclass_fields__
    return {
        name: None if value != value else int(value)
        for name, value in zip(names, columns, strict=True)
    }


class MemoryMeter:
    """Reads the figures of one device, row by row."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0

    def read(self) -> list[float]:
        """The figures since the last call, in the order of `MemoryUse`; a new peak begins."""
        return list(astuple(self._of_gpu() if self._device.type == "cuda" else _of_host()))

    def _of_gpu(self) -> MemoryUse:
        figures = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before, self._retries = self._retries, figures.get("num_alloc_retries", 0)
        return MemoryUse(
            peak_memory_bytes=figures["allocated_bytes.all.peak"],
            allocated_memory_bytes=figures["allocated_bytes.all.current"],
            reserved_memory_bytes=figures["reserved_bytes.all.current"],
            allocator_retries=self._retries - before,
            resident_memory_bytes=resident_bytes(),
        )


def _of_host() -> MemoryUse:
    now = resident_bytes()
    return MemoryUse(max(now, peak_resident_bytes()), _NAN, _NAN, _NAN, now)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not on Linux
        return 0
    import resource

    return pages * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
