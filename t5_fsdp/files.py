"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from t5_fsdp.errors import UserError

# What a user can mend about a path, whoever meets it: room, permissions, what is in the way.
FILE_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EACCES", "EROFS", "EPERM", "ENOTDIR", "EISDIR", "EEXIST",
                 "ENAMETOOLONG", "ELOOP")
)  # fmt: skip


def write_atomically(path: Path, texts: Iterable[str]) -> None:
    """Write UTF-8 text in one move: a reader, or a crash, sees the old file or the new one.

    Args:
        path: its folder is made if needed.
        texts: parts, written one after the other.

    Raises:
        OSError: the file cannot be written; the old one is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            for text in texts:
                # UTF-8 has no lone surrogates; as \udXXX they are valid JSON and read back alike.
                file.write(text.encode("utf-8", errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):  # must not hide the first error
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`value` as an indented JSON file, written as by `write_atomically`.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
        OSError: the file cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, [text + "\n"])


def check_new(path: Path, option: str) -> None:
    """Raises UserError when something is at `path` already, an empty folder aside."""
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{option} {path} exists and is not empty; give a new one")


def copy_files(source: Path, target: Path) -> None:
    """Copy all files below a folder into another one, without the modes of files and folders."""
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


@contextlib.contextmanager
def new_folder(folder: Path, option: str, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when nothing went wrong.

    Args:
        option: how the user gave it, for messages.
        replace: one that is there, which the caller has made sure is its own, goes when the new
            one is complete.

    Raises:
        UserError: it can't be written, or something is there already.
    """
    folder = Path(os.path.abspath(folder))  # "." has no name
    if not replace:
        check_new(folder, option)
    partial, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    try:
        _put_back(old, folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if folder.is_dir():
            if replace:
                os.replace(folder, old)
            else:  # fails where somebody has put something into it meanwhile
                folder.rmdir()
        os.replace(partial, folder)
    except (OSError, shutil.Error) as error:
        raise UserError(f"{option} {folder} can't be written ({error})") from None
    finally:
        _put_back(old, folder)
        shutil.rmtree(partial, ignore_errors=True)


def _put_back(old: Path, folder: Path) -> None:
    """Delete what a complete new folder has replaced; where none came, it is the folder again."""
    if not os.path.lexists(folder) and old.is_dir():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)
