"""wikihowAll.csv: the published rules, and what is wrong with a file said with its row."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from t5_fsdp.config import DataConfig
from t5_fsdp.data import wikihow
from t5_fsdp.data.fingerprint import source_fingerprint
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.data.sources import load_splits
from t5_fsdp.errors import UserError

HEADER = ["headline", "title", "text"]


def article(title: str, headline: str = "\nDo this.,\nDo that.", text: str | None = None):
    return [headline, title, text or f" Long text about {title} that goes on and on. " * 3]


def write_csv(folder: Path, rows: list[list[str]], header: list[str] = HEADER) -> Path:
    path = folder / wikihow.CSV_NAMES["all"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerows([header, *rows])
    return path


def write_lists(folder: Path, **lists: list[str]) -> None:
    for split, titles in lists.items():
        (folder / f"all_{split}.txt").write_text("\n".join(titles) + "\n", encoding="utf-8")


def load(folder: Path, **options):
    data = DataConfig(source="wikihow", path=str(folder), **options)
    return load_splits(data, folder / "work")


def test_lines_of_a_headline_are_joined_as_sentences():
    assert wikihow.clean_headline("\nDo this.,\nDo that.") == "Do this.\nDo that."


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (" One.\n\n, Two.", "One.\n Two."),
        ("One..\n,Two", "One.\nTwo"),
        ("One., Two", "One., Two"),
        ("One.;\nTwo", "One.;\nTwo"),
    ],
)
def test_paragraph_joints_follow_the_published_pattern(raw, clean):
    assert wikihow.clean_text(raw) == clean


def test_the_filter_is_strict_at_three_quarters():
    assert wikihow.keep_row("x" * 74, "y" * 100)
    assert not wikihow.keep_row("x" * 75, "y" * 100)


def test_fields_with_newlines_quotes_and_any_length_are_read_whole(tmp_path):
    long_text = 'He said "no", twice.\n' * 20_000  # beyond the csv module's default field limit
    path = write_csv(tmp_path, [["\nA.,\nB.", "How to Wait", long_text]])
    [(number, row)] = wikihow.read_rows(path)
    assert number == 2
    assert row == {"headline": "A.,\nB.", "title": "How to Wait", "text": long_text.strip()}


def test_a_byte_order_mark_does_not_hide_the_header(tmp_path):
    path = write_csv(tmp_path, [article("How to A")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(list(wikihow.read_rows(path))) == 1


def test_rows_with_another_number_of_fields_are_skipped_and_counted(tmp_path):
    write_csv(tmp_path, [article("How to A"), ["only", "two"], article("How to B"), list("abcd")])
    write_lists(tmp_path, train=["HowtoA", "HowtoB"], val=["X"], test=["Y"])
    loaded = load(tmp_path)
    assert loaded.splits["train"]["id"][:] == ["HowtoA", "HowtoB"]
    assert loaded.audit["dropped"] == {wikihow.WRONG_FIELD_COUNT: 2}


@pytest.mark.parametrize(
    ("content", "row", "word"),
    [
        (b'headline,title,text\r\na,b,c\r\nd,"e,f\r\ng,h,i\r\n', "row 3", "never closed"),
        (b'headline,title,text\na,b,"c', "row 2", "never closed"),
        (b"headline,title,text\na,b,c\nd,\x00,f\n", "row 3", "NUL"),
        (b"headline,title,text\na,b,c\nd,\xff,f\n", "row 3", "0xff"),
        (b"overview,headline,text,sectionLabel,title\n", "row 1", "headline,title,text"),
    ],
)
def test_damage_is_named_with_file_and_row(tmp_path, content, row, word):
    path = tmp_path / wikihow.CSV_NAMES["all"]
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(tmp_path)
    [message] = error.value.problems
    assert str(path) in message and row in message and word in message


def test_the_end_mark_of_the_reader_never_becomes_a_record(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'a,b\n\n"1","2"')  # no newline at the end, an empty line within
    assert [record for _, record in wikihow.csv_records(path)] == [["a", "b"], ["1", "2"]]


def test_three_lists_decide_and_unlisted_titles_are_dropped(tmp_path):
    titles = ["How to A", "How to B1", "How to C", "How to D's"]
    write_csv(tmp_path, [article(title) for title in titles])
    write_lists(tmp_path, train=["HowtoA"], val=["HowtoB1"], test=["HowtoC"])
    loaded = load(tmp_path)
    ids = {split: rows["id"][:] for split, rows in loaded.splits.items()}
    assert ids == {"train": ["HowtoA"], "validation": ["HowtoB1"], "test": ["HowtoC"]}
    assert loaded.audit["dropped"] == {"title in no split list": 1}
    assert loaded.splits["train"][0]["summary"] == "Do this.\nDo that."


def test_without_the_training_list_the_rest_is_training(tmp_path):
    write_csv(tmp_path, [article(f"How to {letter}") for letter in "ABC"])
    write_lists(tmp_path, val=["HowtoB"], test=["HowtoC"])
    loaded = load(tmp_path)
    assert {split: len(rows) for split, rows in loaded.splits.items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }
    assert any("all_train.txt is missing" in note for note in loaded.audit["notes"])


def test_an_incomplete_choice_of_lists_is_refused(tmp_path):
    write_csv(tmp_path, [article("How to A")])
    write_lists(tmp_path, train=["HowtoA"], val=["HowtoB"])
    [problem] = source_problems(DataConfig(path=str(tmp_path)))
    assert "all_test.txt" in problem
    with pytest.raises(UserError, match=r"all_test\.txt"):
        load(tmp_path)


def test_without_lists_the_parts_of_an_article_stay_together():
    titles = [f"How to Do {number}x" for number in range(4000)]
    splits = [wikihow.split_of(title, {}) for title in titles]
    for title, split in zip(titles, splits, strict=True):
        assert {wikihow.split_of(f"{title}{part}", {}) for part in (1, 2, 13)} == {split}
    for held_out in ("validation", "test"):
        assert 0.018 < splits.count(held_out) / len(splits) < 0.032


def test_the_hashed_split_is_the_same_for_ever():
    held_out = [n for n in range(100) if wikihow.split_of(f"How to Do {n}x", {}) != "train"]
    assert held_out == [8, 26, 42, 46, 65, 77, 78, 88, 90]


def test_dropped_rows_are_counted_by_reason_and_doubled_titles_get_row_numbers(tmp_path):
    rows = [
        article("How to A"),
        article("How to B", headline=" \n "),
        article("How to C", text=" "),
        article("How to D", headline="x" * 200, text="y" * 200),
        article("How to A"),
    ]
    write_csv(tmp_path, rows)
    write_lists(tmp_path, val=["V"], test=["T"])
    loaded = load(tmp_path)
    assert loaded.audit["dropped"] == {
        "empty document": 1,
        "empty summary": 1,
        "headline not shorter than 0.75 of the text": 1,
    }
    assert loaded.splits["train"]["id"][:] == ["0", "4"]
    train = loaded.audit["splits"]["train"]
    assert (train["kept"], train["read"]) == (2, 5)
    assert train["dropped"] == loaded.audit["dropped"]


def test_a_missing_csv_says_what_to_fetch(tmp_path):
    [problem] = source_problems(DataConfig(path=str(tmp_path)))
    assert "wikihowAll.csv" in problem and "data/README.md" in problem


def test_the_fingerprint_sees_the_lists(tmp_path):
    write_csv(tmp_path, [article("How to A")])
    data = DataConfig(path=str(tmp_path))
    before = source_fingerprint(data)
    write_lists(tmp_path, val=["HowtoB"], test=["HowtoC"])
    assert source_fingerprint(data) != before
