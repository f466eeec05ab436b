"""The kept rows of each split on their way into Arrow files, and why the others are dropped."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from t5_fsdp.config import DataConfig
from t5_fsdp.data.parts import row_limit
from t5_fsdp.data.readers import BadRow, Row
from t5_fsdp.data.rows import MALFORMED, empty_reason, malformed, pair_of, row_id
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import datasets
    import pyarrow

_ROWS_A_BATCH = 1000
_SHOWN_MALFORMED = 5


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


class Collector:
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
            writer.limit, writer.kept_of_part = row_limit(data, split), 0

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
        """Write out what is left; also after an error."""
        self._dropped_rows.close()
        for writer in self.writers.values():
            writer.close()

    def result(self, must_have_rows: list[str]) -> LoadedSplits:
        """The splits, once closed.

        Raises:
            UserError: one of `must_have_rows` has none.
        """
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
