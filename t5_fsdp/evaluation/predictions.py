"""The files of an evaluation: predictions.jsonl and rouge.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from t5_fsdp.errors import UserError
from t5_fsdp.files import write_atomically, write_json

PREDICTION_FORMAT = (
    "each line must be one JSON object with the strings 'reference' and 'prediction', in UTF-8"
)


def read_predictions(
    path: str | os.PathLike[str], on_bad_bytes: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """The objects of a predictions.jsonl, with all their fields; blank lines are skipped.

    Each has at least the string "prediction" and either the string "reference" or "references", a
    list of strings. "document", a string, and "id", a string or whole number and different in each
    line, may be left out (or null, both), an id in all lines or none. NaN and infinities, which
    Python writes though JSON has none, are read as null.

    Args:
        on_bad_bytes: told of each line that is not UTF-8, which is then read with U+FFFD for what
            is wrong; None: such a line is refused.

    Raises:
        UserError: the file cannot be read or has no prediction, or a line is not UTF-8, not a JSON
            object or not as above; names file and line.
    """
    try:
        with open(path, "rb") as file:
            rows = list(_read_rows(file, path, on_bad_bytes))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot read predictions from {path}: {reason}; give a readable JSON Lines file"
        ) from error
    if not rows:
        raise UserError(f"{path} has no predictions; {PREDICTION_FORMAT}")
    return rows


def references_of(row: Mapping[str, Any]) -> list[str]:
    """The one or several references of a row."""
    return row["references"] if "references" in row else [row["reference"]]


def stored_rows(
    folder: Path, settings: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """The rows of an earlier evaluation of the same examples, in their order; None without one.

    Args:
        folder: has its rouge.json and predictions.jsonl, or not.
        settings: what decided about the predictions, as in rouge.json's "settings".
        examples: "document" and "reference" or "references" of each; the id does not matter.
    """
    try:
        summary = json.loads((folder / "rouge.json").read_text(encoding="utf-8"))
        stored = summary["settings"]
        if any(name not in stored or stored[name] != settings[name] for name in settings):
            return None
        by_texts = {_texts_of(row): row for row in read_predictions(folder / "predictions.jsonl")}
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    found = [by_texts.get(_texts_of(example)) for example in examples]
    return None if None in found else found  # type: ignore[return-value]


def _texts_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row.get("document"), *references_of(row))


def _read_rows(
    file: BinaryIO, path: str | os.PathLike[str], on_bad_bytes: Callable[[str], None] | None
) -> Iterator[dict[str, Any]]:
    lines_of_ids: dict[str, int] = {}
    num_rows = 0
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        row = _parse_row(_decode(line, place, on_bad_bytes), place)
        _check_fields(row, place)
        if "id" in row:
            earlier = lines_of_ids.setdefault(str(row["id"]), number)
            if earlier != number:
                raise UserError(
                    f"{place}: id {row['id']!r} stands in line {earlier} too; give each example an "
                    "id of its own, or none any"
                )
        num_rows += 1
        if len(lines_of_ids) not in (0, num_rows):
            found = "an id" if "id" in row else "no id"
            raise UserError(f"{place} has {found}, unlike those before; give all one, or none")
        yield row


def _decode(line: bytes, place: str, on_bad_bytes: Callable[[str], None] | None) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"{place} is not UTF-8 (byte {error.start + 1})"
        if on_bad_bytes is None:
            raise UserError(f"{problem}; save the file as UTF-8 text") from error
        on_bad_bytes(problem)
        return line.decode("utf-8", errors="replace")


def _parse_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}); {PREDICTION_FORMAT}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is a JSON {type(row).__name__}; {PREDICTION_FORMAT}")
    return {name: value for name, value in row.items() if not _is_left_out(name, value)}


def _is_left_out(name: str, value: Any) -> bool:
    return name in ("id", "document") and value is None


def _check_fields(row: dict[str, Any], place: str) -> None:
    if "references" in row:
        _check_references(row, place)
    for field in ("prediction", "reference"):
        if field in row or (field == "reference" and "references" in row):
            continue
        found = ", ".join(list(row)[:10]) or "none"
        raise UserError(f"{place} has no '{field}' (its fields: {found}); {PREDICTION_FORMAT}")
    for field in ("reference", "prediction", "document"):
        if field in row and not isinstance(row[field], str):
            raise UserError(
                f"{place}: '{field}' is {_kind(row[field])}, not a string; {PREDICTION_FORMAT}"
            )
    if "id" in row and (not isinstance(row["id"], str | int) or isinstance(row["id"], bool)):
        raise UserError(
            f"{place}: 'id' is {_kind(row['id'])}; give a string or a whole number, or leave it out"
        )


def _check_references(row: dict[str, Any], place: str) -> None:
    references = row["references"]
    if "reference" in row:
        raise UserError(f"{place} has 'reference' and 'references'; give one of them")
    if not isinstance(references, list) or not references:
        kind = "an empty list" if references == [] else _kind(references)
        raise UserError(f"{place}: 'references' is {kind}; give a list of texts, or 'reference'")
    for text in references:
        if not isinstance(text, str):
            raise UserError(f"{place}: 'references' holds {_kind(text)}, not strings alone")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


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
