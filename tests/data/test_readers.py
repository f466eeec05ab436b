"""Damaged, odd and mixed files: rows, or one line with file and row; under tolerant the rest."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5_fsdp.config import DataConfig
from t5_fsdp.data.readers import BadRow, cell_text, csv_records, format_of, read_rows
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.data.sources import load_splits
from t5_fsdp.errors import UserError

ROWS = [{"document": f"Document {i}.", "summary": f"Summary {i}."} for i in range(6)]


def load(tmp_path: Path, *train: Path | str, **options: Any) -> Any:
    data = DataConfig(source="files", train_files=[str(path) for path in train], **options)
    if problems := source_problems(data):
        raise UserError(*problems)
    return load_splits(data, tmp_path / "work")


def documents(loaded: Any) -> list[str]:
    return loaded.splits["train"]["document"][:]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("extension", ["csv", "jsonl", "json"])
def test_compressed_files_give_the_same_rows_and_cut_ones_are_named(
    tmp_path: Path, extension: str
) -> None:
    content = {
        "csv": "document,summary\n" + "".join(f"{r['document']},{r['summary']}\n" for r in ROWS),
        "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
        "json": json.dumps(ROWS),
    }[extension].encode()
    path = tmp_path / f"a.{extension}.gz"
    path.write_bytes(gzip.compress(content))
    assert documents(load(tmp_path, path)) == [row["document"] for row in ROWS]
    path.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(UserError, match=r"a\.\w+\.gz: the compressed file is damaged"):
        load(tmp_path, path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.\w+\.gz: the compressed file is damaged"):
        load(tmp_path, path)


def test_folders_and_patterns_stand_for_their_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in (2, 0, 1):
        write_jsonl(folder / f"part-{number}.jsonl", ROWS[2 * number : 2 * number + 2])
    (folder / "README.md").write_text("not data")
    expected = [row["document"] for row in ROWS]
    assert documents(load(tmp_path, folder)) == expected
    assert documents(load(tmp_path, f"{folder}/part-*.jsonl")) == expected
    assert documents(load(tmp_path, f"{folder}/part-[01].jsonl")) == expected[:4]
    with pytest.raises(UserError, match="no file matches"):
        load(tmp_path, f"{folder}/other-*.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \.csv, \.jsonl"):
        load(tmp_path, tmp_path / "empty")


def test_a_name_with_a_bracket_is_still_a_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a[1].jsonl", ROWS)
    assert len(documents(load(tmp_path, path))) == 6


def test_lists_of_texts_are_joined_by_newlines(tmp_path: Path) -> None:
    rows = [{"document": ["a", None, "b"], "summary": ["one", "two"]}]
    table = pa.table({"document": ["text"], "summary": [["one", "two"]]})
    pq.write_table(table, tmp_path / "a.parquet")
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"):
        [row] = load(tmp_path, path).splits["train"].to_list()
        assert row["summary"] == "one\ntwo"


DAMAGED_CSV = (
    b"document,summary\n"
    b"a,b\n"
    b"too,many,fields\n"
    b"caf\xe9,c\n"
    b"nul\x00,d\n"
    b'"good\nlines",e\n'
    b"short\n"
    b"last,f\n"
)
DAMAGED_JSONL = (
    b'{"document": "a", "summary": "b"}\n'
    b"{broken\n"
    b'{"document": "\xff", "summary": "c"}\n'
    b'{"document": {"deep": 1}, "summary": "d"}\n'
    b'["a list"]\n' + b"[" * 100_000 + b"\n"
    b'{"document": "last", "summary": "f"}\n'
)


@pytest.mark.parametrize(
    ("name", "content", "kept", "bad_rows"),
    [
        ("a.csv", DAMAGED_CSV, ["a", "good\nlines", "last"], [3, 4, 5, 7]),
        ("a.jsonl", DAMAGED_JSONL, ["a", "last"], [2, 3, 4, 5, 6]),
    ],
)
def test_tolerant_keeps_the_sound_rows_and_counts_the_others(
    tmp_path: Path, name: str, content: bytes, kept: list[str], bad_rows: list[int]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as strict:
        load(tmp_path, path)
    [message] = strict.value.problems
    assert f"{path}, row {bad_rows[0]}: " in message and "data.on_bad_row: tolerant" in message
    loaded = load(tmp_path, path, on_bad_row="tolerant")
    assert documents(loaded) == kept
    assert loaded.audit["dropped"] == {"malformed row": len(bad_rows)}
    dropped = [json.loads(line) for line in loaded.dropped_file.read_text().splitlines()]
    assert [entry["row"] for entry in dropped] == bad_rows
    assert all(f"row {number}: " in " ".join(loaded.audit["notes"]) for number in bad_rows[:5])


@pytest.mark.parametrize("on_bad_row", ["strict", "tolerant"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b'document,summary\na,b\nc,"d\ne,f\n', ["row 3", "never closed", "line 3"]),
        ("a.csv", b'document,summary\na,"open\nb,c\nd,"e"\n', ["row 2", "line 2", "line 4"]),
        ("a.csv", b"document,summary\ra,b\r", ["carriage return", "LF"]),
        ("a.csv", b"\xff\xfed\x00o\x00", ["UTF-16"]),
        ("a.jsonl", b"\xff\xfe{\x00", ["UTF-16"]),
        ("a.parquet", b"PAR1", ["Parquet"]),
        ("a.json", b'[{"document": "a"', ["not valid JSON"]),
    ],
)
def test_what_swallows_the_rest_is_an_error_always(
    tmp_path: Path, on_bad_row: str, name: str, content: bytes, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(tmp_path, path, on_bad_row=on_bad_row)
    [message] = error.value.problems
    assert all(word in message for word in (str(path), *words)), message


@pytest.mark.parametrize("place", range(1, 7))
def test_one_stray_quote_never_swallows_a_row_in_silence(tmp_path: Path, place: int) -> None:
    lines = ["document,summary", *(f'"doc, {i}","sum {i}"' for i in range(1, 7))]
    for stray in ('"', 'x"', '"x', ' "'):
        for damaged in (stray + lines[place], lines[place] + stray, lines[place][:-1]):
            path = tmp_path / "a.csv"
            content = [*lines[:place], damaged, *lines[place + 1 :]]
            path.write_text("\n".join(content) + "\n")
            try:
                loaded = load(tmp_path, path, on_bad_row="tolerant")
            except UserError:
                continue
            kept = documents(loaded)
            others = [f"doc, {i}" for i in range(1, 7) if i != place]
            assert [text for text in kept if text in others] == others
            assert len(kept) + sum(loaded.audit["dropped"].values()) == 6


def test_missing_numbers_are_empty_cells(tmp_path: Path) -> None:
    table = pa.table({"document": ["a", "b"], "summary": [float("nan"), 1.5]})
    pq.write_table(table, tmp_path / "a.parquet")
    loaded = load(tmp_path, tmp_path / "a.parquet")
    assert loaded.splits["train"]["summary"][:] == ["1.5"]
    assert loaded.audit["dropped"] == {"empty summary": 1}


def test_formats_by_name() -> None:
    names = {
        "a.csv": ".csv",
        "a.JSONL.GZ": ".jsonl",
        "a.parquet.gz": None,
        "a.txt": None,
        "a.gz": None,
    }
    assert {name: format_of(Path(name)) for name in names} == names


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_cell_is_text_or_said_to_be_bad(value: Any) -> None:
    text = cell_text(value)
    assert isinstance(text, BadRow) or text.encode("utf-8") is not None


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_csv_is_read_as_it_was_written(tmp_path_factory: Any, pairs: list[tuple[str, str]]) -> None:
    import csv

    clean = [tuple(text.replace("\x00", "") for text in pair) for pair in pairs]
    clean = [pair for pair in clean if not any("\ud800" <= c <= "\udfff" for c in "".join(pair))]
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("document", "summary"), *clean])
    assert [tuple(record) for _, record in csv_records(path)][1:] == clean


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Cut, overwrite, insert or repeat a piece, a few times."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place, size = rng.randrange(len(data) + 1), rng.randint(0, 12)
        noise = bytes(rng.choice(b'\x00\xff",\n\r{}[]:e\\u1') for _ in range(size))
        kind = rng.randrange(4)
        if kind == 0:
            del data[place:]
        elif kind == 1:
            data[place : place + size] = noise
        elif kind == 2:
            data[place:place] = noise
        else:
            data[place:place] = data[place : place + size] * rng.randint(1, 3)
        if not data:
            data += b"\n"
    return bytes(data)


def fuzz(folder: Path, seconds_or_rounds: int, seed: int) -> None:
    """Mutated files of every format give rows or one line that names the file."""
    rng = random.Random(seed)
    rows = [{"document": f'Doc "{i}",\nline', "summary": f"Süm {i}"} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "seed.parquet")
    seeds = {
        ".csv": 'document,summary\n"Doc ""1"",\nline",Süm\nplain,text\n'.encode(),
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        ".json": json.dumps(rows).encode(),
        ".parquet": (folder / "seed.parquet").read_bytes(),
        ".jsonl.gz": gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()),
    }
    for number in range(seconds_or_rounds):
        extension = rng.choice(list(seeds))
        path = folder / f"fuzz{extension}"
        path.write_bytes(mutate(seeds[extension], rng))
        try:
            for _, row in read_rows(path):
                assert isinstance(row, dict | BadRow), number
        except UserError as error:
            assert len(error.problems) == 1 and str(path) in error.problems[0]
        on_bad_row = rng.choice(["strict", "tolerant"])
        try:
            load(folder, path, on_bad_row=on_bad_row)
        except UserError as error:
            assert len(error.problems) == 1


def test_fuzzed_files_never_end_in_a_traceback(tmp_path: Path) -> None:
    fuzz(tmp_path, 300, seed=0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_fuzzed_files_never_end_in_a_traceback(tmp_path: Path) -> None:
    for seed in range(1, 9):
        fuzz(tmp_path, 1000, seed)
