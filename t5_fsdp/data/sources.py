"""From what the user has (files, WikiHow, the bundled sample) to splits of id, document, summary.

Rows are read one by one with the standard library (Parquet with pyarrow) and handed on as
`datasets.Dataset`s backed by Arrow files. The CSV and JSON loaders of `datasets` are not used:
with a surplus field pandas silently shifts the columns, pyarrow rewrites texts that look like
dates and numbers, and neither can say which row is at fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import DataConfig
from t5_fsdp.data import wikihow
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow

SPLITS = ("train", "validation", "test")
EXTENSIONS = (".csv", ".jsonl", ".json", ".parquet")
SAMPLE_FOLDER = Path(__file__).parents[2] / "data" / "sample"
READING_VERSION = 1  # raise when the same files would give other rows
EMPTY_DOCUMENT, EMPTY_SUMMARY = "empty document", "empty summary"

_BLOCK_BYTES = 1 << 20
_ROWS_A_BATCH = 1000

Row = dict[str, Any]
Reader = Callable[[Path], Iterator[tuple[int, Row]]]


@dataclass
class LoadedSplits:
    """Cleaned texts, not yet tokens.

    Attributes:
        splits: per split a Dataset of the string columns id, document, summary. A split that was
            not given, or that is empty after the cleaning of WikiHow, is missing. The Arrow files
            lie in the `work_dir` of `load_splits`.
        audit: {"splits": {split: {"kept", "read"}}, "dropped": {reason: rows}, "notes": [line]};
            `read` counts the rows of the split's files, for WikiHow those its lists assign to it.
    """

    splits: dict[str, datasets.Dataset]
    audit: dict[str, Any]


def source_problems(data: DataConfig) -> list[str]:
    """What can be said against the data without reading it, one line each; empty when nothing.

    Cheap (no torch, no datasets): a command calls it before it loads a model.
    """
    if data.source == "wikihow":
        return _wikihow_problems(Path(data.path))
    if data.source == "sample":
        return [
            f"data.source: sample needs {path}, which is not there; "
            "make it with `python -m t5_fsdp.data.sample`"
            for paths in _files(data).values()
            for path in paths
            if not path.is_file()
        ]
    if data.source == "files":
        return [
            problem
            for split, paths in _files(data).items()
            for path in paths
            if (problem := _file_problem(f"data.{split}_files", path, EXTENSIONS))
        ]
    return []


def _wikihow_problems(folder: Path) -> list[str]:
    if not (folder / wikihow.CSV_NAME).exists():
        return [
            f"data.path {folder} has no {wikihow.CSV_NAME}; download it and put it there "
            "(data/README.md says from where), or set data.path"
        ]
    problems = [
        _file_problem("data.path", folder / wikihow.CSV_NAME, (".csv",)),
        wikihow.list_problem(folder),
    ]
    return [problem for problem in problems if problem]


def _file_problem(option: str, path: Path, extensions: tuple[str, ...]) -> str | None:
    if not path.exists():
        return f"{option}: {path} does not exist; check the path"
    if path.is_dir():
        return f"{option}: {path} is a folder; name the files in it"
    if path.suffix.lower() not in extensions:
        return (
            f"{option}: {path} has the unknown extension {path.suffix!r}; "
            f"use one of {', '.join(extensions)}"
        )
    if not os.access(path, os.R_OK):
        return f"{option}: {path} may not be read; change its permissions"
    if path.stat().st_size == 0:
        return f"{option}: {path} is empty; give a file with rows or leave it out"
    return None


def _files(data: DataConfig) -> dict[str, list[Path]]:
    """The files of each split (files, sample), or all files under one name (wikihow)."""
    if data.source == "sample":
        return {split: [SAMPLE_FOLDER / f"{split}.jsonl"] for split in SPLITS}
    if data.source == "wikihow":
        folder = Path(data.path)
        lists = [folder / wikihow.LIST_NAMES[split] for split in wikihow.present_lists(folder)]
        return {"all": [folder / wikihow.CSV_NAME, *lists]}
    files = {}
    for split in SPLITS:
        value = getattr(data, f"{split}_files")
        paths = [value] if isinstance(value, str) else value
        files[split] = [Path(path).expanduser() for path in paths]
    return files


def source_fingerprint(data: DataConfig) -> str:
    """Hex digest of all that decides which rows `load_splits` gives.

    That is the content of the files (neither path nor time) and the options that matter.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    options: dict[str, Any] = {
        "version": READING_VERSION,
        "source": data.source,
        "limits": [_limit(data, split) for split in SPLITS],
    }
    if data.source == "files":
        options["columns"] = [data.document_column, data.summary_column]
    digest.update(json.dumps(options, sort_keys=True).encode())
    for split, paths in _files(data).items():
        for path in paths:
            # A WikiHow list counts by its role; elsewhere only the format of a name matters.
            role = path.name if data.source == "wikihow" else path.suffix.lower()
            digest.update(f"\n{split} {role} ".encode())
            digest.update(_content_digest(path))
    return digest.hexdigest()


def _content_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check the file and data.source"
        ) from None
    return digest.digest()


def _limit(data: DataConfig, split: str) -> int | None:
    return getattr(data, f"max_{split}_examples")


def load_splits(data: DataConfig, work_dir: Path) -> LoadedSplits:
    """Read, clean and split everything.

    A row's id is its column `id` (WikiHow: the title without spaces) where every kept row of the
    split has one and no two are equal, else the row number: from 0, dropped rows counted, over
    all files of the split. With max_*_examples the first kept rows are used; the rest is still
    read and checked.

    Args:
        data: source, files, columns and limits.
        work_dir: where the Arrow files of the result are written, in a new folder each time.

    Raises:
        UserError: a missing or malformed file, an absent column, a value that is no text (with
            file and row), or a split without usable rows.
    """
    problems = source_problems(data)
    if problems:
        raise UserError(*problems)
    work_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="texts-", dir=work_dir))
    collector = _Collector(
        {split: _SplitWriter(split, folder, _limit(data, split)) for split in SPLITS}
    )
    try:
        if data.source == "wikihow":
            _read_wikihow(Path(data.path), collector)
        else:
            _read_files(data, collector)
    finally:
        collector.close()
    return collector.result(_must_have_rows(data))


def _must_have_rows(data: DataConfig) -> list[str]:
    if data.source == "wikihow":
        return ["train"]
    return ["train", *(split for split, paths in _files(data).items() if paths)]


@dataclass
class _SplitWriter:
    """Streams the kept rows of one split into an Arrow file."""

    split: str
    folder: Path
    limit: int | None
    read: int = 0
    usable: int = 0
    kept: int = 0
    ids_usable: bool = True
    _seen_ids: set[str] = field(default_factory=set)
    _rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    _stream: pyarrow.ipc.RecordBatchStreamWriter | None = None

    @property
    def path(self) -> Path:
        return self.folder / f"{self.split}.arrow"

    def add(self, row_id: str | None, document: str, summary: str) -> None:
        """Take one usable row; its number is that of the last row read."""
        self.usable += 1
        if self.limit is not None and self.kept >= self.limit:
            return
        self.kept += 1
        if not row_id or row_id in self._seen_ids:
            self.ids_usable = False
            self._seen_ids.clear()
        elif self.ids_usable:
            self._seen_ids.add(row_id)
        self._rows.append((row_id or "", str(self.read - 1), document, summary))
        if len(self._rows) == _ROWS_A_BATCH:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        schema = pa.schema([(name, pa.string()) for name in ("id", "row", "document", "summary")])
        if self._stream is None:
            self._stream = pa.ipc.new_stream(str(self.path), schema)
        columns = [pa.array(column, pa.string()) for column in zip(*self._rows, strict=True)]
        self._stream.write_batch(pa.record_batch(columns, schema=schema))
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._flush()
        if self._stream is not None:
            self._stream.close()

    def dataset(self) -> datasets.Dataset:
        """The rows written, once closed."""
        from datasets import Dataset

        rows = Dataset.from_file(str(self.path))
        if not self.ids_usable:
            rows = rows.remove_columns("id").rename_column("row", "id")
        return rows.select_columns(["id", "document", "summary"])


@dataclass
class _Collector:
    """What the readers fill: rows per split, and why rows were dropped."""

    writers: dict[str, _SplitWriter]
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def result(self, must_have_rows: list[str]) -> LoadedSplits:
        for split in must_have_rows:
            if self.writers[split].kept == 0:
                reasons = ", ".join(f"{n} {why}" for why, n in sorted(self.dropped.items()))
                raise UserError(
                    f"the {split} split has no usable rows (rows dropped in all: "
                    f"{reasons or 'none'}); check data.source and its files"
                )
        present = {split: writer for split, writer in self.writers.items() if writer.kept}
        for split, writer in present.items():
            if writer.kept < writer.usable:
                self.notes.append(
                    f"{split}: the first {writer.kept} of {writer.usable} usable rows "
                    f"(data.max_{split}_examples)"
                )
            if not writer.ids_usable:
                self.notes.append(f"{split}: no id of its own for every row; ids are row numbers")
        audit = {
            "splits": {s: {"kept": w.kept, "read": w.read} for s, w in present.items()},
            "dropped": dict(sorted(self.dropped.items())),
            "notes": self.notes,
        }
        return LoadedSplits({split: w.dataset() for split, w in present.items()}, audit)


def _read_wikihow(folder: Path, collector: _Collector) -> None:
    lists = wikihow.read_lists(folder)
    if not lists:
        collector.notes.append(
            "no official split lists: split by a hash of the title, about 2.5 % each for "
            "validation and test; results do not compare with published ones"
        )
    elif "train" not in lists:
        collector.notes.append(
            "all_train.txt is missing: training is every row in neither all_val.txt nor "
            "all_test.txt (published results use the list)"
        )
    for _, row in wikihow.read_rows(folder / wikihow.CSV_NAME):
        if row is None:
            collector.dropped[wikihow.WRONG_FIELD_COUNT] += 1
            continue
        split = wikihow.split_of(row["title"], lists)
        if split is None:
            collector.dropped["title in no split list"] += 1
            continue
        writer = collector.writers[split]
        writer.read += 1
        summary = wikihow.clean_headline(row["headline"])
        document = wikihow.clean_text(row["text"])
        reason = _empty_reason(document, summary)
        if not reason and not wikihow.keep_row(row["headline"], row["text"]):
            reason = f"headline not shorter than {wikihow.MAX_HEADLINE_SHARE} of the text"
        if reason:
            collector.dropped[reason] += 1
        else:
            writer.add(wikihow.title_key(row["title"]), document, summary)


def _read_files(data: DataConfig, collector: _Collector) -> None:
    columns = (data.document_column, data.summary_column)
    if data.source == "sample":
        columns = ("document", "summary")
    for split, paths in _files(data).items():
        for path in paths:
            _read_file(path, columns, collector.writers[split], collector.dropped)


def _read_file(
    path: Path, columns: tuple[str, str], writer: _SplitWriter, dropped: Counter[str]
) -> None:
    seen: dict[str, None] = {}  # a set that keeps the order, for the message
    rows = 0
    for number, row in _READERS[path.suffix.lower()](path):
        if row.keys() - seen.keys():
            seen.update(dict.fromkeys(row))
        rows += 1
        writer.read += 1
        document, summary = (_text(row.get(name), path, number, name) for name in columns)
        reason = _empty_reason(document, summary)
        if reason:
            dropped[reason] += 1
        else:
            writer.add(_id(row.get("id")), document, summary)
    if rows == 0:
        raise UserError(f"{path} has no rows; give a file with rows or leave it out")
    for option, name in zip(("document_column", "summary_column"), columns, strict=True):
        if name not in seen:
            raise UserError(
                f"{path} has no column {name!r} (it has: {', '.join(seen)}); "
                f"set data.{option} to one of them"
            )


def _empty_reason(document: str, summary: str) -> str | None:
    if not document.strip():
        return EMPTY_DOCUMENT
    return None if summary.strip() else EMPTY_SUMMARY


def _text(value: Any, path: Path, number: int, column: str) -> str:
    """The text of a cell; missing is empty, a number or truth value is written out."""
    if value is None:
        return ""
    if isinstance(value, list | dict | bytes):
        raise UserError(
            f"{path}, row {number}: column {column!r} holds a {type(value).__name__} instead of "
            "text; join its parts into one string"
        )
    text = value if isinstance(value, str) else _written_out(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{path}, row {number}: column {column!r} holds half a surrogate pair, which is no "
            "character; remove it"
        ) from None
    return text


def _written_out(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _id(value: Any) -> str | None:
    if value is None or isinstance(value, list | dict | bytes):
        return None
    text = str(value)
    # Half a surrogate pair cannot be stored; the row number serves instead.
    return text if text.isascii() or text.encode("utf-8", "ignore").decode() == text else None


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    records = wikihow.csv_records(path)
    _, header = next(records, (1, []))
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise UserError(f"{path}, row 1: column {repeated[0]!r} occurs twice; rename one of them")
    for number, record in records:
        if len(record) != len(header):
            raise UserError(
                f"{path}, row {number}: {len(record)} fields, but the header has {len(header)}; "
                "put fields that contain commas or newlines in double quotes"
            )
        yield number, dict(zip(header, record, strict=True))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, _object(_parse(text), path, number)
    except UnicodeDecodeError as error:
        bad_byte = error.object[error.start]
        raise UserError(
            f"{path}, row {number}: byte 0x{bad_byte:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(
            f"{path}, row {number}: not valid JSON ({error}); write one object a line"
        ) from None


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """A list of objects; or, as often found under this name, one object a line."""
    try:
        content = _parse(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte 0x{error.object[error.start]:02x} at position {error.start} is not "
            "UTF-8; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _jsonl_rows(path)
            return
        raise UserError(f"{path}: not valid JSON ({error}); mend it there") from None
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deeply; give a list of objects") from None
    if isinstance(content, dict) and not any(isinstance(v, list | dict) for v in content.values()):
        content = [content]  # a single row
    if not isinstance(content, list):
        raise UserError(
            f"{path}: holds one {_json_kind(content)} instead of rows; give a list of objects, "
            "or one object a line"
        )
    for number, value in enumerate(content, 1):
        yield number, _object(value, path, number)


def _parse(text: str) -> Any:
    # Numbers stay as written: 1.50 is not 1.5 to a tokenizer.
    return json.loads(text, parse_float=str, parse_int=str, parse_constant=str)


def _object(value: Any, path: Path, number: int) -> Row:
    if not isinstance(value, dict):
        raise UserError(
            f"{path}, row {number}: a {_json_kind(value)} instead of an object with columns; "
            'write e.g. {"document": "...", "summary": "..."}'
        )
    return value


def _json_kind(value: Any) -> str:
    return {list: "list", dict: "object", bool: "truth value"}.get(type(value), "plain value")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_A_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
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
