"""One run a folder at a time; workers don't outlive their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from t5_fsdp.cli.run_folder import lock_run_dir
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from tests.conftest import tiny_options
from tests.launch import torchrun


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
    launcher = subprocess.Popen(
        torchrun("train", options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 90
        while not metrics.exists() and time.monotonic() < deadline:
            assert launcher.poll() is None, "the run ended by itself"
            time.sleep(0.2)
        children = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
        workers = [int(pid) for pid in Path(children).read_text().split()]
        assert len(workers) == 2
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    deadline = time.monotonic() + 5
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    still = [pid for pid in workers if _runs(pid)]
    for pid in still:
        os.kill(pid, signal.SIGKILL)
    assert not still


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
