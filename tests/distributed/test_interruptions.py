"""SIGTERM through torchrun in every phase of a run, crashes that torchrun repeats, refusals too."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.checkpoint.format import check_content
from tests.conftest import DROPOUT_MODEL, make_pairs, read_metrics, tiny_options, write_jsonl
from tests.kill_harness import Traces
from tests.launch import Launched, launched, torchrun

pytestmark = pytest.mark.long

OPTIONS = {
    "model.config": DROPOUT_MODEL,
    "train.max_steps": 40,
    "train.epochs": 1000,
    "evaluation.every_steps": 10,
    "checkpoint.every_steps": 20,
}


def is_said(text: str) -> Callable[[Launched, Traces], bool]:
    return lambda process, traces: text in process.output


def is_step(step: int) -> Callable[[Launched, Traces], bool]:
    return lambda process, traces: traces.last_step >= step


def is_saving(process: Launched, traces: Traces) -> bool:
    return traces.saving is not None


def is_preparing(process: Launched, traces: Traces) -> bool:
    return any(traces.run_dir.with_name("cache").glob("*"))


PHASES = {
    "preparation": (is_preparing, {}),
    "compilation": (
        is_said("blocks are compiled"),
        {"parallel.compile": "true", "parallel.compile_backend": "aot_eager"},
    ),
    # The ranks are finding each other.
    "connecting": (is_said("starting at step 1"), {}),
    "training": (is_step(3), {}),
    # The rows of step 10 are in the file, and 1,500 summaries take their time.
    "evaluation": (is_step(10), {"evaluation.max_examples": "null"}),
    "saving": (is_saving, {}),
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_to_torchrun(corpus: Path, tmp_path: Path, phase: str) -> None:
    reached, overrides = PHASES[phase]
    many = write_jsonl(tmp_path / "many.jsonl", make_pairs(1500, 3))
    data = {"data.validation_files": many, "data.cache_dir": tmp_path / "cache"}
    if phase == "preparation":
        data["data.train_files"] = write_jsonl(tmp_path / "train.jsonl", make_pairs(60000, 4))
    run_dir = tmp_path / "run"
    options = tiny_options(
        corpus, run_dir, **(OPTIONS | {"evaluation.max_examples": 2} | data | overrides)
    )
    logged = stop(options, run_dir, tmp_path / "log", signal.SIGTERM, reached)
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "preempted"
    if phase in ("preparation", "connecting", "compilation"):
        assert (status["step"], status["checkpoint"]) == (0, None)
        assert not list((run_dir / "checkpoints").glob("*"))
        return
    assert status["step"] >= logged > 0
    assert check_content(Path(status["checkpoint"])).name == f"step-{status['step']:08d}"
    if phase == "evaluation":
        assert status["step"] == 10 and not read_metrics(run_dir, "validation")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    options = tiny_options(corpus, run_dir, **OPTIONS, **{"evaluation.max_examples": 2})
    logged = stop(options, run_dir, tmp_path / "log", number, is_step(3))
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "preempted" and status["step"] >= logged
    assert check_content(Path(status["checkpoint"]))


def stop(
    options: list[str],
    run_dir: Path,
    log: Path,
    number: signal.Signals,
    reached: Callable[[Launched, Traces], bool],
) -> int:
    """Launch, signal when a phase is reached, wait for the end; the last step logged before."""
    traces = Traces(run_dir)
    with launched(torchrun("train", options), log) as process:
        assert process.wait_until(lambda: len(process.workers()) == 2)
        assert process.wait_until(lambda: reached(process, traces)), process.output
        logged = traces.last_step
        # torchrun would end itself with SIGUSR1: that one goes to the workers.
        to_workers = number == signal.SIGUSR1
        for pid in process.workers() if to_workers else [process.launcher.pid]:
            os.kill(pid, number)
        assert process.wait() != 0
        # torchrun has a traceback of its own, in which its module stands.
        ours = [part for part in process.output.split("Traceback ")[1:] if "t5_fsdp/" in part]
        assert not ours, process.output
    return logged


def test_a_crashed_rank_is_made_up_for_by_max_restarts(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    options = {**OPTIONS, "checkpoint.every_steps": 4, "evaluation.max_examples": 2}
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    code, _, err = pools(2).command("train", tiny_options(corpus, whole, **options))
    assert code == 0, err
    command = torchrun("train", tiny_options(corpus, run_dir, **options),
                       flags=["--max-restarts", "1"])  # fmt: skip
    traces = Traces(run_dir)
    with launched(command, tmp_path / "log") as process:
        assert process.wait_until(lambda: len(process.workers()) == 2)
        assert process.wait_until(lambda: traces.last_step >= 14), process.output
        os.kill(process.workers()[1], signal.SIGKILL)
        assert process.wait() == 0, process.output
        assert "resuming from" in process.output
        assert "no answer from rank 1" in process.output
    for kind in ("train", "validation"):
        rows, expected = (read_metrics(folder, kind) for folder in (run_dir, whole))
        assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


def test_a_refusal_that_torchrun_repeats_changes_no_file(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"train.max_steps": 4, "checkpoint.every_steps": 2}
    code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
    assert code == 0, err
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    command = torchrun(
        "train", tiny_options(corpus, run_dir, **options, **{"data.prefix": "sum: "}),
        flags=["--max-restarts", "1"],
    )  # fmt: skip
    with launched(command, tmp_path / "log") as process:
        assert process.wait() == 1
        assert process.output.count("error: ") == 2
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert after == before
