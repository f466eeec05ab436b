"""What is written to look into a run: traces of chosen steps, snapshots of a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from t5_fsdp.console import Console
from t5_fsdp.distributed import World

# Of allocations and frees that a snapshot tells about: some steps of a large model.
_SNAPSHOT_EVENTS = 200_000
_MOST_NAMED = 8  # of steps, in a warning
_HIGHER = 1.02  # by which a peak is a new one: a snapshot takes seconds


class StepTraces:
    """Chrome traces of the steps that `logging.profile` names: one file a step and rank.

    A trace shows operations with their shapes, and on a GPU its kernels and transfers.
    """

    def __init__(self, run_dir: Path, steps: Sequence[int], world: World, console: Console) -> None:
        self._folder, self._steps = run_dir / "profile", frozenset(steps)
        self._world, self._console = world, console

    def warn_of_others(self, first: int, last: int) -> None:
        """Say which of the named steps are not among those of this launch, `first` to `last`."""
        if others := sorted(step for step in self._steps if not first <= step <= last):
            named = ", ".join(map(str, others[:_MOST_NAMED]))
            more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
            self._console.warn(
                f"logging.profile: no trace of step {named}{more}, this launch makes "
                + (f"the steps {first} to {last}" if first <= last else "no step")
            )

    @contextmanager
    def step(self, step: int, finish_step: Callable[[], None]) -> Iterator[None]:
        """Round the work of one step; writes its trace if it is to have one. A collective, then.

        Args:
            finish_step: waits for what the device was asked for, as part of the step; what the
                trace takes to be written is none.
        """
        if step not in self._steps:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._wait_for_device()  # what is left of the step before does not belong to it
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            yield
            finish_step()
            self._wait_for_device()  # what was asked for does
        path = self._folder / f"step-{step:08d}-rank-{self._world.rank}.json.gz"
        failures = self._world.gather_objects(_failure_of(lambda: _write_trace(profiler, path)))
        for rank, failure in enumerate(failures or []):
            if failure:
                self._console.warn(f"step {step}: no trace of rank {rank}: {failure}")
        if failures and not failures[0]:
            self._console.say(f"step {step}: trace {path} (https://ui.perfetto.dev shows it)")

    def _wait_for_device(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def _write_trace(profiler: torch.profiler.profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        profiler.export_chrome_trace(str(path))
    except BaseException:
        path.unlink(missing_ok=True)  # half of one shows nothing
        raise


def _failure_of(write: Callable[[], None]) -> str:
    """Why something could not be written, which must not end a run; empty if it could."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's own code raises the latter
        return str(error)
    return ""


class MemorySnapshots:
    """Pickled snapshots of a GPU's memory, with where each part was allocated.

    Args:
        enabled: `logging.memory_snapshot`.
    """

    def __init__(self, run_dir: Path, enabled: bool, world: World, console: Console) -> None:
        self._folder, self._world, self._console = run_dir / "memory", world, console
        self._highest = 0
        self._is_on = enabled and world.device.type == "cuda"
        if enabled and not self._is_on:
            console.warn(
                "logging.memory_snapshot: true needs a GPU, whose allocator keeps the record; on "
                "the CPU nothing is written"
            )
        if self._is_on:
            # Private, but what torch's guide to CUDA memory tells to call; so is the dump below.
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)

    def after_step(self) -> None:
        """Write one where the step took more than any before; replaces the last one."""
        if not self._is_on:
            return
        peak = torch.cuda.max_memory_allocated(self._world.device)
        if peak > _HIGHER * self._highest:
            self._highest = peak
            self._write("peak")

    def out_of_memory(self) -> Path | None:
        """Write one of the moment when memory ran out; where to, if it could be written."""
        return self._write("out-of-memory") if self._is_on else None

    def _write(self, what: str) -> Path | None:
        path = self._folder / f"{what}-rank-{self._world.rank}.pickle"
        failure = _failure_of(lambda: self._dump(path))
        if failure:
            self._console.warn(f"no memory snapshot {path}: {failure}")
        return None if failure else path

    def _dump(self, path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
