"""Between two rows of the log the host reads nothing that the device has yet to compute."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import read_metrics, tiny_options
from tests.workers import run_command

# What makes a number of the host's, or a shape, out of a tensor's values.
_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique")


class _Reads(TorchDispatchMode):
    """Collects operations that would make a host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def reads_of_steps(argv: list[str]) -> tuple[int, str, dict[int, list[str]]]:
    """On a rank of the pool: train; what each step read, while it was asked for."""
    from t5_fsdp.training.trainer import Trainer

    found: dict[int, list[str]] = {}

    def watched(name: str, function: Any) -> Any:
        def call(trainer: Any, batch: Any, *args: Any) -> Any:
            with _Reads() as reads:
                result = function(trainer, batch, *args)
            found.setdefault(batch.step, []).extend(f"{name}: {read}" for read in reads.found)
            return result

        return call

    names = ("_compute_gradients", "_update")
    before = {name: getattr(Trainer, name) for name in names}
    for name, function in before.items():
        setattr(Trainer, name, watched(name, function))
    try:
        code, _, err = run_command("train", argv)
    finally:
        for name, function in before.items():
            setattr(Trainer, name, function)
    return code, err, found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parallel.engine": "fsdp1", "parallel.activation_checkpointing": "full"},
        {"parallel.engine": "ddp", "parallel.param_dtype": "fp16"},
        {"optimizer.name": "adafactor"},
        {"optimizer.moments_dtype": "bf16", "parallel.param_dtype": "bf16"},
    ],
    ids=str,
)
def test_a_step_reads_nothing_from_the_device(
    pools: Any, corpus: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    argv = tiny_options(corpus, run_dir, **{"train.max_steps": 3, **options})
    for code, err, found in pools(2).run(reads_of_steps, argv):
        assert code == 0, err
        assert found == {1: [], 2: [], 3: []}
    assert len(read_metrics(run_dir, "train")) == 3


class _SlowDevice:
    """Stands for a GPU: it is asked for a step's work in no time and takes long to do it."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.ends: dict[int, float] = {}
        self._end = 0.0

    def ask(self, step: int) -> None:
        self._end = self.ends[step] = self.mark() + self.step_seconds

    # A timeline (t5_fsdp/training/stopwatch.py), whose marks are the host's seconds.
    def mark(self) -> float:
        return max(self._end, time.perf_counter())

    def is_past(self, mark: float) -> bool:
        return time.perf_counter() >= mark

    def wait(self, mark: float) -> None:
        time.sleep(max(0.0, mark - time.perf_counter()))

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[_SlowDevice]:
    """Under this process's trainer: each step's passes take it half a second."""
    from t5_fsdp.training import meters, trainer

    device = _SlowDevice(0.5)

    class LateCopy(trainer.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            self._is_made = device.mark()

        def tolist(self) -> list[float]:
            device.wait(self._is_made)
            return super().tolist()

    compute = trainer.Trainer._compute_gradients

    def compute_late(self: Any, batch: Any) -> Any:
        result = compute(self, batch)
        device.ask(batch.step)
        self._meters.lap("backward")
        return result

    monkeypatch.setattr(meters, "timeline_of", lambda _: device)
    monkeypatch.setattr(trainer, "HostCopy", LateCopy)
    monkeypatch.setattr(trainer.Trainer, "_compute_gradients", compute_late)
    yield device


def test_the_parts_of_a_step_add_up_where_the_host_runs_ahead(
    corpus: Path, tmp_path: Path, slow_device: _SlowDevice
) -> None:
    from t5_fsdp.training.meters import PHASES

    options = {"train.max_steps": 8, "logging.every_steps": 4, "data.validation_files": "[]"}
    code, _, err = run_command("train", tiny_options(corpus, tmp_path / "run", **options))
    assert code == 0, err
    for row in read_metrics(tmp_path / "run", "train"):
        parts = sum(row[f"{phase}_seconds"] for phase in PHASES)
        assert row["step_seconds"] == pytest.approx(parts, rel=0.1)
        # The run's first step has nothing to wait for: the host is ahead from then on.
        assert row["step_seconds"] >= 0.9 * slow_device.step_seconds


def test_a_signal_is_heard_before_another_two_steps(
    corpus: Path, tmp_path: Path, slow_device: _SlowDevice
) -> None:
    def ask_to_stop() -> None:
        while 4 not in slow_device.ends:
            time.sleep(0.01)
        # The host has asked for step 4, and waits for the device, which is in step 3.
        time.sleep(0.2 * slow_device.step_seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask_to_stop, daemon=True)
    thread.start()
    options = {"train.max_steps": 9, "logging.every_steps": 9, "data.validation_files": "[]"}
    code, _, err = run_command("train", tiny_options(corpus, tmp_path / "run", **options))
    thread.join()
    assert code == 75, err
    assert max(slow_device.ends) == 4


def test_reads_are_seen() -> None:
    with _Reads() as reads:
        bool(torch.ones(3).sum() > 2)
        float(torch.ones(()))
    assert len(reads.found) >= 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_gpu(corpus: Path, tmp_path: Path) -> None:
    from t5_fsdp.training.trainer import Trainer

    def strict(function: Any) -> Any:
        def call(trainer: Any, batch: Any, *args: Any) -> Any:
            if batch.step > 1:  # the first one sets up what stays
                torch.cuda.set_sync_debug_mode("error")
            try:
                return function(trainer, batch, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    before = {name: getattr(Trainer, name) for name in ("_compute_gradients", "_update")}
    for name, function in before.items():
        setattr(Trainer, name, strict(function))
    try:
        code, _, err = run_command("train", tiny_options(corpus, tmp_path / "run"))
    finally:
        for name, function in before.items():
            setattr(Trainer, name, function)
    assert code == 0, err
