"""Whether a training would accept its run folder, and from where it would go on."""

from __future__ import annotations

import contextlib
from pathlib import Path

from filelock import FileLock, Timeout

from t5_fsdp.cli.machine_checks.finding import Finding, note, ok, problem
from t5_fsdp.cli.run_folder import find_resume, has_lock
from t5_fsdp.config import CheckpointConfig
from t5_fsdp.errors import UserError


def check_going_on(run_dir: Path, options: CheckpointConfig) -> list[Finding]:
    """What `train` finds in run_dir. A folder that can't be read is left to `check_run_dir`."""
    warnings: list[str] = []
    try:
        if _is_in_use(run_dir):
            return [
                problem(
                    "run_dir",
                    f"{run_dir} is in use by another run; wait for it, or give another --run_dir",
                )
            ]
        resume = find_resume(run_dir, options, warnings.append, content=False)
    except UserError as error:
        return [problem("run_dir", line) for line in error.problems]
    except (OSError, ValueError):
        return []
    found = [note("run_dir", warning) for warning in warnings]
    return [*found, ok("run_dir", f"a training goes on from {resume}")] if resume else found


def _is_in_use(run_dir: Path) -> bool:
    if not has_lock(run_dir):
        return False
    with contextlib.suppress(OSError):
        try:
            FileLock(str(run_dir / ".lock")).acquire(timeout=0).lock.release()
        except Timeout:
            return True
    return False
