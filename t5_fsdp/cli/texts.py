"""The texts to summarize: files, folders, standard input, JSON Lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5_fsdp.errors import UserError

STANDARD_INPUT = "standard input"


@dataclass(frozen=True)
class Text:
    """A text and what it is called in the output."""

    id: str | int
    text: str


def read_texts(paths: Sequence[str], *, lines: bool, column: str) -> list[Text]:
    """All texts, in the order of `paths`.

    A folder stands for the .txt files anywhere below it, sorted; a .jsonl file holds a text a line,
    in `column`, with its `id` where it has one; any other file is one text.

    Args:
        paths: none: standard input.
        lines: each line of a text is one of its own.

    Raises:
        UserError: a file is missing or not as above, all is blank, or lines are asked for of JSON
            Lines.
    """
    texts = list(_read_all(paths, lines, column))
    if not any(text.text.strip() for text in texts):
        raise UserError("the input is empty; give text files, or text on standard input")
    return texts


def _read_all(paths: Sequence[str], lines: bool, column: str) -> Iterator[Text]:
    if not paths:
        if sys.stdin is None:
            raise UserError("standard input is closed; give text files")
        yield from _texts_of(sys.stdin.buffer.read(), STANDARD_INPUT, lines)
    for path in find_files(paths):
        content = _read(path)
        if not _is_jsonl(path):
            yield from _texts_of(content, str(path), lines)
        elif lines:
            raise UserError(
                f"--lines is for plain text, and {path} is JSON Lines, which has a text a line "
                "anyway; leave it out"
            )
        else:
            yield from _rows_of(content, path, column)


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` stand for.

    Raises:
        UserError: a path does not exist, or a folder has no .txt file below it.
    """
    check_files(paths)
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(child for child in path.rglob("*.txt") if child.is_file())
        if not found:
            raise UserError(
                f"the folder {path} has no .txt file below it; name other files one by one"
            )
        files += found
    return files


def check_files(paths: Sequence[str]) -> None:
    """Refuse, without reading any, what is not there.

    Raises:
        UserError: with all of them.
    """
    missing = [name for name in paths if not Path(name).exists()]
    if missing:
        raise UserError(*(f"{name} does not exist; check the path" for name in missing))


def _is_jsonl(path: Path) -> bool:
    return path.name.lower().endswith(".jsonl")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); check the path") from None


def _texts_of(content: bytes, name: str, lines: bool) -> Iterator[Text]:
    text = _decode(content, name)
    if not lines:
        yield Text(name, text)
        return
    # Only at newlines: a text may hold other marks that Python counts as line ends.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        yield Text(f"{name}:{number}", line)


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
        ) from None


def _rows_of(content: bytes, path: Path, column: str) -> Iterator[Text]:
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield _row(_decode(line, f"{path}, line {number},"), path, number, column)


def _row(line: str, path: Path, number: int, column: str) -> Text:
    place = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} is no JSON object; write e.g. {{{json.dumps(column)}: ...}}")
    if column not in row:
        raise UserError(
            f"{place} has no {column!r} (it has {', '.join(list(row)[:10]) or 'nothing'}); set "
            "data.document_column to the field with the text"
        )
    if not isinstance(row[column], str):
        raise UserError(f"{place}: {column!r} is no string; give the text itself")
    return Text(_id(row.get("id"), place, f"{path}:{number}"), row[column])


def _id(value: Any, place: str, default: str) -> str | int:
    if value is None:
        return default
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise UserError(f"{place}: 'id' is no string or whole number; mend it, or leave it out")
    return value
