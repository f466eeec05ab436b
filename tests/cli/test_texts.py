"""What can be given to `summarize`, and how it says what can't."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from t5_fsdp.cli.texts import Text, read_texts
from t5_fsdp.errors import UserError


def read(*paths: Path, lines: bool = False, column: str = "document") -> list[Text]:
    return read_texts([str(path) for path in paths], lines=lines, column=column)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_files_and_folders_in_their_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.txt", "a/deep/x.txt", "a/note.md"):
        write(tmp_path / "folder" / name, f"text of {name}")
    (tmp_path / "folder/dir.txt").mkdir()
    single = write(tmp_path / "single", "\ufeffone\u2028two\nthree\n")
    folder = tmp_path / "folder"
    names = ["a/deep/x.txt", "a/y.txt", "a/z.txt", "b.txt"]
    assert read(single, folder) == [
        Text(str(single), "one\u2028two\nthree\n"),
        *(Text(f"{folder}/{name}", f"text of {name}") for name in names),
    ]
    assert [text.text for text in read(single, lines=True)] == ["one\u2028two", "three"]
    assert read(single, lines=True)[1].id == f"{single}:2"


def test_json_lines_keep_their_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl",
        '\ufeff{"id": 7, "text": "a\u2028b"}\n\n{"id": "x", "text": ""}\n'
        '{"text": "c", "id": null}\n',
    )
    expected = [Text(7, "a\u2028b"), Text("x", ""), Text(f"{path}:4", "c")]
    assert read(path, column="text") == expected


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))

    give("é\nb\n".encode())
    assert read() == [Text("standard input", "é\nb\n")]
    give("é\n\nb\n".encode())
    assert [text.text for text in read(lines=True)] == ["é", "", "b"]
    give(b" \n")
    with pytest.raises(UserError, match="the input is empty"):
        read()
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        read()


BAD: dict[str, tuple[str, str | bytes, dict[str, Any], str]] = {
    "bytes": ("a.txt", b"caf\xe9", {}, r"a\.txt is not UTF-8 text \(byte 4\)"),
    "blank": ("a.txt", " \n", {}, "the input is empty"),
    "broken line": (
        "a.jsonl",
        '{"document": "a"}\n{"document',
        {},
        r"a\.jsonl, line 2 is not JSON",
    ),
    "bytes in a line": (
        "a.jsonl",
        b'\n{"document": "\xe9"}',
        {},
        r"a\.jsonl, line 2, is not UTF-8",
    ),
    "list": ("a.jsonl", "[1]", {}, "line 1 is no JSON object"),
    "nesting": ("a.jsonl", "[" * 100_000, {}, "line 1 is not JSON"),
    "column": (
        "a.jsonl",
        '{"text": "a", "b": 1}',
        {},
        r"no 'document' \(it has text, b\).*_column",
    ),
    "number": ("a.jsonl", '{"document": 5}', {}, "line 1: 'document' is no string"),
    "id": ("a.jsonl", '{"document": "a", "id": [1]}', {}, "line 1: 'id' is no string"),
    "lines of rows": ("a.jsonl", '{"document": "a"}', {"lines": True}, "--lines is for plain text"),
    "no text in a folder": ("folder/a.md", "a", {}, r"folder has no \.txt file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str) -> None:
    file, content, options, message = BAD[name]
    write(tmp_path / file, content)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / Path(file).parts[0], **options)
    assert len(caught.value.problems) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.txt does not exist; check the path"):
        read(tmp_path / "no.txt")
