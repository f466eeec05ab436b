"""From what the user has (files, WikiHow, a Hub dataset, the sample) to splits of texts.

`load_splits` reads everything once into Arrow files of id, document and summary, and tells what it
dropped and why. A mixture is several sources, read one after the other into the same splits.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from t5_fsdp.config import DataConfig, mixture_part
from t5_fsdp.data import hub, wikihow
from t5_fsdp.data.readers import EXTENSIONS, BadRow, Row, cell_text, format_of, read_rows
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import datasets
    import pyarrow

SPLITS = ("train", "validation", "test")
# A link to data/sample, so that the installed package has it as well.
SAMPLE_FOLDER = Path(__file__).parents[1] / "bundled_sample"
READING_VERSION = 2  # raise when the same files would give other rows
EMPTY_DOCUMENT, EMPTY_SUMMARY, MALFORMED = "empty document", "empty summary", "malformed row"

_BLOCK_BYTES = 1 << 20
_ROWS_A_BATCH = 1000
_SHOWN_MALFORMED = 5


def prepared_splits(data: DataConfig) -> tuple[str, ...]:
    """The splits that are read and tokenized before training: not one that is streamed."""
    return SPLITS[1:] if data.streaming else SPLITS


@dataclass(frozen=True)
class Part:
    """One source of a mixture, or the only one.

    Attributes:
        name: for messages and the audit.
        weight: its share of an epoch relative to the other parts'; None: as many as it has rows.
        data: its options; `mixture` is empty.
    """

    name: str
    weight: float | None
    data: DataConfig


def parts_of(data: DataConfig) -> list[Part]:
    """The sources that `data` names, each with its own options: those of `data`, overridden."""
    if not data.mixture:
        return [Part(data.source, None, data)]
    parts = []
    for number, entry in enumerate(data.mixture):
        own = mixture_part(data, entry)
        name = str(entry.get("name") or f"{number}: {own.source}")
        parts.append(Part(name, entry.get("weight"), own))
    return parts


@dataclass
class LoadedSplits:
    """Cleaned texts, not yet tokens.

    Attributes:
        splits: per split a Dataset of the columns id, document, summary (texts) and part (the
            number of its source). A split that was not given, or that is empty after the cleaning
            of WikiHow, is missing. The Arrow files lie in the `work_dir` of `load_splits`.
        dropped_file: one JSON object a dropped row: split, place, row, reason.
        audit: {"splits": {split: {"kept", "read", "dropped": {reason: rows}}}, "dropped": {reason:
            rows}, "notes": [line]}; `read` counts the rows of the split's files, for WikiHow those
            its lists assign to it.
    """

    splits: dict[str, datasets.Dataset]
    dropped_file: Path
    audit: dict[str, Any]


# ---------------------------------------------------------------- what is there


def source_problems(data: DataConfig) -> list[str]:
    """What can be said against the data without reading it, one line each; empty when nothing.

    Cheap (no torch, no datasets): a command calls it before it loads a model.
    """
    problems = []
    for part in parts_of(data):
        prefix = f"data.mixture, {part.name}: " if data.mixture else ""
        problems += [prefix + problem for problem in _part_problems(part.data)]
    return problems


def _part_problems(data: DataConfig) -> list[str]:
    if data.source == "wikihow":
        return _wikihow_problems(data)
    if data.source == "sample":
        return [
            f"data.source: sample needs {path}, which is not there; "
            "make it with `python -m t5_fsdp.data.sample`"
            for paths in _files(data).values()
            for path in paths
            if not path.is_file()
        ]
    if data.source == "saved":
        return hub.saved_problems(data)
    if data.source == "files":
        problems = []
        for split in SPLITS:
            for pattern in _patterns(data, split):
                paths, problem = _expand(f"data.{split}_files", pattern)
                problems += [problem] if problem else []
                problems += [
                    found for path in paths if (found := _file_problem(f"data.{split}_files", path))
                ]
        return problems
    return []


def _wikihow_problems(data: DataConfig) -> list[str]:
    folder, name = Path(data.path), wikihow.CSV_NAMES[data.wikihow_version]
    if not (folder / name).exists():
        return [
            f"data.path {folder} has no {name}; download it and put it there "
            "(data/README.md says from where), or set data.path"
        ]
    problems = [_file_problem("data.path", folder / name), wikihow.list_problem(folder)]
    return [problem for problem in problems if problem]


def _patterns(data: DataConfig, split: str) -> list[str]:
    value = getattr(data, f"{split}_files")
    return [value] if isinstance(value, str) else value


def _expand(option: str, pattern: str) -> tuple[list[Path], str | None]:
    """The files that a path, a folder or a pattern such as `part-*.jsonl` stands for, sorted."""
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        found = [inner for inner in sorted(path.iterdir()) if inner.is_file() and format_of(inner)]
        kinds = ", ".join(EXTENSIONS)
        return found, None if found else f"{option}: the folder {path} has no {kinds} files in it"
    if not path.exists() and glob.has_magic(pattern):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        found = [match for match in matches if match.is_file()]
        return found, None if found else f"{option}: no file matches {pattern}; check the pattern"
    return [path], None


def _file_problem(option: str, path: Path) -> str | None:
    if not path.exists():
        return f"{option}: {path} does not exist; check the path"
    if format_of(path) is None:
        return (
            f"{option}: {path} has the unknown extension {path.suffix!r}; use one of "
            f"{', '.join(EXTENSIONS)} (all but .parquet also with .gz)"
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
        return {"all": [folder / wikihow.CSV_NAMES[data.wikihow_version], *lists]}
    return {
        split: [path for pattern in _patterns(data, split) for path in _expand("", pattern)[0]]
        for split in SPLITS
    }


def split_files(data: DataConfig, split: str) -> list[Path]:
    """The files of one split, for sources that have a file or more a split."""
    return _files(data)[split]


def source_fingerprint(data: DataConfig, splits: tuple[str, ...] = SPLITS) -> str:
    """Hex digest of all that decides which rows `load_splits` gives.

    That is the content of the files (neither path nor time) and the options that matter.

    Args:
        data: the source.
        splits: only these count.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    for part in parts_of(data):
        _add_part(digest, part.data, splits)
    return digest.hexdigest()


def _add_part(digest: Any, data: DataConfig, splits: tuple[str, ...]) -> None:
    options: dict[str, Any] = {
        "version": READING_VERSION,
        "source": data.source,
        "limits": [_limit(data, split) for split in SPLITS],
        "on_bad_row": data.on_bad_row,
    }
    if data.source in ("files", "hub", "saved"):
        options["columns"] = [data.document_column, data.summary_column]
    if data.source == "wikihow":
        options["wikihow"] = [data.wikihow_version, data.wikihow_rules]
    digest.update(json.dumps(options, sort_keys=True).encode())
    if data.source in ("hub", "saved"):
        digest.update(hub.content_digest(data, splits).encode())
        return
    files = _files(data)
    for split, paths in files.items():
        for path in paths if split in (*splits, "all") else []:
            # A WikiHow list counts by its role; elsewhere only the format of a name matters.
            role = path.name if data.source == "wikihow" else format_of(path)
            digest.update(f"\n{split} {role} ".encode())
            digest.update(_content_digest(path))


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


# ---------------------------------------------------------------- reading


def load_splits(data: DataConfig, work_dir: Path, splits: tuple[str, ...] = SPLITS) -> LoadedSplits:
    """Read, clean and split everything.

    A row's id is its column `id` (WikiHow: the title without spaces) where every kept row of the
    split has one and no two are equal, else the row number: from 0, dropped rows counted, over
    all files of the split. With max_*_examples the first kept rows are used; the rest is still
    read and checked.

    Args:
        data: source, files, columns and limits.
        work_dir: where the Arrow files of the result are written, in a new folder each time.
        splits: only these are read (of WikiHow, kept).

    Raises:
        UserError: a missing or malformed file, an absent column, a malformed row (with file and
            row; under `on_bad_row: tolerant` it is dropped and counted), or a split without
            usable rows.
    """
    problems = source_problems(data)
    if problems:
        raise UserError(*problems)
    work_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="texts-", dir=work_dir))
    collector = _Collector(folder, splits)
    parts = parts_of(data)
    try:
        for number, part in enumerate(parts):
            collector.begin(number, part.data)
            _read_part(part.data, collector)
            collector.end(part.name if len(parts) > 1 else None)
    finally:
        collector.close()
    must_have = {split for part in parts for split in _must_have_rows(part.data)} & set(splits)
    return collector.result([split for split in splits if split in must_have])


def _must_have_rows(data: DataConfig) -> list[str]:
    if data.source in ("wikihow", "hub", "saved"):
        return ["train"]
    return ["train", *(split for split, paths in _files(data).items() if paths)]


def _read_part(data: DataConfig, collector: _Collector) -> None:
    if data.source == "wikihow":
        _read_wikihow(data, collector)
        return
    if data.source in ("hub", "saved"):
        for split, rows in hub.open_splits(
            data, tuple(collector.writers), collector.notes.append
        ).items():
            place = f"{data.dataset}, split {split}"
            _read_table(hub.iterate(rows), place, data, collector, split)
        return
    for split, paths in _files(data).items():
        for path in paths if split in collector.writers else []:
            _read_table(read_rows(path), str(path), data, collector, split)


def columns_of(data: DataConfig) -> tuple[str, str]:
    """The names of the columns with document and summary."""
    if data.source == "sample":
        return ("document", "summary")
    return (data.document_column, data.summary_column)


def _read_table(
    rows: Iterator[tuple[int, Row | BadRow]],
    place: str,
    data: DataConfig,
    collector: _Collector,
    split: str,
) -> None:
    columns = columns_of(data)
    seen: dict[str, None] = {}  # a set that keeps the order, for the message
    count = 0
    for number, row in rows:
        count += 1
        if isinstance(row, dict) and row.keys() - seen.keys():
            seen.update(dict.fromkeys(row))
            if not has_free_columns(place):
                check_columns(place, seen, columns)
        collector.take(split, place, number, row, columns)
    if count == 0:
        raise UserError(f"{place} has no rows; give a file with rows or leave it out")
    check_columns(place, seen, columns)


def has_free_columns(place: str) -> bool:
    """Whether a later row may have other columns than the first: objects in JSON."""
    return format_of(Path(place)) in (".json", ".jsonl")


def check_columns(place: str, seen: Iterable[str], columns: tuple[str, str]) -> None:
    """Refuse data without one of the two columns, once any row was seen.

    Raises:
        UserError: naming the columns that are there.
    """
    names = list(seen)
    for option, name in zip(("document_column", "summary_column"), columns, strict=True):
        if names and name not in names:
            raise UserError(
                f"{place} has no column {name!r} (it has: {', '.join(names)}); "
                f"set data.{option} to one of them"
            )


def pair_of(row: Row, columns: tuple[str, str]) -> tuple[str, str] | BadRow:
    """Document and summary of a row as texts."""
    texts = []
    for name in columns:
        text = cell_text(row.get(name))
        if isinstance(text, BadRow):
            return BadRow(f"column {name!r} holds {text.reason}", text.remedy)
        texts.append(text)
    return texts[0], texts[1]


def empty_reason(document: str, summary: str) -> str | None:
    """Why a row with these texts is dropped, or None."""
    if not document.strip():
        return EMPTY_DOCUMENT
    return None if summary.strip() else EMPTY_SUMMARY


def row_id(value: Any) -> str | None:
    """The text of an id, or None where it can't serve as one."""
    if value is None or isinstance(value, list | dict | bytes):
        return None
    text = str(value)
    # Half a surrogate pair cannot be stored; the row number serves instead.
    return text if text.isascii() or text.encode("utf-8", "ignore").decode() == text else None


def malformed(place: str, number: int, row: BadRow) -> UserError:
    """The error for a malformed row under `on_bad_row: strict`."""
    return UserError(
        f"{place}, row {number}: {row.reason}; {row.remedy}, or leave such rows out with "
        "data.on_bad_row: tolerant"
    )


def _read_wikihow(data: DataConfig, collector: _Collector) -> None:
    folder, version = Path(data.path), data.wikihow_version
    repair = data.wikihow_rules == "repair"
    key_of = wikihow.repair_title_key if repair else wikihow.title_key
    clean_text = wikihow.repair_text if repair else wikihow.clean_text
    clean_headline = wikihow.repair_headline if repair else wikihow.clean_headline
    lists = wikihow.read_lists(folder, key_of)
    collector.notes += wikihow.list_notes(lists)
    path = folder / wikihow.CSV_NAMES[version]
    for number, row in wikihow.read_rows(path, version):
        if isinstance(row, BadRow):
            collector.take("train", str(path), number, row, ("", ""))
            continue
        if row is None:
            collector.drop(None, str(path), number, wikihow.WRONG_FIELD_COUNT)
            continue
        split = wikihow.split_of(row["title"], lists, key_of)
        if split is None:
            collector.drop(None, str(path), number, "title in no split list")
            continue
        if split not in collector.writers:
            continue
        collector.writers[split].read += 1
        document, summary = clean_text(row["text"]), clean_headline(row["headline"])
        if reason := _wikihow_reason(row, document, summary):
            collector.drop(split, str(path), number, reason)
        else:
            key = wikihow.title_key(row["title"]) if version == "all" else None
            collector.writers[split].add(key, document, summary, collector.part)
    for split, writer in collector.writers.items():
        if not writer.read:
            collector.notes.append(f"no article of {path} falls into the {split} split")


def _wikihow_reason(row: dict[str, str], document: str, summary: str) -> str | None:
    """Why a row is dropped, or None; the filter looks at the fields as they were."""
    if reason := empty_reason(row["text"], row["headline"]):
        return reason
    if not wikihow.keep_row(row["headline"], row["text"]):
        return f"headline not shorter than {wikihow.MAX_HEADLINE_SHARE} of the text"
    return empty_reason(document, summary)


# ---------------------------------------------------------------- collecting


@dataclass
class _SplitWriter:
    """Streams the kept rows of one split into an Arrow file."""

    split: str
    folder: Path
    limit: int | None = None
    read: int = 0
    usable: int = 0
    kept: int = 0
    kept_of_part: int = 0
    has_every_id: bool = True
    has_an_id: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    _id_hashes: array[int] = field(default_factory=lambda: array("q"))
    _rows: list[tuple[str, str, str, str, int]] = field(default_factory=list)
    _stream: pyarrow.ipc.RecordBatchStreamWriter | None = None

    @property
    def path(self) -> Path:
        return self.folder / f"{self.split}.arrow"

    def add(self, identifier: str | None, document: str, summary: str, part: int) -> None:
        """Take one usable row; its number is that of the last row read."""
        self.usable += 1
        if self.limit is not None and self.kept_of_part >= self.limit:
            return
        self.kept += 1
        self.kept_of_part += 1
        self.has_an_id = self.has_an_id or bool(identifier)
        if not identifier:
            self.has_every_id = False
        elif self.has_every_id:
            # Eight bytes an id: the texts would take a gigabyte for ten million.
            self._id_hashes.append(hash(identifier))
        self._rows.append((identifier or "", str(self.read - 1), document, summary, part))
        if len(self._rows) == _ROWS_A_BATCH:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        texts = [(name, pa.string()) for name in ("id", "row", "document", "summary")]
        schema = pa.schema([*texts, ("part", pa.int32())])
        if self._stream is None:
            self._stream = pa.ipc.new_stream(str(self.path), schema)
        columns = [
            pa.array(column, kind)
            for column, kind in zip(zip(*self._rows, strict=True), schema.types, strict=True)
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=schema))
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._flush()
        if self._stream is not None:
            self._stream.close()

    @property
    def ids_usable(self) -> bool:
        """Whether every kept row has an id and no two are equal."""
        if not self.has_every_id:
            return False
        hashes = np.frombuffer(self._id_hashes, np.int64) if self._id_hashes else np.empty(0)
        return len(np.unique(hashes)) == len(hashes)

    def dataset(self) -> datasets.Dataset:
        """The rows written, once closed."""
        from datasets import Dataset

        rows = Dataset.from_file(str(self.path))
        if not self.ids_usable:
            rows = rows.remove_columns("id").rename_column("row", "id")
        return rows.select_columns(["id", "document", "summary", "part"])


class _Collector:
    """What the readers fill: rows per split, and why rows were dropped."""

    def __init__(self, folder: Path, splits: tuple[str, ...]) -> None:
        self.writers = {split: _SplitWriter(split, folder) for split in splits}
        self.notes: list[str] = []
        self.part = 0
        self._dropped: Counter[str] = Counter()
        self._malformed: list[str] = []
        self._tolerant = False
        self._dropped_file = folder / "dropped.jsonl"
        self._dropped_rows: TextIO = self._dropped_file.open("w", encoding="utf-8")

    def begin(self, part: int, data: DataConfig) -> None:
        """From here on the rows are those of another source."""
        self.part = part
        self._tolerant = data.on_bad_row == "tolerant"
        for split, writer in self.writers.items():
            writer.limit, writer.kept_of_part = _limit(data, split), 0

    def end(self, name: str | None) -> None:
        """The rows of a source are read; `name` is that of a mixture's.

        Raises:
            UserError: a mixture's source has no usable training row.
        """
        train = self.writers.get("train")
        if name is not None and train is not None and train.kept_of_part == 0:
            raise UserError(
                f"data.mixture, {name}: no usable rows in its training split; check its files and "
                "columns, or leave it out"
            )

    def take(
        self, split: str, place: str, number: int, row: Row | BadRow, columns: tuple[str, str]
    ) -> None:
        """Keep a row, or drop and count it.

        Raises:
            UserError: it is malformed and on_bad_row is strict.
        """
        writer = self.writers[split]
        writer.read += 1
        pair = row if isinstance(row, BadRow) else pair_of(row, columns)
        if isinstance(pair, BadRow):
            if not self._tolerant:
                raise malformed(place, number, pair)
            if len(self._malformed) < _SHOWN_MALFORMED:
                self._malformed.append(f"{place}, row {number}: {pair.reason}")
            self.drop(split, place, number, MALFORMED)
        elif reason := empty_reason(*pair):
            self.drop(split, place, number, reason)
        else:
            assert isinstance(row, dict)
            writer.add(row_id(row.get("id")), *pair, self.part)

    def drop(self, split: str | None, place: str, number: int, reason: str) -> None:
        """Count a row that is left out; split is None where it belongs to none."""
        self._dropped[reason] += 1
        if split is not None:
            self.writers[split].dropped[reason] += 1
        entry = {"split": split, "place": place, "row": number, "reason": reason}
        self._dropped_rows.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        self._dropped_rows.close()
        for writer in self.writers.values():
            writer.close()

    def result(self, must_have_rows: list[str]) -> LoadedSplits:
        for split in must_have_rows:
            if self.writers[split].kept == 0:
                reasons = ", ".join(f"{n} {why}" for why, n in sorted(self._dropped.items()))
                raise UserError(
                    f"the {split} split has no usable rows (rows dropped in all: "
                    f"{reasons or 'none'}); check data.source and its files"
                )
        present = {split: writer for split, writer in self.writers.items() if writer.kept}
        self._add_notes(present)
        audit = {
            "splits": {
                split: {
                    "kept": writer.kept,
                    "read": writer.read,
                    "dropped": dict(sorted(writer.dropped.items())),
                }
                for split, writer in present.items()
            },
            "dropped": dict(sorted(self._dropped.items())),
            "notes": self.notes,
        }
        splits = {split: writer.dataset() for split, writer in present.items()}
        return LoadedSplits(splits, self._dropped_file, audit)

    def _add_notes(self, present: dict[str, _SplitWriter]) -> None:
        for split, writer in present.items():
            if writer.kept < writer.usable:
                self.notes.append(
                    f"{split}: the first {writer.kept:,} of {counted(writer.usable, 'usable row')} "
                    f"(data.max_{split}_examples)"
                )
            if writer.has_an_id and not writer.ids_usable:
                self.notes.append(
                    f"{split}: rows without an id, or with the same; ids are row numbers, from 0"
                )
        for text in self._malformed:
            self.notes.append(f"left out: {text}")
        more = self._dropped[MALFORMED] - len(self._malformed)
        if more > 0:
            self.notes.append(f"left out: {counted(more, 'more malformed row')}")
