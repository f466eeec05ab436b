"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from t5_fsdp.errors import UserError

# What a user can mend about a path, whoever meets it: room, permissions, what is in the way.
FILE_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EACCES", "EROFS", "EPERM", "ENOTDIR", "EISDIR", "EEXIST",
                 "ENAMETOOLONG", "ELOOP")
)  # fmt: skip


def as_user_error(error: BaseException) -> BaseException:
    """A UserError for what a user can mend about a file or folder; anything else as it is."""
    if isinstance(error, shutil.Error):  # of copying a folder: a list of (from, to, why)
        return UserError(f"a folder can't be copied ({str(error)[:300]}); make room for it")
    if not isinstance(error, OSError) or error.errno not in FILE_ERRORS | {errno.EMFILE}:
        return error
    # Of a move the second name is the one that the user gave.
    what = error.filename2 or error.filename or "a file"
    name = str(what) if len(str(what)) <= 200 else f"{str(what)[:200]}..."
    return UserError(
        f"{name} can't be read or written ({error.strerror}); make room, change what is in the "
        "way, or give another path"
    )


def write_atomically(path: Path, texts: Iterable[str]) -> None:
    """Write UTF-8 text in one move: a reader, or a crash, sees the old file or the new one.

    Args:
        path: its folder is made if needed. A pipe or device is written to, never replaced.
        texts: parts, written one after the other.

    Raises:
        OSError: the file cannot be written; the old one is untouched.
    """
    try:
        _write(path, texts)
    except OSError as error:
        if error.filename is None:  # a full disk names no file
            error.filename = str(path)
        raise


def _write(path: Path, texts: Iterable[str]) -> None:
    if is_special(path):
        with path.open("wb") as file:
            _write_texts(file, texts)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with partial.open("wb") as file:
            _write_texts(file, texts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):  # must not hide the first error
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def is_special(path: Path) -> bool:
    """Whether it is there and neither file nor folder: a pipe, /dev/null, /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_texts(file: BinaryIO, texts: Iterable[str]) -> None:
    for text in texts:
        # UTF-8 has no lone surrogates; as \udXXX they are valid JSON and read back alike.
        file.write(text.encode("utf-8", errors="backslashreplace"))


def check_writable(path: Path, option: str) -> None:
    """Ask before long work whether its result can be written; makes the file's folder.

    Args:
        option: how the user gave the path, for messages.

    Raises:
        UserError: it is a folder, or no file can be made there.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; give a file")
    if is_special(path):
        return
    partial = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise UserError(
            f"{option} {path} can't be written ({error.strerror}); give another path"
        ) from None


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a path: no Hub id begins or is divided like that."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def not_a_folder(path: str | Path) -> str:
    """What to say of a path that should be a folder and is none."""
    if os.path.lexists(path):
        return f"{path} is no folder; give the path of a folder"
    return f"there is no folder {path}; check the path"


def json_number(value: float) -> float | None:
    """The number, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


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
