"""What tells a model's numbers from those of another one, or of another way to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.loading import FoundModel
from t5_fsdp.cli.process import Session
from t5_fsdp.config import Config
from t5_fsdp.console import Console
from t5_fsdp.interruption import Interruption
from tests.workers import joined_world


def config_with(**values: Any) -> Config:
    config = Config(run_dir="run")
    for name, value in values.items():
        section, option = name.split("__")
        setattr(getattr(config, section), option, value)
    return config


@pytest.mark.parametrize("kind", ["checkpoint", "folder", "hub"])
def test_the_digest_sees_what_decides(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "COMPLETE").write_text("checksums")
    name = "owner/name" if kind == "hub" else str(tmp_path)
    found = FoundModel(name, "--checkpoint", tmp_path if kind == "checkpoint" else None, {})

    def digest(**values: Any) -> str:
        return found.digest(config_with(model__name=name, **values))

    same = digest()
    assert digest(train__global_batch_size=7, parallel__engine="ddp") == same
    others = {digest(model__attention="eager"), digest(parallel__tf32=True)}
    shapes = {digest(model__config={"num_layers": 1}), digest(model__revision="v1")}
    if kind == "checkpoint":  # its weights are what they are
        assert shapes == {same}
    else:
        others |= shapes
    if kind != "hub":
        (tmp_path / "COMPLETE").write_text("other checksums")
        others.add(digest())
    with monkeypatch.context() as patched:
        versions = {**run_folder.library_versions(), "torch": "9"}
        patched.setattr(run_folder, "library_versions", lambda: versions)
        others.add(digest())
    assert len(others) == {"checkpoint": 4, "folder": 6, "hub": 5}[kind] and same not in others


def choose_on_rank_zero() -> str:
    """On a rank of the pool: the checkpoint that is chosen where each rank would find another."""
    with joined_world() as world:
        session = Session(world.launch, Interruption(), Console(False))
        session.world = world
        found = FoundModel("run", "--checkpoint", Path("newest"), {})
        finder = f"of rank {world.rank}"
        with mock.patch.object(run_folder, "find_checkpoint", lambda *_: Path(finder)):
            found.choose("loss", session)
    return str(found.checkpoint)


def test_all_ranks_take_the_checkpoint_of_rank_0(pools: Any) -> None:
    # A training may write the next one meanwhile.
    assert pools(2).run(choose_on_rank_zero) == ["of rank 0", "of rank 0"]
