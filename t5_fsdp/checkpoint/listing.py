"""What there is of checkpoints in a run's folder, without torch, so that it is told at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from t5_fsdp.checkpoint.format import (
    COMPLETE,
    CONFIG,
    DAMAGED,
    DamagedError,
    RunState,
    check_content,
    is_checkpoint,
    read_plain_state,
    step_of,
    step_with_damaged,
)
from t5_fsdp.checkpoint.retention import best_steps
from t5_fsdp.config import EvaluationConfig
from t5_fsdp.errors import UserError
from t5_fsdp.files import json_number, not_a_folder


@dataclass
class Listed:
    """One checkpoint's folder.

    Attributes:
        age_seconds: since it was completed, else changed.
        num_bytes: of all its files.
        status: complete; weights only: complete, without optimizer state; damaged; not readable:
            of another format, or not to be read for the moment, and perhaps sound; incomplete:
            without COMPLETE, so interrupted or being written; moved aside: by a run that has saved,
            or is to save, that step again.
        problem: what is wrong with one that is damaged or not readable.
        scores: validation figures of its step.
        is_best: by the run's best_metric, among complete ones.
        is_next: `checkpoint.resume: auto` would go on from it.
    """

    path: str
    step: int | None
    age_seconds: float
    num_bytes: int
    status: str
    problem: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    is_best: bool = False
    is_next: bool = False

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; scores that are not finite are null."""
        scores = {name: json_number(value) for name, value in self.scores.items()}
        return {**asdict(self), "scores": scores}


@dataclass
class Listing:
    """The checkpoints of a folder, oldest first.

    Attributes:
        best_metric: of the run, by which one of them is the best.
        verified: checksums were read, not only sizes.
    """

    folder: str
    best_metric: str
    verified: bool
    checkpoints: list[Listed]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        rows = [checkpoint.to_json() for checkpoint in self.checkpoints]
        return {**asdict(self), "checkpoints": rows}


def list_checkpoints(folder: Path, verify: bool = False) -> Listing:
    """Look at the checkpoints of a run's folder, or at one checkpoint.

    Args:
        verify: compare checksums, which reads every file.

    Raises:
        UserError: there is no such folder, or no checkpoint in it.
        OSError: it can't be read.
    """
    found: dict[Path, Listed] = {}
    states: dict[Path, RunState] = {}
    now = time.time()
    for path in _find(folder):
        with contextlib.suppress(FileNotFoundError):  # a run has deleted it meanwhile
            found[path], state = _look_at(path, now, verify)
            if state is not None:
                states[path] = state
    newest = next(reversed(states), None)
    metric = EvaluationConfig.best_metric if newest is None else _best_metric(newest)
    if newest is not None and newest != folder:  # by itself one is compared with none
        _mark(found, states, metric, newest)
    return Listing(str(folder), metric, verify, list(found.values()))


def _find(folder: Path) -> list[Path]:
    """Folders of checkpoints, oldest first.

    Raises:
        UserError: as `list_checkpoints`.
    """
    if not folder.is_dir():
        raise UserError(not_a_folder(folder))
    if is_checkpoint(folder) or (step_with_damaged(folder) is not None and not _is_run(folder)):
        return [folder]
    inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    found = [
        path for path in inner.iterdir() if path.is_dir() and step_with_damaged(path) is not None
    ]
    if not found:
        raise UserError(
            f"{folder} holds no checkpoints; give a run's folder, or one checkpoint of it"
        )
    return sorted(found, key=lambda path: (step_with_damaged(path) or 0, path.name))


def _is_run(folder: Path) -> bool:
    """Whether a run has written into it; such a folder may be called like a checkpoint."""
    return any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "status.json"))


def _look_at(folder: Path, now: float, verify: bool) -> tuple[Listed, RunState | None]:
    complete = folder / COMPLETE
    changed = (complete if complete.is_file() else folder).stat().st_mtime
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    listed = Listed(
        str(folder), step_with_damaged(folder), max(0.0, now - changed), sum(sizes), "complete"
    )
    if folder.name.endswith(DAMAGED):
        listed.status = "moved aside"
        return listed, None
    if not complete.is_file():
        listed.status = "incomplete"
        return listed, None
    try:
        if verify:
            check_content(folder)
        state = read_plain_state(folder)
    except UserError as error:
        is_damaged = isinstance(error, DamagedError)
        listed.status = "damaged" if is_damaged else "not readable"
        listed.problem = str(error)
        return listed, None
    listed.step = state.step
    listed.scores = state.scores.get(str(state.step), {})
    if state.weights_only:
        listed.status = "weights only"
    return listed, state


def _mark(
    found: Mapping[Path, Listed], states: Mapping[Path, RunState], metric: str, newest: Path
) -> None:
    """Say of one which is the best and of one which is next."""
    complete = [path for path in found if is_checkpoint(path) and step_of(path)]
    # A run does not pass over one that may be sound.
    newer = list(found.values())[list(found).index(newest) + 1 :]
    is_blocked = any(listed.status == "not readable" for listed in newer)
    best = best_steps(states[newest].scores, metric, complete)[:1]
    for path, listed in found.items():
        listed.is_next = (
            path == newest
            and bool(step_of(path))
            and not states[path].weights_only
            and not is_blocked
        )
        listed.is_best = path in states and [listed.step] == best


def _best_metric(checkpoint: Path) -> str:
    try:
        values = yaml.safe_load((checkpoint / CONFIG).read_text(encoding="utf-8"))
        return str(values["evaluation"]["best_metric"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return EvaluationConfig.best_metric


def format_size(num_bytes: float) -> str:
    """Bytes of a file, in decimal units."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
