"""`summarize`: the same lines on any number of ranks, files that are whole, long documents."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import refused
from tests.conftest import make_pairs, write_jsonl

# Several batches in each of two windows.
SEVERAL = ["--evaluation.batch_tokens", "100", "--evaluation.num_beams", "1",
           "--evaluation.max_new_tokens", "6"]  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_text(pools: Any, trained: Path, tmp_path: Path) -> None:
    documents = [row["document"] for row in make_pairs(3, 7)]
    files = []
    for number, text in enumerate(documents):
        files.append(tmp_path / f"{number}.txt")
        # A line separator is no newline: the text stays one.
        files[-1].write_text(text + "\u2028" + text + "\n")
    base = ["--checkpoint", trained]
    code, out, err = pools(1).command("summarize", [*base, *files])
    assert code == 0, err
    assert len(out.splitlines()) == 3
    code, of_folder, _ = pools(1).command("summarize", [*base, tmp_path])
    assert code == 0 and of_folder == out
    together = tmp_path / "all"
    together.write_text("\n".join(path.read_text() for path in files))
    code, again, _ = pools(1).command("summarize", [*base, "--lines", "true", together])
    # A blank line is a blank line of output.
    assert code == 0 and again == "\n\n".join(out.splitlines()) + "\n"
    code, other, _ = pools(1).command("summarize", [*base, "--data.prefix", "sun ", *files])
    assert code == 0 and other != out


def test_json_lines_are_the_same_on_any_number_of_ranks(
    pools: Any, trained: Path, tmp_path: Path
) -> None:
    rows = [
        {"id": number, "text": pair["document"]} for number, pair in enumerate(make_pairs(70, 7))
    ]
    rows[3]["text"] = " "
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    found = []
    for world_size in (1, 2, 4):
        output = tmp_path / f"out-{world_size}.jsonl"
        argv = ["--checkpoint", trained, "--data.document_column", "text", source,
                "--output", output, "--documents", "true", *SEVERAL]  # fmt: skip
        code, out, err = pools(world_size).command("summarize", argv)
        assert (code, out) == (0, ""), err
        found.append(output.read_text())
        assert not output.with_name(f"{output.name}.part").exists()
    assert found[0] == found[1] == found[2]
    written = read_rows(tmp_path / "out-1.jsonl")
    assert [(row["id"], row["document"]) for row in written] == [
        (row["id"], row["text"]) for row in rows
    ]
    assert written[3]["summary"] == "" and sum(bool(row["summary"]) for row in written) > 35
    # Each is the summary of its own text.
    some = write_jsonl(tmp_path / "some.jsonl", [rows[number] for number in (2, 11, 40, 66)])
    argv = ["--checkpoint", trained, "--data.document_column", "text", some, *SEVERAL]
    code, out, _ = pools(1).command("summarize", argv)
    assert code == 0
    assert out.splitlines() == [written[number]["summary"] for number in (2, 11, 40, 66)]
    assert len(set(out.splitlines())) > 1
    # As lines, on standard output.
    argv = ["--checkpoint", trained, "--data.document_column", "text", source, *SEVERAL]
    code, out, _ = pools(2).command("summarize", argv)
    assert code == 0 and out.split("\n") == [*(row["summary"] for row in written), ""]


def test_long_documents_are_cut_or_read_in_parts(pools: Any, trained: Path, tmp_path: Path) -> None:
    pairs = make_pairs(12, 5)
    sentences = [pair["document"].capitalize() for pair in pairs]
    long = tmp_path / "long.txt"
    long.write_text(" ".join(sentences))
    base = ["--checkpoint", trained, long]
    code, cut, err = pools(1).command("summarize", base)
    assert code == 0
    assert "longer than data.max_source_tokens (64): 1 of 1 text;" in err
    assert "--long chunk reads all" in err
    outputs = [pools(size).command("summarize", [*base, "--long", "chunk"]) for size in (1, 2)]
    assert outputs[0][:2] == outputs[1][:2]
    code, whole, err = outputs[0]
    assert code == 0 and "1 of 1 text, read in" in err
    num_parts = int(err.split("read in ")[1].split()[0])
    assert num_parts > 3

    # Joined from what the parts give by themselves.
    from transformers import AutoTokenizer

    from t5_fsdp.evaluation.long_documents import make_sources

    tokenizer = AutoTokenizer.from_pretrained(trained / "tokenizer")
    made = make_sources(tokenizer, [long.read_text()], "summarize: ", 64, split=True)
    parts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in made.parts[0]]
    assert len(parts) == num_parts
    files = []
    for number, part in enumerate(parts):
        files.append(tmp_path / f"part-{number:02d}.txt")
        files[-1].write_text(part)
    code, singly, _ = pools(1).command("summarize", ["--checkpoint", trained, *files])
    assert code == 0 and " ".join(singly.split()) == whole.strip()
    assert whole != cut


def test_summaries_are_written_before_all_are_made(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill in the second window leaves: the first one's lines, under another name."""
    from t5_fsdp.cli.summarize import main
    from t5_fsdp.evaluation import generation

    calls = []
    original = generation.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[2]))
        if len(calls) == 2:
            raise RuntimeError("as good as a kill")
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "generate", generate)
    source = write_jsonl(tmp_path / "in.jsonl", make_pairs(70, 7))
    output = tmp_path / "out.jsonl"
    argv = ["--checkpoint", trained, source, "--output", output, *SEVERAL]
    code = main([str(word) for word in argv])
    assert code == 1 and calls == [64, 6]
    assert not output.exists()
    rows = read_rows(tmp_path / "out.jsonl.part")
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(64)]


def test_an_output_that_can_show_no_such_character(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from t5_fsdp.cli.summarize import _print_summary
    from t5_fsdp.cli.texts import Text
    from t5_fsdp.errors import UserError

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(UserError, match=r"'é' \(its encoding is ascii\); set PYTHONIOENCODING"):
        _print_summary(Text("a", ""), "caf\u00e9")


def test_what_is_wrong_is_said_once(pools: Any, trained: Path, tmp_path: Path) -> None:
    base = ["--checkpoint", trained]
    good = write_jsonl(tmp_path / "in.jsonl", make_pairs(2, 7))
    file = tmp_path / "file"
    file.write_text("a")
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "no.txt"], "no.txt does not exist"),
        ([good, "--data.document_column", "article"], "in.jsonl, line 1 has no 'article'"),
        ([good, "--output", tmp_path], "is a folder"),
        ([good, "--output", good], "is one of the inputs"),
        ([good, "--output", file / "out.jsonl"], "can't be written (File exists)"),
        ([good, "--documents", "true"], "--documents is only with --output"),
        ([good, "--long", "both"], "--long is 'both'; give one of truncate, chunk"),
        ([good, "--long", "chunk", "--data.max_source_tokens", 9], "beside the prefix"),
    ]
    for argv, part in cases:
        refused(pools, "summarize", [*base, *argv], part)
    # Found on one rank of two, before and after the other one is loading.
    for argv, part in (cases[0], ([*cases[-1][0], "--output", tmp_path / "o.jsonl"], cases[-1][1])):
        refused(pools, "summarize", [*base, *argv], part, world_size=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in.jsonl"]


def test_links_and_pipes_are_written_through(pools: Any, trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("rinse rice in water.")
    target, link, pipe = tmp_path / "target.jsonl", tmp_path / "link.jsonl", tmp_path / "pipe"
    target.write_text("old\n")
    link.symlink_to(target)
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    for output in (link, pipe):
        argv = ["--checkpoint", trained, source, "--output", output]
        code, _, err = pools(1).command("summarize", argv)
        assert code == 0, err
    reader.join(20)
    assert link.is_symlink() and stat.S_ISFIFO(pipe.stat().st_mode)
    assert json.loads(target.read_text())["summary"] == json.loads(read[0])["summary"]
    assert not list(tmp_path.glob("*.part"))
