"""Folders that appear whole or not at all, and take nobody else's place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.errors import UserError
from t5_fsdp.files import new_folder


def fill(folder: Path, text: str) -> None:
    (folder / "file").write_text(text)


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new", "--output") as partial:
        fill(partial, "a")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new/file").read_text() == "a"
    with pytest.raises(UserError, match="not empty"), new_folder(tmp_path / "new", "--output"):
        pass
    with new_folder(tmp_path / "new", "--output", replace=True) as partial:
        fill(partial, "b")
    assert (tmp_path / "new/file").read_text() == "b"
    assert os.listdir(tmp_path) == ["new"]


def test_what_somebody_puts_there_meanwhile_stays(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="can't be written"),
        new_folder(tmp_path / "new", "--output") as partial,
    ):
        fill(partial, "a")
        (tmp_path / "new").mkdir()
        fill(tmp_path / "new", "theirs")
    assert (tmp_path / "new/file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
def test_the_old_one_is_back_when_the_new_one_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    (tmp_path / "new").mkdir()
    fill(tmp_path / "new", "old")
    replace, calls = os.replace, []

    def stop_between(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise stop
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_between)
    with (
        pytest.raises((UserError, KeyboardInterrupt)),
        new_folder(tmp_path / "new", "--output", replace=True) as partial,
    ):
        fill(partial, "new")
    assert (tmp_path / "new/file").read_text() == "old"
    assert os.listdir(tmp_path) == ["new"]
