"""A file system that is full: one line, code 2, and the last checkpoint stays sound."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.checkpoint.format import complete_checkpoints
from t5_fsdp.cli.run_folder import find_resume
from t5_fsdp.config import CheckpointConfig
from tests.conftest import tiny_options
from tests.workers import run_command


@pytest.fixture(params=["40k", "900k", "2600k"])
def small_disk(request: Any, tmp_path: Path) -> Iterator[Path]:
    """A file system of that size: no room for the tokenizer, a checkpoint, a second one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    # Lazily: a worker of the pool may still hold the lock of the run that failed.
    subprocess.run(["umount", "-l", str(folder)], check=True)


def train_unchecked(argv: list[str]) -> Any:
    """On a rank of the pool: train without comparing the room with the need beforehand."""
    from t5_fsdp.checkpoint import retention

    check = retention.check_room
    retention.check_room = lambda *args: None  # type: ignore[assignment]
    try:
        return run_command("train", argv)
    finally:
        retention.check_room = check


@pytest.mark.parametrize("small_disk", ["900k"], indirect=True)
def test_room_is_compared_with_the_need_before_the_first_step(
    pools: Any, corpus: Path, small_disk: Path, tmp_path: Path
) -> None:
    options = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
    argv = tiny_options(corpus, tmp_path / "run", **options)
    run_dir = small_disk / "run"
    code, _, err = pools(2).command("train", [*argv, "--run_dir", str(run_dir)])
    assert code == 2
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1, err
    assert "5 checkpoints of" in err and "checkpoint.keep_last" in err
    assert not (run_dir / "metrics.jsonl").exists()


def test_a_full_disk(pools: Any, corpus: Path, small_disk: Path, tmp_path: Path) -> None:
    options = {"checkpoint.every_steps": 2, "evaluation.max_examples": 2}
    argv = tiny_options(corpus, tmp_path / "run", **options)
    run_dir = small_disk / "run"
    results = pools(2).run(train_unchecked, [*argv, "--run_dir", str(run_dir)])
    assert [code for code, _, _ in results] == [2, 2]
    err = "".join(err for _, _, err in results)
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1, err
    # torch says either, by where in its file the disk was full.
    assert re.search("No space left|as on a full disk", err)
    if not (run_dir / "status.json").exists():
        return
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "failed" and status["message"] in err
    left = complete_checkpoints(run_dir)
    expected = str(left[-1]) if left else None
    assert status["checkpoint"] == expected
    assert find_resume(run_dir, CheckpointConfig(), pytest.fail) == (left[-1] if left else None)
