"""The run folder: its lock, what stands in it about the run, and what to go on from."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from t5_fsdp.cli.yaml_files import read_yaml
from t5_fsdp.config import CheckpointConfig
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.files import not_a_folder, write_json

LOCK_WAIT_SECONDS = 30.0
_PACKAGES = (
    "torch", "transformers", "datasets", "peft", "tokenizers", "sentencepiece", "rouge-score",
)  # fmt: skip


def lock_run_dir(
    run_dir: Path, console: Console, wait_seconds: float = LOCK_WAIT_SECONDS
) -> FileLock:
    """Hold run_dir for this run until the process ends, whatever ends it.

    A restart may come while the workers of a killed launcher are still ending, hence the wait.

    Raises:
        UserError: another run holds it, or the folder can't be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(run_dir / ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            console.say(f"{run_dir} is in use by another run; waiting up to {wait_seconds:.0f} s")
            lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise UserError(
            f"run_dir {run_dir} is in use by another run; wait for it, or give another --run_dir"
        ) from None
    except OSError as error:
        raise UserError(f"run_dir {run_dir} can't be written ({error}); give another") from None
    return lock


def has_lock(run_dir: Path) -> bool:
    """Whether a run is, or was, in the folder: locking it again changes no file."""
    return (run_dir / ".lock").exists()


def find_resume(
    run_dir: Path, options: CheckpointConfig, warn: Callable[[str], None], content: bool = True
) -> Path | None:
    """The checkpoint to go on from, or None for a start at step 0. Call it on rank 0.

    Args:
        warn: told of damaged checkpoints, before which the newest sound one is taken.
        content: compare checksums, which reads the whole checkpoint.

    Raises:
        UserError: resume is never and there are checkpoints; none of them is sound; the named one
            is not complete, or run_dir has checkpoints that do not come from it; it holds weights
            only.
    """
    from t5_fsdp.checkpoint.format import read_state

    found = _find_resume(run_dir, options, warn, content)
    if found is not None and read_state(found).weights_only:
        raise UserError(
            f"{found} holds weights only, no optimizer state and no place in the data, so no run "
            f"can go on from it; start a new run_dir from it with model.name: {found}"
        )
    return found


def _find_resume(
    run_dir: Path, options: CheckpointConfig, warn: Callable[[str], None], content: bool
) -> Path | None:
    from t5_fsdp.checkpoint.format import complete_checkpoints, newest_sound

    for folder in (run_dir, run_dir / "checkpoints"):
        if os.path.lexists(folder) and not folder.is_dir():
            raise UserError(f"{folder} is no folder; move it away, or give another run_dir")
    found = complete_checkpoints(run_dir)
    _warn_of_incomplete(run_dir, found, warn)
    if options.resume == "never":
        if found:
            raise UserError(
                f"checkpoint.resume: never, but {run_dir} has checkpoints up to {found[-1].name}; "
                "give another run_dir, delete them, or set checkpoint.resume: auto"
            )
        return None
    if options.resume != "auto":
        return _find_branch(run_dir, Path(options.resume), found, warn)
    newest = newest_sound(found, warn, content)
    if found and newest is None:
        raise UserError(
            f"all checkpoints of {run_dir} are damaged or hold weights alone; give another "
            "run_dir, or delete them to start anew"
        )
    return newest


def _warn_of_incomplete(run_dir: Path, found: list[Path], warn: Callable[[str], None]) -> None:
    """Of later checkpoints than the complete ones, which were not finished or have lost their mark.

    Args:
        found: the complete ones, oldest first.
    """
    from t5_fsdp.checkpoint.format import step_of

    newest = step_of(found[-1]) or 0 if found else 0
    folders = [path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir()]
    for folder in sorted(folders):
        if folder not in found and (step_of(folder) or 0) > newest:
            going_on = f"going on from {found[-1].name}" if found else "starting at step 1"
            warn(f"{folder} has no COMPLETE file, so it was not finished or is damaged; {going_on}")


def _find_branch(
    run_dir: Path, start: Path, found: list[Path], warn: Callable[[str], None]
) -> Path:
    """Where to go on when `checkpoint.resume` names a checkpoint.

    That one; or, when this run has gone on from it before, the newest that came of it: the same
    command again must not throw away what was done since.
    """
    from t5_fsdp.checkpoint.format import newest_sound, read_state, step_of

    start = find_checkpoint(start, "checkpoint.resume")
    since = [path for path in found if path.parent != start.parent]
    since += [p for p in found if p.parent == start.parent and step_of(p) > step_of(start)]  # type: ignore[operator]
    newest = newest_sound(sorted(since, key=lambda path: step_of(path) or 0), warn)
    if newest is None:
        return start
    if read_state(newest).branched_from == str(start.resolve()):
        return newest
    raise UserError(
        f"checkpoint.resume: {start}, but {run_dir} has later checkpoints that do not come from "
        f"it, up to {newest.name}; give another run_dir, or delete them"
    )


def find_checkpoint(
    folder: Path,
    option: str,
    best_metric: str | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> Path:
    """A checkpoint folder itself; or of a run's folder the best, else the newest sound one.

    Args:
        option: how the user gave it, for messages.
        best_metric: choose the best by it; None: the newest.
        warn: told of damaged ones that are passed over.

    Raises:
        UserError: nothing complete and sound there.
    """
    from t5_fsdp.checkpoint.format import (
        check_content,
        complete_checkpoints,
        newest_sound,
        read_state,
        step_of,
    )
    from t5_fsdp.checkpoint.retention import best_steps

    if not folder.is_dir():
        raise UserError(f"{option}: {not_a_folder(folder)}")
    if not (folder / "checkpoints").is_dir():
        return check_content(folder)
    found = complete_checkpoints(folder)
    if not found:
        raise UserError(f"{option}: {folder} has no complete checkpoint; train it first")
    damaged: list[str] = []
    newest = newest_sound(found, damaged.append)
    if newest is None:
        raise UserError(f"{option}: all checkpoints of {folder} are damaged", *damaged)
    if best_metric is not None:
        by_step = {step_of(path): path for path in found}
        steps = best_steps(read_state(newest).scores, best_metric, found)
        newest = newest_sound([by_step[step] for step in reversed(steps)], warn) or newest
    return newest


def read_config_dict(checkpoint: Path) -> dict[str, Any]:
    """The configuration stored in a checkpoint, as nested dicts.

    Raises:
        UserError: it can't be read.
    """
    values, _ = read_yaml(str(checkpoint / "config.yaml"), option="")
    return values


def describe_environment(world_size: int, device: str) -> dict[str, Any]:
    """Versions, commit, devices and command line, for environment.json."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": getattr(sys, "argv", []),  # a program that embeds Python need not have one
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": library_versions(),
        "git_commit": _git_commit(),
        "world_size": world_size,
        "device": device,
        "cpu_count": os.cpu_count(),
    }


def library_versions() -> dict[str, str]:
    """Installed versions of the packages that decide about the numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _with_lead_baseline(run_dir: Path, audit: dict[str, Any]) -> dict[str, Any]:
    """The audit with what `prepare_data` has added to that of the same data in this folder."""
    try:
        old = json.loads((run_dir / "data_audit.json").read_text(encoding="utf-8"))
        if old["splits"] == audit["splits"]:
            return {**audit, "lead_baseline": old["lead_baseline"]}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return audit


def write_run_files(
    run_dir: Path,
    config_yaml: str,
    environment: dict[str, Any],
    audit: dict[str, Any],
    tokenizer_dir: Path,
) -> None:
    """What the run folder says about the run before its first step."""
    (run_dir / "config.yaml").write_text(config_yaml, encoding="utf-8")
    write_json(run_dir / "environment.json", environment)
    write_json(run_dir / "data_audit.json", _with_lead_baseline(run_dir, audit))
    shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
    shutil.copytree(tokenizer_dir, run_dir / "tokenizer")
