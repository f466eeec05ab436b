"""What only whole processes show: a resume in a new one, and their ends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from t5_fsdp.cli.run_folder import lock_run_dir
from tests.conftest import tiny_options
from tests.distributed.test_training import DROPOUT, final_weights, losses
from tests.launch import launched, run, torchrun
from tests.workers import run_command


@pytest.mark.parametrize(
    ("option", "value"), [("train.micro_batch_tokens", "20"), ("config", "/no/such.yaml")]
)
def test_a_refusal_under_torchrun_is_one_line(
    corpus: Path, tmp_path: Path, option: str, value: str
) -> None:
    options = [*tiny_options(corpus, tmp_path / "run"), f"--{option}", value]
    done = run(torchrun("train", options))
    # torchrun adds a block of its own; ours is one line, also of the ranks that it then ends.
    ours = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(ours) == 1 and value in ours[0]
    assert "t5_fsdp/" not in done.stderr and "Preempted" not in done.stderr


@pytest.mark.exhaustive
def test_twelve_steps_equal_six_a_new_launch_and_six(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = run(torchrun("train", tiny_options(corpus, whole, **DROPOUT)))
    assert done.returncode == 0, done.stderr
    resume = {"checkpoint.resume": whole / "checkpoints" / "step-00000006"}
    done = run(torchrun("train", tiny_options(corpus, parts, **DROPOUT, **resume)))
    assert done.returncode == 0, done.stderr
    assert len(losses(whole)) == 12 and losses(parts) == losses(whole)[6:]
    expected, found = final_weights(whole, 12), final_weights(parts, 12)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_runs_end_with_code_zero(corpus: Path, tmp_path: Path) -> None:
    for repeat in range(20):
        options = tiny_options(corpus, tmp_path / f"run-{repeat}", **{"train.max_steps": 3})
        done = run(torchrun("train", options))
        assert done.returncode == 0, f"repeat {repeat}:\n{done.stderr}"


@pytest.mark.long
def test_two_runs_at_once_do_not_meet(corpus: Path, tmp_path: Path) -> None:
    names, options = ("first", "second"), {"data.cache_dir": tmp_path / "cache"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                launched(
                    torchrun("train", tiny_options(corpus, tmp_path / name, **options)),
                    tmp_path / f"{name}.log",
                )
            )
            for name in names
        ]
        for process in processes:
            assert process.wait() == 0, process.output
    assert losses(tmp_path / "first") == losses(tmp_path / "second") and losses(tmp_path / "first")


def train_without_patience(argv: list[str]) -> tuple[int, str, str]:
    """On a rank of the pool: train, waiting a second for a run that is there, not half a minute."""
    with mock.patch.object(lock_run_dir, "__defaults__", (1.0,)):
        return run_command("train", argv)


@pytest.mark.long
def test_a_second_run_in_the_same_folder_is_refused(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"train.max_steps": 100000, "train.epochs": 100000, "checkpoint.every_steps": 10}
    argv = tiny_options(corpus, run_dir, **options)
    with launched(torchrun("train", argv), tmp_path / "first.log") as first:
        assert first.wait_until((run_dir / "metrics.jsonl").exists)
        [(code, out, err), other] = pools(2).run(train_without_patience, argv)
        assert code == other[0] == 2 and "waiting up to 1 s" in out
        [line] = (err + other[2]).splitlines()
        assert line.startswith("error:") and "in use by another run" in line
        assert not first.has_ended
