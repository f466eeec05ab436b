"""Whether a run's memory grows: trains for many steps and fits a line through what each one held.

    OMP_NUM_THREADS=1 python -m tests.measure_memory [--steps 1400] [--small]
        [--texts FILE.jsonl --tokenizer FOLDER]

Trains the model of `tests.measure_overhead`, on the bundled sample or on texts of one's own, and
prints the growth over 500 steps of three figures, behind the first 400 steps, in which most shapes
of batches are met for the first time:

- Python's own allocations, garbage collected: a list or a tensor that is kept adds to them.
- live memory: what the process has allocated and not freed, by glibc's count. It holds oneDNN's
  kernels too, which are kept for shapes that were met, up to a bound.
- resident memory: what the process takes of the machine. It also holds what glibc keeps for the
  next batches, so it goes up and down with their shapes by several percent; only a line through
  many steps tells more than that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.measure_overhead import options
from tests.workers import run_command

WARM_UP_STEPS = 400
GROWTH_STEPS = 500


class _AllocatorFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc: bytes, but for the fields about counts."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def live_bytes() -> int | None:
    """What this process has allocated and not freed; None without glibc 2.33 or newer."""
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _AllocatorFigures
    figures = mallinfo()
    return figures.uordblks + figures.hblkhd


@dataclass(frozen=True)
class MemorySample:
    """What one step left behind.

    Attributes:
        num_allocations: of Python's, garbage collected.
        live_bytes: as the function; 0 where that has no answer.
        resident_bytes: of the process.
    """

    step: int
    num_allocations: int
    live_bytes: int
    resident_bytes: int


def sampled_run(argv: list[str]) -> tuple[int, str, list[MemorySample]]:
    """Train in this process; exit code, errors, and a sample at each logged step."""
    from t5_fsdp.training.memory_use import resident_bytes
    from t5_fsdp.training.trainer import Trainer

    figures = array("q")  # one block of memory, however many samples
    log = Trainer._log

    def log_and_sample(self: Trainer, batch: Any, progress: Any) -> None:
        log(self, batch, progress)
        gc.collect()
        blocks = sys.getallocatedblocks()
        figures.extend((batch.step, blocks, live_bytes() or 0, resident_bytes()))

    Trainer._log = log_and_sample  # type: ignore[method-assign]
    try:
        code, _, err = run_command("train", argv)
    finally:
        Trainer._log = log  # type: ignore[method-assign]
    return code, err, [MemorySample(*figures[at : at + 4]) for at in range(0, len(figures), 4)]


def growth_a_step(samples: Sequence[MemorySample], name: str) -> float:
    """Slope of the least-squares line through one figure."""
    steps, values = ([getattr(s, field) for s in samples] for field in ("step", name))
    return statistics.linear_regression(steps, values).slope


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--texts")
    parser.add_argument("--tokenizer")
    given = parser.parse_args()
    if given.steps < WARM_UP_STEPS + GROWTH_STEPS:
        parser.error(f"--steps must be {WARM_UP_STEPS + GROWTH_STEPS} or more")
    if bool(given.texts) != bool(given.tokenizer):
        parser.error("--texts and --tokenizer go together")
    with tempfile.TemporaryDirectory() as scratch:
        argv = options(Path(scratch) / "run", given.steps, given.small)
        argv += ["--logging.every_steps", "10"]
        if given.texts:
            argv += [
                "--data.source", "files", "--data.train_files", given.texts,
                "--data.validation_files", given.texts, "--model.tokenizer", given.tokenizer,
                "--data.max_source_tokens", "512", "--data.max_target_tokens", "150",
            ]  # fmt: skip
        code, err, samples = sampled_run(argv)
    assert code == 0, err
    kept = [sample for sample in samples if sample.step > WARM_UP_STEPS]
    print(f"steps {kept[0].step:,} to {kept[-1].step:,}, in the mean, and growth in 500 steps:")
    for name, what in (
        ("num_allocations", "allocations of Python's"),
        ("live_bytes", "bytes of live memory"),
        ("resident_bytes", "bytes of resident memory"),
    ):
        mean = statistics.mean(getattr(sample, name) for sample in kept)
        growth = GROWTH_STEPS * growth_a_step(kept, name)
        print(f"{mean:>15,.0f} {what:24} {growth:+15,.0f} {growth / mean:+.3%}")


if __name__ == "__main__":
    main()
