"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
