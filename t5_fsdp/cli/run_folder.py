"""The run folder: its lock, what stands in it about the run, and what to go on from."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from t5_fsdp.config import CheckpointConfig
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError

LOCK_WAIT_SECONDS = 30.0
_PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "sentencepiece", "rouge-score")


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


def find_resume(run_dir: Path, options: CheckpointConfig) -> Path | None:
    """The checkpoint to go on from, or None for a start at step 0. Call it on rank 0.

    Raises:
        UserError: resume is never and there are checkpoints, or the named one is not complete.
    """
    from t5_fsdp.checkpoint.manager import check_complete, complete_checkpoints

    found = complete_checkpoints(run_dir)
    if options.resume == "never":
        if found:
            raise UserError(
                f"checkpoint.resume: never, but {run_dir} has checkpoints up to {found[-1].name}; "
                "give another run_dir, delete them, or set checkpoint.resume: auto"
            )
        return None
    if options.resume == "auto":
        return check_complete(found[-1]) if found else None
    return find_checkpoint(Path(options.resume), "checkpoint.resume")


def find_checkpoint(folder: Path, option: str, best_metric: str | None = None) -> Path:
    """A checkpoint folder itself; or of a run's folder the best, else the newest complete one.

    Args:
        option: how the user gave it, for messages.
        best_metric: choose the best by it; None: the newest.

    Raises:
        UserError: nothing complete there.
    """
    from t5_fsdp.checkpoint.manager import (
        best_steps,
        check_complete,
        complete_checkpoints,
        read_state,
        step_of,
    )

    if not folder.is_dir():
        raise UserError(f"{option}: there is no folder {folder}; check the path")
    if not (folder / "checkpoints").is_dir():
        return check_complete(folder)
    found = complete_checkpoints(folder)
    if not found:
        raise UserError(f"{option}: {folder} has no complete checkpoint; train it first")
    if best_metric is not None:
        steps = best_steps(read_state(found[-1]).scores, best_metric, found)
        best = [path for path in found if steps and step_of(path) == steps[0]]
        found = best or found
    return check_complete(found[-1])


def read_config_dict(checkpoint: Path) -> dict[str, Any]:
    """The configuration stored in a checkpoint, as nested dicts.

    Raises:
        UserError: it can't be read.
    """
    path = checkpoint / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} can't be read ({error}); use another checkpoint") from None
    return values if isinstance(values, dict) else {}


def describe_environment(world_size: int, device: str) -> dict[str, Any]:
    """Versions, commit, devices and command line, for environment.json."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
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


def hash_folder(folder: Path) -> str:
    """Digest of the names and bytes of a folder's files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write_run_files(
    run_dir: Path,
    config_yaml: str,
    environment: dict[str, Any],
    audit: dict[str, Any],
    tokenizer_dir: Path,
) -> None:
    """What the run folder says about the run before its first step."""
    from t5_fsdp.training.metrics import write_json

    (run_dir / "config.yaml").write_text(config_yaml, encoding="utf-8")
    write_json(run_dir / "environment.json", environment)
    write_json(run_dir / "data_audit.json", audit)
    shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
    shutil.copytree(tokenizer_dir, run_dir / "tokenizer")
