"""A checkpoint from a stranger can't run anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from t5_fsdp.checkpoint.safe_reader import SafePlanner, SafeReader


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def load(state: dict[str, Any], folder: Path) -> None:
    dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = {
        "model": {f"w{i}": torch.randn(3, 2).to(d) for i, d in enumerate(DTYPES)},
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "fused": True, "name": None}],
    }
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    found = {
        "model": {name: torch.zeros_like(t) for name, t in saved["model"].items()},  # type: ignore[attr-defined]
        "groups": [{"lr": 0.0, "betas": (0.0, 0.0), "fused": False, "name": ""}],
    }
    load(found, tmp_path / "c")
    assert found["groups"] == saved["groups"]
    for name, tensor in saved["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(found["model"][name], tensor)  # type: ignore[call-overload]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def test_a_trap_in_the_index_is_not_sprung(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises((CheckpointException, pickle.UnpicklingError), match="mkdir"):
        load({"w": torch.zeros(2)}, tmp_path / "c")
    assert not (tmp_path / "sprung").exists()
    # It is one: torch's own reader falls for it.
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert (tmp_path / "sprung").exists()


def test_a_trap_among_the_values_is_not_sprung(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "value": Trap(tmp_path / "sprung")}
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises((CheckpointException, pickle.UnpicklingError)):
        load({"w": torch.zeros(2), "value": 0}, tmp_path / "c")
    assert not (tmp_path / "sprung").exists()
