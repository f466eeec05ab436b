"""What only whole processes show: a resume in a new one, and their ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_options
from tests.distributed.test_training import DROPOUT, final_weights, losses
from tests.launch import run, torchrun


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twenty_runs_end_with_code_zero(corpus: Path, tmp_path: Path) -> None:
    for repeat in range(20):
        options = tiny_options(corpus, tmp_path / f"run-{repeat}", **{"train.max_steps": 3})
        done = run(torchrun("train", options))
        assert done.returncode == 0, f"repeat {repeat}:\n{done.stderr}"
