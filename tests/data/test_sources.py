"""Files as users have them: everything usable is read, everything else is said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from t5_fsdp.config import DataConfig
from t5_fsdp.data import source_files
from t5_fsdp.data.fingerprint import source_fingerprint
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.data.sources import load_splits
from t5_fsdp.errors import UserError

ROWS = [{"document": f"Document {i}.", "summary": f"Summary {i}."} for i in range(3)]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def load(tmp_path: Path, *train: str, **options):
    data = DataConfig(source="files", train_files=list(train), **options)
    return load_splits(data, tmp_path / "work")


def train_rows(tmp_path: Path, *train: str, **options) -> list[dict]:
    return load(tmp_path, *train, **options).splits["train"].remove_columns("part").to_list()


def refusal(tmp_path: Path, *train: str, **options) -> str:
    with pytest.raises(UserError) as error:
        load(tmp_path, *train, **options)
    [message] = error.value.problems
    return message


def test_csv_cells_stay_the_text_they_are(tmp_path):
    path = write(
        tmp_path / "a.csv",
        'document,summary\nNA,007\nnull,None\nnan,1.50\n2020-01-01,TRUE\n"a\nb,c",1e5\n',
    )
    rows = train_rows(tmp_path, path)
    assert [(row["document"], row["summary"]) for row in rows] == [
        ("NA", "007"),
        ("null", "None"),
        ("nan", "1.50"),
        ("2020-01-01", "TRUE"),
        ("a\nb,c", "1e5"),
    ]


@pytest.mark.parametrize("extension", ["jsonl", "json"])
def test_json_values_stay_as_written(tmp_path, extension):
    lines = [
        '{"document": "2020-01-01T00:00:00Z", "summary": "007"}',
        '{"document": 1.50, "summary": true}',
    ]
    content = "\n".join(lines) if extension == "jsonl" else f"[{','.join(lines)}]"
    rows = train_rows(tmp_path, write(tmp_path / f"a.{extension}", content))
    assert [(row["document"], row["summary"]) for row in rows] == [
        ("2020-01-01T00:00:00Z", "007"),
        ("1.50", "true"),
    ]


def test_every_format_gives_the_same_rows(tmp_path):
    csv_text = "summary,extra,document\n" + "".join(
        f"{row['summary']},x,{row['document']}\n" for row in ROWS
    )
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    files = [
        write(tmp_path / "a.csv", csv_text),
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write(tmp_path / "list.json", json.dumps(ROWS)),
        write_jsonl(tmp_path / "lines.json", ROWS),
        write(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode()),
        str(parquet),
    ]
    results = [train_rows(tmp_path, file) for file in files]
    expected = [{"id": str(i), **row} for i, row in enumerate(ROWS)]
    assert results == [expected, expected, expected, expected, expected[:1], expected]


def test_several_files_are_one_split_in_order(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    second = write(tmp_path / "b.csv", "document,summary\nx,y\n")
    rows = train_rows(tmp_path, first, second)
    assert [row["document"] for row in rows] == ["Document 0.", "x"]
    assert [row["id"] for row in rows] == ["0", "1"]


def test_columns_by_other_names(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"article": "long", "highlights": "short"}])
    [row] = train_rows(tmp_path, path, document_column="article", summary_column="highlights")
    assert row == {"id": "0", "document": "long", "summary": "short"}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        ([7, 8, 9], ["7", "8", "9"]),
        (["a", "b", "a"], ["0", "1", "2"]),
        (["a", None, "c"], ["0", "1", "2"]),
    ],
)
def test_the_id_column_is_used_where_it_identifies(tmp_path, ids, expected):
    rows = [{"id": i, **row} for i, row in zip(ids, ROWS, strict=True)]
    loaded = load(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows))
    assert loaded.splits["train"]["id"][:] == expected
    assert bool(loaded.audit["notes"]) == (expected[0] == "0")


def test_no_id_column_is_nothing_to_speak_of(tmp_path):
    loaded = load(tmp_path, write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert loaded.splits["train"]["id"][:] == ["0", "1", "2"]
    assert loaded.audit["notes"] == []


def test_empty_rows_are_dropped_and_counted_and_row_numbers_count_them(tmp_path):
    rows = [
        {"document": None, "summary": "s"},
        {"document": "d", "summary": "s"},
        {"document": "d", "summary": " \n"},
        {"document": "d"},
        {"document": "e", "summary": "s"},
    ]
    loaded = load(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows))
    assert loaded.splits["train"]["id"][:] == ["1", "4"]
    dropped = {"empty document": 1, "empty summary": 2}
    assert loaded.audit["splits"] == {"train": {"kept": 2, "read": 5, "dropped": dropped}}
    assert loaded.audit["dropped"] == dropped
    entries = [json.loads(line) for line in loaded.dropped_file.read_text().splitlines()]
    assert [(entry["row"], entry["reason"]) for entry in entries] == [
        (1, "empty document"),
        (3, "empty summary"),
        (4, "empty summary"),
    ]


def test_more_rows_than_a_batch_all_arrive(tmp_path):
    rows = [{"document": f"d{i}", "summary": "s"} for i in range(2501)]
    documents = [
        r["document"] for r in train_rows(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows))
    ]
    assert documents == [row["document"] for row in rows]


def test_the_limit_takes_the_first_kept_rows_and_still_reads_the_rest(tmp_path):
    rows = [{"document": "", "summary": "s"}, *ROWS]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    loaded = load(tmp_path, path, max_train_examples=2)
    assert loaded.splits["train"]["document"][:] == ["Document 0.", "Document 1."]
    dropped = {"empty document": 1}
    assert loaded.audit["splits"]["train"] == {"kept": 2, "read": 4, "dropped": dropped}
    assert "first 2 of 3" in loaded.audit["notes"][0]
    with open(path, "a") as file:
        file.write("{broken\n")
    assert "row 5" in refusal(tmp_path, path, max_train_examples=2)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "document,summary\nx,y,z\na,b,c\n", ["row 2", "3 fields"]),
        ("a.csv", "document,summary\nx\n", ["row 2", "1 fields"]),
        ("a.csv", 'document,summary\nx,"y\na,b\n', ["row 2", "never closed"]),
        ("a.csv", "document,summary\n", ["no rows"]),
        ("a.csv", "document,summary,document\na,b,c\n", ["'document'", "twice"]),
        ("a.csv", b"document,summary\na,\xe9\n", ["row 2", "0xe9", "UTF-8"]),
        ("a.csv", "text,title\na,b\n", ["'document'", "text, title", "data.document_column"]),
        ("a.jsonl", '{"document":"a","summary":"b"}\n{bad\n', ["row 2", "JSON"]),
        ("a.jsonl", b'{"document":"a","summary":"\xff"}\n', ["row 1", "0xff"]),
        ("a.jsonl", '{"document":"a","text":"b"}\n', ["'summary'", "data.summary_column"]),
        ("a.jsonl", '{"document":["a", {}],"summary":"b"}\n', ["row 1", "'document'", "list"]),
        ("a.jsonl", '{"document":"a","summary":{"b":1}}\n', ["row 1", "'summary'", "dict"]),
        ("a.jsonl", '{"document":"a","summary":"\\ud83d"}\n', ["row 1", "surrogate"]),
        ("a.jsonl", '["a","b"]\n', ["row 1", "list"]),
        ("a.jsonl", "\n \n", ["no rows"]),
        ("a.json", '[{"document":"a","summary":"b"},\n{"document"}]', ["JSON", "line 2"]),
        ("a.json", '{"data":[{"document":"a","summary":"b"}]}', ["list of objects"]),
        ("a.json", b'[{"document":"\xff"}]', ["0xff"]),
        ("a.parquet", b"PAR1 nonsense PAR1", ["Parquet"]),
        ("a.jsonl", '{"document":"a","summary":""}\n', ["train", "1 empty summary"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, name, content, words):
    path = write(tmp_path / name, content)
    message = refusal(tmp_path, path)
    expected = words if "train" in words else [path, *words]
    assert not [word for word in expected if word not in message], message


def test_a_given_validation_file_must_have_usable_rows(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", ROWS)
    empty = write_jsonl(tmp_path / "b.jsonl", [{"document": "a", "summary": " "}])
    assert "validation" in refusal(tmp_path, train, validation_files=[empty])
    assert list(load(tmp_path, train).splits) == ["train"]


def test_problems_are_found_without_reading_and_all_at_once(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    data = DataConfig(
        source="files",
        train_files=[str(tmp_path / "none.csv"), str(tmp_path / "folder.csv")],
        validation_files=write(tmp_path / "a.txt", "x"),
        test_files=[write(tmp_path / "a.csv", "")],
    )
    problems = source_problems(data)
    for problem, words in zip(
        problems,
        [
            ("data.train_files", "does not exist"),
            ("data.train_files", "folder"),
            ("data.validation_files", "'.txt'", ".parquet"),
            ("data.test_files", "empty"),
        ],
        strict=True,
    ):
        assert all(word in problem for word in words), problem
    with pytest.raises(UserError) as error:
        load_splits(data, tmp_path / "work")
    assert list(error.value.problems) == problems


def test_the_sample_and_where_it_comes_from_when_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "SAMPLE_FOLDER", tmp_path)
    data = DataConfig(source="sample", document_column="ignored")
    assert "python -m t5_fsdp.data.sample" in source_problems(data)[0]
    for split in ("train", "validation", "test"):
        rows = [{"id": f"{split}-1", "title": "T", "document": "d", "summary": "s"}]
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    assert source_problems(data) == []
    loaded = load_splits(data, tmp_path / "work")
    assert {split: rows[0]["id"] for split, rows in loaded.splits.items()} == {
        "train": "train-1",
        "validation": "validation-1",
        "test": "test-1",
    }


def test_the_fingerprint_is_of_content_and_of_options_that_matter(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", ROWS)
    copy = write_jsonl(tmp_path / "other-name.jsonl", ROWS)
    changed = write_jsonl(tmp_path / "c.jsonl", [*ROWS[:2], {"document": "x", "summary": "y"}])

    def fingerprint(path: str, **options) -> str:
        return source_fingerprint(DataConfig(source="files", train_files=[path], **options))

    same = {fingerprint(first), fingerprint(copy), fingerprint(first, prefix="other: ")}
    assert len(same) == 1
    others = {
        fingerprint(changed),
        fingerprint(first, max_train_examples=2),
        fingerprint(first, summary_column="document"),
        fingerprint(first, test_files=[copy]),
        fingerprint(first, validation_files=[copy]),
    }
    assert len(others | same) == 6


def test_importing_the_rooms_of_data_stays_light():
    code = (
        "import sys, t5_fsdp.data.sources, t5_fsdp.data.wikihow, t5_fsdp.data.prepared; "
        "print({'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert result.stdout.strip() == "set()"
