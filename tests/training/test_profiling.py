"""Traces are written for the steps that are named, and looking into a run changes none of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from t5_fsdp.config import Config, LoggingConfig
from t5_fsdp.config_problems import value_problems
from t5_fsdp.console import Console
from t5_fsdp.distributed import Launch, World
from t5_fsdp.training.meters import PHASES
from t5_fsdp.training.profiling import MemorySnapshots
from tests.conftest import read_metrics
from tests.distributed.test_training import final_weights, losses, train


def test_traces_of_two_steps_change_no_number(pools: Any, corpus: Path, tmp_path: Path) -> None:
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    train(pools(2), corpus, plain, **{"train.max_steps": 4})
    out, _ = train(
        pools(2), corpus, traced,
        **{"train.max_steps": 4, "logging.profile": "[2, 3, 9]", "logging.memory_snapshot": "true"},
    )  # fmt: skip
    assert "warning: logging.profile: no trace of step 9, this launch makes the steps 1 to 4" in out
    assert losses(traced) == losses(plain)
    for row in read_metrics(traced, "train"):  # what a trace takes to be written is no part of it
        parts = sum(row[f"{phase}_seconds"] for phase in PHASES)
        assert parts == pytest.approx(row["step_seconds"], rel=0.1)
    expected, found = final_weights(plain, 4), final_weights(traced, 4)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert out.count("warning: logging.memory_snapshot: true needs a GPU") == 1
    assert not (traced / "memory").exists() and not (plain / "profile").exists()
    files = sorted(path.name for path in (traced / "profile").iterdir())
    assert files == [f"step-{step:08d}-rank-{rank}.json.gz" for step in (2, 3) for rank in (0, 1)]
    for name in files:
        with gzip.open(traced / "profile" / name) as file:
            events = {event.get("name") for event in json.load(file)["traceEvents"]}
        # Forward, backward and the update of one step.
        assert {"aten::mm", "MmBackward0", "aten::_fused_adamw_"} <= events


def test_a_trace_that_can_not_be_written_ends_no_run(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "profile").write_text("in the way")
    out, _ = train(pools(1), corpus, run_dir, **{"train.max_steps": 1, "logging.profile": "[1]"})
    assert "warning: step 1: no trace of rank 0: " in out and "File exists" in out


def test_a_step_below_one_is_refused() -> None:
    config = Config(logging=LoggingConfig(profile=[3, 0]))
    assert "logging.profile names step 0; the first step is 1" in value_problems(config)


def test_a_snapshot_that_can_not_be_written_hides_no_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(Launch(), torch.distributed.HashStore(), torch.device("cpu"))
    snapshots = MemorySnapshots(tmp_path, False, world, Console())
    (tmp_path / "memory").write_text("in the way")
    monkeypatch.setattr(snapshots, "_is_on", True)  # as on a GPU
    assert snapshots.out_of_memory() is None
    assert "warning: no memory snapshot" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_snapshots(tmp_path: Path) -> None:
    world = World(Launch(), torch.distributed.HashStore(), torch.device("cuda", 0))
    snapshots = MemorySnapshots(tmp_path, True, world, Console(False))
    block = torch.ones(2**26, device=world.device)
    snapshots.after_step()
    written = tmp_path / "memory/peak-rank-0.pickle"
    before = written.stat().st_mtime_ns
    snapshots.after_step()
    assert written.stat().st_mtime_ns == before  # no new peak
    path = snapshots.out_of_memory()
    assert path is not None and path.stat().st_size > 0
    torch.cuda.memory._record_memory_history(enabled=None)
    del block
