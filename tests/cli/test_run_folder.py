"""One run a folder at a time; workers don't outlive their launcher."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from t5_fsdp.cli.run_folder import lock_run_dir
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from tests.conftest import tiny_options
from tests.launch import launched, torchrun


def test_second_run_waits_then_is_refused(tmp_path: Path) -> None:
    held = lock_run_dir(tmp_path, Console(False))
    began = time.monotonic()
    with pytest.raises(UserError, match="in use by another run"):
        lock_run_dir(tmp_path, Console(False), wait_seconds=0.5)
    assert time.monotonic() - began >= 0.5
    held.release()
    lock_run_dir(tmp_path, Console(False), wait_seconds=0.5).release()


def test_workers_end_with_a_killed_launcher(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = tiny_options(corpus, run_dir, **{"train.max_steps": 100000, "train.epochs": 100000})
    with launched(torchrun("train", options), tmp_path / "log") as process:
        assert process.wait_until((run_dir / "metrics.jsonl").exists)
        assert len(process.workers()) == 2
        process.launcher.send_signal(signal.SIGKILL)
        process.wait(seconds=5)
