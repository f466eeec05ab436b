"""Which checkpoints are kept, and the deletion of the others."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from t5_fsdp.checkpoint.format import COMPLETE, DAMAGED, complete_checkpoints, step_of

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

    Only folders of our naming are touched. What can't be deleted is only warned of: the newest
    checkpoint is sound. On rank 0 only.

    Args:
        step: of the checkpoint just written, which stays.
    """
    folders = complete_checkpoints(run_dir)
    kept = {step, *retention.kept(folders, scores)}
    try:
        for folder in folders:
            if step_of(folder) not in kept:
                (folder / COMPLETE).unlink()
                shutil.rmtree(folder)
        for folder in _leftovers(run_dir / "checkpoints", step):
            shutil.rmtree(folder)
    except OSError as error:
        warn(f"an old checkpoint can't be deleted ({error}); delete it by hand")


def _leftovers(folder: Path, step: int) -> list[Path]:
    """Of steps up to `step`: what an interrupted save left, and damaged ones moved aside."""
    found = []
    for path in folder.iterdir():
        of_step = step_of(path.with_name(path.name.removesuffix(DAMAGED)))
        damaged = path.name.endswith(DAMAGED) or not (path / COMPLETE).exists()
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
