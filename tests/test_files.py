"""Folders that appear whole or not at all, and take nobody else's place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.errors import UserError
from t5_fsdp.files import check_writable, new_folder, write_atomically


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


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """So does a device: /dev/null must not become a file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(path, "--json")
        write_atomically(path, ["a", "b"])
        assert os.read(reader, 10) == b"ab"
    finally:
        os.close(reader)
    assert path.is_fifo() and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")  # never the device itself, which root could replace
    with pytest.raises(OSError) as caught:
        write_atomically(path, ["a"])
    assert caught.value.filename == str(path) and path.is_symlink()


def test_whether_a_file_can_be_written_is_known_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "new/plan.json", "--json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    for bad in (tmp_path, tmp_path / "file/plan.json", Path("/proc/plan.json")):
        with pytest.raises(UserError, match=f"--json {bad} "):
            check_writable(bad, "--json")
