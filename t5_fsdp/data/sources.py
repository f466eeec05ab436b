"""From what the user has (files, WikiHow, a Hub dataset, the sample) to splits of texts.

`load_splits` reads everything once into Arrow files of id, document and summary, and tells what it
dropped and why. A mixture is several sources, read one after the other into the same splits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from t5_fsdp.config import DataConfig
from t5_fsdp.data import hub, wikihow
from t5_fsdp.data.parts import SPLITS, parts_of
from t5_fsdp.data.readers import BadRow, Row, read_rows
from t5_fsdp.data.rows import check_columns, columns_of, empty_reason, has_free_columns
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.data.source_files import files_by_split
from t5_fsdp.data.split_writer import Collector, LoadedSplits
from t5_fsdp.errors import UserError


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
    collector = Collector(folder, splits)
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
    return ["train", *(split for split, paths in files_by_split(data).items() if paths)]


def _read_part(data: DataConfig, collector: Collector) -> None:
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
    for split, paths in files_by_split(data).items():
        for path in paths if split in collector.writers else []:
            _read_table(read_rows(path), str(path), data, collector, split)


def _read_table(
    rows: Iterator[tuple[int, Row | BadRow]],
    place: str,
    data: DataConfig,
    collector: Collector,
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


def _read_wikihow(data: DataConfig, collector: Collector) -> None:
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
