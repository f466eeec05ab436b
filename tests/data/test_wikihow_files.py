"""Both WikiHow files with every oddity of the format: exact rows, texts and drop report.

The files are written byte by byte and the expected texts by hand, under the official rules and
under the repairing ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.config import DataConfig
from t5_fsdp.data import wikihow
from t5_fsdp.data.sources import load_splits
from t5_fsdp.data.split_writer import LoadedSplits
from t5_fsdp.errors import UserError

FILLER = " Words that make the text long enough for the filter." * 3
LONG = 'Long line with a "quote" and a, comma.\n' * 3600  # 140,000 characters and more


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def record(*fields: str) -> bytes:
    return ",".join(fields).encode() + b"\r\n"


# (headline, title, text) as they stand in the file.
ARTICLES = [
    # Lines joined by `.,` and a newline; the first paragraph ends in `.;`, later ones in
    # newlines and a comma.
    (
        '"\nBoil water.,\nAdd rice.,\nWait."',
        "How to Cook Rice",
        f'" First part.;\n, Second part.\n\n\n, Third part..\n\n,Fourth.{FILLER}"',
    ),
    # A full stop and comma inside a line: a joint before a capital, not behind "etc.".
    (
        '"\nSharpen it.,\nTest it."',
        "How to Sharpen a Knife1",
        f'" Use stones, oil, etc., As you like., Then rinse.{FILLER}"',
    ),
    # Lines and paragraphs that end in another mark.
    ('"\nReady?,\nGo!"', "How to Start2", f'" Are you ready?\n\n, Then go!\n\n,Now.{FILLER}"'),
    # Words that other readers take for missing values, and leading noughts.
    ("NA", "How to Say No", quoted("null" + FILLER)),
    ("007", "How to Count", quoted("None" + FILLER)),
    # Doubled quotes, a carriage return and a lone one inside a field, other line ends.
    (
        quoted('\nSay "yes".,\nLeave.'),
        "How to Agree",
        quoted('He said "yes".\r\nThen\rleft.\u2028End.' + FILLER),
    ),
    # A title with punctuation, which the lists do not have.
    ('"\nLook."', "How to Find Mom's Keys", quoted("Look." + FILLER)),
    # A very long field.
    ('"\nRead."', "How to Read a Long Text", quoted(LONG)),
    # Left out: as long as its text; empty summary; empty text; in no list.
    (quoted("x" * 75), "How to Be Long", "y" * 100),
    ('" \n "', "How to Have No Summary", quoted(FILLER)),
    ('"\nSay nothing."', "How to Have No Text", '"  "'),
    ('"\nHide."', "How to Be in No List", quoted(FILLER)),
]
TITLES = [title for _, title, _ in ARTICLES]


def write_all(folder: Path) -> None:
    rows = [record(*article) for article in ARTICLES]
    # Rows of two and of four fields, which the published loaders skip, and an empty line.
    rows[3:3] = [b"two,fields\r\n", b"\r\n", b"four,fields,are,many\r\n"]
    content = b"\xef\xbb\xbf" + b"headline,title,text\r\n" + b"".join(rows)
    (folder / "wikihowAll.csv").write_bytes(content)


def write_lists(folder: Path, train: bool = True) -> None:
    listed = ["".join(c for c in title if c.isalnum()) for title in TITLES[:-1]]
    lists = {"val": listed[1:2], "test": listed[2:3], "train": listed[:1] + listed[3:]}
    for name, titles in lists.items():
        if name != "train" or train:
            (folder / f"all_{name}.txt").write_text("\r\n".join(titles) + "\r\n")


def load(folder: Path, **options: Any) -> LoadedSplits:
    return load_splits(DataConfig(path=str(folder), **options), folder / "work")


def texts(loaded: LoadedSplits, split: str) -> dict[str, tuple[str, str]]:
    rows = loaded.splits[split].to_list()
    return {row["id"]: (row["document"], row["summary"]) for row in rows}


OFFICIAL_TRAIN = {
    "HowtoCookRice": (
        f"First part.;\n, Second part.\n Third part.\nFourth.{FILLER}",
        "Boil water.\nAdd rice.\nWait.",
    ),
    "HowtoSayNo": ("null" + FILLER, "NA"),
    "HowtoCount": ("None" + FILLER, "007"),
    "HowtoAgree": (
        f'He said "yes".\r\nThen\rleft.\u2028End.{FILLER}',
        'Say "yes".\nLeave.',
    ),
    "HowtoReadaLongText": (LONG.strip(), "Read."),
}
DROPPED = {
    "empty document": 1,
    "empty summary": 1,
    "headline not shorter than 0.75 of the text": 1,
    wikihow.WRONG_FIELD_COUNT: 2,
}


def test_official_rules_to_the_row(tmp_path: Path) -> None:
    write_all(tmp_path)
    write_lists(tmp_path)
    loaded = load(tmp_path)
    assert texts(loaded, "train") == OFFICIAL_TRAIN
    assert texts(loaded, "validation") == {
        "HowtoSharpenaKnife1": (
            f"Use stones, oil, etc., As you like., Then rinse.{FILLER}",
            "Sharpen it.\nTest it.",
        )
    }
    assert texts(loaded, "test") == {
        "HowtoStart2": (
            f"Are you ready?\n\n, Then go!\n\n,Now.{FILLER}",
            "Ready?,\nGo!",
        )
    }
    # The apostrophe keeps Mom's Keys out of the lists, as in the published numbers.
    assert loaded.audit["dropped"] == {**DROPPED, "title in no split list": 2}
    entries = [json.loads(line) for line in loaded.dropped_file.read_text().splitlines()]
    # Row 1 is the header; the empty line is no row.
    assert {entry["row"]: entry["reason"] for entry in entries} == {
        5: wikihow.WRONG_FIELD_COUNT,
        6: wikihow.WRONG_FIELD_COUNT,
        10: "title in no split list",
        12: "headline not shorter than 0.75 of the text",
        13: "empty summary",
        14: "empty document",
        15: "title in no split list",
    }
    assert loaded.audit["notes"] == []


def test_repairing_rules_mend_joints_and_titles(tmp_path: Path) -> None:
    write_all(tmp_path)
    write_lists(tmp_path)
    loaded = load(tmp_path, wikihow_rules="repair")
    train = texts(loaded, "train")
    assert train["HowtoCookRice"] == (
        f"First part.\nSecond part.\nThird part.\nFourth.{FILLER}",
        "Boil water.\nAdd rice.\nWait.",
    )
    assert train["HowtoFindMom'sKeys"] == ("Look." + FILLER, "Look.")
    assert texts(loaded, "validation")["HowtoSharpenaKnife1"] == (
        f"Use stones, oil, etc., As you like.\nThen rinse.{FILLER}",
        "Sharpen it.\nTest it.",
    )
    assert texts(loaded, "test")["HowtoStart2"] == (
        f"Are you ready?\nThen go!\nNow.{FILLER}",
        "Ready?\nGo!",
    )
    assert loaded.audit["dropped"] == {**DROPPED, "title in no split list": 1}


@pytest.mark.parametrize("rules", ["official", "repair"])
def test_without_the_training_list_the_rest_is_training(tmp_path: Path, rules: str) -> None:
    write_all(tmp_path)
    write_lists(tmp_path, train=False)
    loaded = load(tmp_path, wikihow_rules=rules)
    assert len(loaded.splits["train"]) == 7
    assert len(loaded.splits["validation"]) == len(loaded.splits["test"]) == 1
    assert loaded.audit["dropped"] == DROPPED
    assert "all_train.txt is missing" in loaded.audit["notes"][0]


SEP_HEADER = b"overview,headline,text,sectionLabel,title\r\n"


@pytest.mark.parametrize("rules", ["official", "repair"])
def test_the_file_of_single_steps(tmp_path: Path, rules: str) -> None:
    steps = [
        ('" Rice is food."', '"\nBoil water."', quoted(" Cold first.;\n" + FILLER), "Steps",
         "How to Cook Rice"),
        ('""', "007", quoted('Say ""A"".\n\n, Then B.' + FILLER), '"Part, one"',
         "How to Cook Rice"),
        ("x", "Sharpen.", quoted("Stone." + FILLER), "Steps", "How to Sharpen a Knife1"),
        ("x", "y" * 90, "z" * 100, "Steps", "How to Cook Rice"),
        ("x", "", "No headline." + FILLER, "Steps", "How to Cook Rice"),
    ]  # fmt: skip
    content = SEP_HEADER + b"".join(record(*step) for step in steps) + b"a,b,c\r\n"
    (tmp_path / "wikihowSep.csv").write_bytes(content)
    write_lists(tmp_path)
    loaded = load(tmp_path, wikihow_version="sep", wikihow_rules=rules)
    repair = rules == "repair"
    assert loaded.splits["train"].remove_columns("part").to_list() == [
        {
            "id": "0",
            "document": ("Cold first.\n" if repair else "Cold first.;\n ") + FILLER.strip(),
            "summary": "Boil water.",
        },
        {
            "id": "1",
            "document": 'Say ""A"".\n' + ("" if repair else " ") + f"Then B.{FILLER}",
            "summary": "007",
        },
    ]
    assert loaded.splits["validation"]["summary"][:] == ["Sharpen."]
    assert loaded.audit["dropped"] == {
        "empty summary": 1,
        "headline not shorter than 0.75 of the text": 1,
        wikihow.WRONG_FIELD_COUNT: 1,
    }


def test_the_other_files_header_is_refused(tmp_path: Path) -> None:
    from t5_fsdp.errors import UserError

    (tmp_path / "wikihowAll.csv").write_bytes(SEP_HEADER)
    with pytest.raises(UserError, match=r"row 1: the header is .*wikihow_version"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"How to\xff\n", "cannot be read as UTF-8"), (b"\n \n", "lists no titles; fetch it again")],
)
def test_a_damaged_list_of_titles_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    for name in wikihow.LIST_NAMES.values():
        (tmp_path / name).write_text("How to Boil Rice\n")
    assert set(wikihow.read_lists(tmp_path)) == set(wikihow.LIST_NAMES)
    (tmp_path / wikihow.LIST_NAMES["test"]).write_bytes(content)
    with pytest.raises(UserError, match=f"all_test.txt {message}"):
        wikihow.read_lists(tmp_path)
