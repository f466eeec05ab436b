"""The files of an evaluation: predictions.jsonl and rouge.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from t5_fsdp.errors import UserError
from t5_fsdp.files import write_atomically, write_json

PREDICTION_FIELDS = ("reference", "prediction")
PREDICTION_FORMAT = (
    "each line must be one JSON object with the strings 'reference' and 'prediction', in UTF-8"
)


def read_predictions(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a predictions.jsonl, with all their fields; blank lines are skipped.

    Each has at least the strings "reference" and "prediction". NaN and infinities, which Python
    writes though JSON has none, are read as null.

    Raises:
        UserError: the file cannot be read or has no prediction, or a line is not UTF-8, not a JSON
            object or lacks one of the two strings; names file and line.
    """
    try:
        with open(path, "rb") as file:
            rows = list(_read_rows(file, path))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot read predictions from {path}: {reason}; give a readable JSON Lines file"
        ) from error
    if not rows:
        raise UserError(f"{path} has no predictions; {PREDICTION_FORMAT}")
    return rows


def _read_rows(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield _parse_row(line, f"{path}, line {number}")


def _parse_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 (byte {error.start + 1}); save the file as UTF-8 text"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}); {PREDICTION_FORMAT}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is a JSON {type(row).__name__}; {PREDICTION_FORMAT}")
    for field in PREDICTION_FIELDS:
        if field not in row:
            found = ", ".join(list(row)[:10]) or "none"
            raise UserError(f"{place} has no '{field}' (its fields: {found}); {PREDICTION_FORMAT}")
        if not isinstance(row[field], str):
            kind = "null" if row[field] is None else type(row[field]).__name__
            raise UserError(f"{place}: '{field}' is {kind}, not a string; {PREDICTION_FORMAT}")
    return row


def write_predictions(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, UTF-8; the file appears whole or not at all.

    Raises:
        ValueError: a value is NaN or infinite, which JSON cannot hold.
        OSError: the file cannot be written.
    """
    write_atomically(
        Path(path), (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    )


def write_rouge(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write a `Scores.summary` as rouge.json; the file appears whole or not at all.

    Raises:
        ValueError: a value is NaN or infinite, which JSON cannot hold.
        OSError: the file cannot be written.
    """
    write_json(Path(path), summary)
