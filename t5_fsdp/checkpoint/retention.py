"""Which checkpoints are kept, and the deletion of the others."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from t5_fsdp.checkpoint.format import (
    COMPLETE,
    DAMAGED,
    complete_checkpoints,
    is_checkpoint,
    step_of,
    step_with_damaged,
)
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

Scores = dict[str, dict[str, float]]  # validation figures by step


@dataclass(frozen=True)
class Retention:
    """What is kept.

    Attributes:
        keep_last: the newest so many.
        keep_best: the best so many by `best_metric`.
        keep_every: those of the multiples of so many steps, or None.
    """

    keep_last: int
    keep_best: int
    best_metric: str
    keep_every: int | None = None

    def most_at_once(self, last_step: int, every_steps: int | None, at_others: bool) -> int:
        """Checkpoints that lie on the disk together at most, the one being written included.

        Args:
            last_step: the run's length.
            every_steps: steps between checkpoints, or None.
            at_others: they may be written at other steps as well.
        """
        kept = self.keep_last + self.keep_best
        if self.keep_every is not None:
            met = 1 if at_others or every_steps is None else every_steps
            kept += last_step // math.lcm(self.keep_every, met)
        if at_others:
            return kept + 1
        num_saves = 1 if every_steps is None else math.ceil(last_step / every_steps)
        return min(kept + 1, num_saves)

    def kept(self, folders: list[Path], scores: Scores) -> set[int | None]:
        """Steps to keep of complete checkpoints, oldest first."""
        steps = [step_of(folder) for folder in folders]
        kept = set(steps[-self.keep_last :])
        kept |= set(best_steps(scores, self.best_metric, folders)[: self.keep_best])
        if self.keep_every is not None:
            kept |= {step for step in steps if step and step % self.keep_every == 0}
        return kept


def prune(
    run_dir: Path, retention: Retention, step: int, scores: Scores, warn: Callable[[str], None]
) -> None:
    """Delete what is not to be kept, and what interrupted saves of older steps left behind.

    Only folders of our naming are touched, and no link is followed: what lies behind it is another
    run's. What can't be deleted is only warned of: the newest checkpoint is sound. On rank 0 only.

    Args:
        step: of the checkpoint just written, which stays.
    """
    folders = complete_checkpoints(run_dir)
    kept = {step, *retention.kept(folders, scores)}
    surplus = [folder for folder in folders if step_of(folder) not in kept]
    for folder in [*surplus, *_leftovers(run_dir / "checkpoints", step)]:
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            warn(f"an old checkpoint can't be deleted ({error}); delete it by hand")


def check_room(
    run_dir: Path, num_checkpoints: int, checkpoint_bytes: int, export_bytes: int = 0
) -> None:
    """Refuse a run whose checkpoints will not fit on its disk.

    Args:
        num_checkpoints: that lie there together at most, see `Retention.most_at_once`.
        checkpoint_bytes: of each of them.
        export_bytes: of the folder that is exported at the end.

    Raises:
        UserError: less is free; with both figures.
    """
    held = sum(
        path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file()
    )
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    needed = num_checkpoints * checkpoint_bytes + export_bytes
    exported = f" and an export of {_gigabytes(export_bytes)}" if export_bytes else ""
    if needed > free + held:
        raise UserError(
            f"run_dir {run_dir} has {_gigabytes(free)} free, and "
            f"{counted(num_checkpoints, 'checkpoint')} of "
            f"{_gigabytes(checkpoint_bytes)} (kept ones, and one being written){exported} need "
            f"{_gigabytes(needed - held)}; make room, lower "
            "checkpoint.keep_last, keep_best or raise keep_every, or give a run_dir on a larger "
            "disk"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.4g} GB"


def _leftovers(folder: Path, step: int) -> list[Path]:
    """Of steps up to `step`: what an interrupted save left, and damaged ones moved aside."""
    found = []
    for path in folder.iterdir():
        of_step = step_with_damaged(path)
        damaged = path.name.endswith(DAMAGED) or not is_checkpoint(path)
        if of_step is not None and of_step <= step and damaged:
            found.append(path)
    return found


def best_steps(scores: Scores, metric: str, folders: list[Path] | None) -> list[int]:
    """Steps that have a score, the best first; among equals the earliest; NaN is never best.

    Args:
        folders: only steps that have one of these checkpoints; None: all.
    """
    present = None if folders is None else {step_of(folder) for folder in folders}
    sign = 1 if metric == "loss" else -1
    ranked = [
        (sign * values[metric], int(step))
        for step, values in scores.items()
        if (present is None or int(step) in present)
        and values.get(metric) is not None
        and math.isfinite(values[metric])
    ]
    return [step for _, step in sorted(ranked)]
