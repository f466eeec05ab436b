"""Rows of files, one by one, each with its number; what is malformed is said, never swallowed.

The standard library reads CSV and JSON, pyarrow reads Parquet. The CSV and JSON loaders of
`datasets` are not used: with a surplus field pandas silently shifts the columns, pyarrow rewrites
texts that look like dates and numbers, and neither can say which row is at fault.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from t5_fsdp.errors import UserError

EXTENSIONS = (".csv", ".jsonl", ".json", ".parquet")
COMPRESSED = ".gz"

Row = dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used.

    Attributes:
        reason: what is wrong with it, without a place, e.g. "3 fields, but the header has 2".
        remedy: what to do about it.
    """

    reason: str
    remedy: str


Reader = Callable[[Path], Iterator[tuple[int, Row | BadRow]]]


def format_of(path: Path) -> str | None:
    """One of `EXTENSIONS` by the file's name, also with .gz behind it; None for another file."""
    name = path.name.lower()
    for extension in EXTENSIONS:
        if name.endswith(extension):
            return extension
        if name.endswith(extension + COMPRESSED) and extension != ".parquet":
            return extension
    return None


def read_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """The rows of a file with their numbers; in CSV the header is row 1, elsewhere rows begin at 1.

    A row that is malformed by itself comes as a `BadRow`, and the rows after it follow.

    Raises:
        UserError: the file can't be read, or is damaged so that the rest of it can't be told
            apart: a quote that is never closed, a cut-off archive, broken Parquet or JSON.
    """
    extension = format_of(path)
    assert extension is not None, path
    with _file_errors(path):
        yield from _READERS[extension](path)


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path}: the compressed file is damaged or cut off ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the file") from None


def _open(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(COMPRESSED):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


# ---------------------------------------------------------------- CSV

# Marks that no decoded text can hold: undecodable bytes come as U+DC80 to U+DCFF.
_NUL = "\udc00"
_END_OF_FILE = "\udc01end of file"
_DAMAGE = re.compile("[\ud800-\udfff]")


def csv_records(path: Path, strict: bool = True) -> Iterator[tuple[int, list[str] | BadRow]]:
    """The records of a CSV file, header included, with their row number (the header is row 1).

    Quoted fields may hold newlines and be of any length; empty lines are left out. A byte-order
    mark is removed.

    Args:
        path: of the file.
        strict: a quoted field must end at its closing quote. Otherwise what follows is taken as
            part of the field, as the published WikiHow loaders do.

    Raises:
        UserError: a quote that is never closed, or closed in a later row, which would swallow the
            rows between; line ends of a lone carriage return; a file that cannot be read.
    """
    csv.field_size_limit(sys.maxsize)
    row = 0
    with _file_errors(path), _open(path) as file:
        lines = _CsvLines(file, path)
        reader = csv.reader(lines, strict=strict)
        while True:
            first_line = lines.number + 1
            row += 1
            try:
                record = next(reader)
            except csv.Error as error:
                place = f"{path}, row {row} (it begins on line {first_line})"
                if "new-line character" in str(error):
                    raise UserError(
                        f"{place}: a carriage return outside of quotes; save the file with LF or "
                        "CRLF line ends"
                    ) from None
                if lines.ended or lines.number > first_line:
                    # The rows between have been swallowed: nobody can tell where they begin.
                    raise UserError(
                        f"{place}: a quote is opened and never closed, or only on line "
                        f"{lines.number}; close it, and double quotes inside a field"
                    ) from None
                yield (
                    row,
                    BadRow(f"not valid CSV ({error})", "double the quotes inside a quoted field"),
                )
                continue
            if record == [_END_OF_FILE]:
                return
            if record and record[-1].endswith(_END_OF_FILE):
                raise UserError(
                    f"{path}, row {row}: a quote is opened and never closed (the row begins on "
                    f"line {first_line}); close it, or fetch the file again if it was cut off"
                )
            if not record:
                row -= 1
                continue
            yield row, _csv_damage(record) or record


def _csv_damage(record: list[str]) -> BadRow | None:
    for text in record:
        if found := _DAMAGE.search(text):
            if found[0] == _NUL:
                return BadRow("contains a NUL byte", "the file is damaged or not CSV, replace it")
            byte = ord(found[0]) - 0xDC00
            return BadRow(f"byte 0x{byte:02x} is not UTF-8", "save the file as UTF-8")
    return None


class _CsvLines:
    """Decoded lines and then an end mark: inside an open quote it becomes part of the field.

    csv.reader takes the end of the file for a closing quote (its strict mode would also refuse
    harmless quotes). Bytes that are no text stay as marks, so that only their row is lost.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._lines = self._decoded(file, path)
        self.number = 0
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines)

    def _decoded(self, file: IO[bytes], path: Path) -> Iterator[str]:
        for line in file:
            if self.number == 0:
                line = _without_mark(line, path)
            self.number += 1
            yield line.decode("utf-8", "surrogateescape").replace("\x00", _NUL)
        self.ended = True
        yield _END_OF_FILE


def _without_mark(line: bytes, path: Path) -> bytes:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16 text; save it as UTF-8")
    return line.removeprefix(b"\xef\xbb\xbf")


def _csv_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    records = csv_records(path)
    _, header = next(records, (1, []))
    if isinstance(header, BadRow):
        raise UserError(f"{path}, row 1: {header.reason}; {header.remedy}")
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise UserError(f"{path}, row 1: column {repeated[0]!r} occurs twice; rename one of them")
    for number, record in records:
        if isinstance(record, BadRow):
            yield number, record
        elif len(record) != len(header):
            yield (
                number,
                BadRow(
                    f"{len(record)} fields, but the header has {len(header)}",
                    "put fields that contain commas or newlines in double quotes",
                ),
            )
        else:
            yield number, dict(zip(header, record, strict=True))


# ---------------------------------------------------------------- JSON


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = _without_mark(line, path)
            if line.strip():
                yield number, _json_line(line)


def _json_line(line: bytes) -> Row | BadRow:
    try:
        return _object(_parse(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        bad_byte = error.object[error.start]
        return BadRow(f"byte 0x{bad_byte:02x} is not UTF-8", "save the file as UTF-8")
    except RecursionError:
        return BadRow("JSON nested too deeply", "write flat objects")
    except ValueError as error:
        return BadRow(f"not valid JSON ({error})", "write one object a line")


def _json_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """A list of objects; or, as often found under this name, one object a line."""
    if _is_jsonl(path):
        yield from _jsonl_rows(path)
        return
    with _open(path) as file:
        content_bytes = _without_mark(file.read(), path)
    try:
        content = _parse(content_bytes.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte 0x{error.object[error.start]:02x} at position {error.start} is not "
            "UTF-8; save the file as UTF-8"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deeply; give a list of objects") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); mend it there") from None
    if isinstance(content, dict) and not any(map(_holds_objects, content.values())):
        content = [content]  # a single row
    if not isinstance(content, list):
        raise UserError(
            f"{path}: holds one {_json_kind(content)} instead of rows; give a list of objects, "
            "or one object a line"
        )
    for number, value in enumerate(content, 1):
        yield number, _object(value)


def _is_jsonl(path: Path) -> bool:
    """Whether the first line is an object and others follow: it need not be read whole."""
    with _open(path) as file:
        first = _without_mark(file.readline(), path)
        while first and not first.strip():
            first = file.readline()
        return isinstance(_json_line(first), dict) and bool(file.readline().strip())


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(part, list | dict) for part in value)
    )


def _parse(text: str) -> Any:
    # Numbers stay as written: 1.50 is not 1.5 to a tokenizer.
    return json.loads(text, parse_float=str, parse_int=str, parse_constant=str)


def _object(value: Any) -> Row | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow(
        f"a {_json_kind(value)} instead of an object with columns",
        'write e.g. {"document": "...", "summary": "..."}',
    )


def _json_kind(value: Any) -> str:
    return {list: "list", dict: "object", bool: "truth value"}.get(type(value), "plain value")


# ---------------------------------------------------------------- Parquet

_ROWS_A_BATCH = 1000


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_A_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{path}: not readable as Parquet after row {number} ({reason}); write it again"
        ) from None


_READERS: dict[str, Reader] = {
    ".csv": _csv_rows,
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


# ---------------------------------------------------------------- cells


def cell_text(value: Any) -> str | BadRow:
    """The text of a cell: missing (or NaN) is empty, a number or truth value is written out.

    A list of texts (several reference lines) is joined by newlines.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""  # NaN is what parquet files have for missing
    if isinstance(value, list):
        parts = [cell_text(part) for part in value if not isinstance(part, list)]
        if len(parts) < len(value) or any(isinstance(part, BadRow) for part in parts):
            return BadRow("a list that holds more than texts", "join its parts into one string")
        return "\n".join(str(part) for part in parts)
    if isinstance(value, dict | bytes):
        kind = type(value).__name__
        return BadRow(f"a {kind} instead of text", "give the column with the text itself")
    text = value if isinstance(value, str) else _written_out(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return BadRow("half a surrogate pair, which is no character", "remove it")
    return text


def _written_out(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
