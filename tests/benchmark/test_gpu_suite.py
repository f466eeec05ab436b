"""The table about one GPU, on a CPU and tiny shapes, without what its machine lacks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.benchmark import gpu_suite
from t5_fsdp.benchmark.gpu_suite import ROWS, chosen_rows, measure
from t5_fsdp.benchmark.tables import text_table
from t5_fsdp.cli.benchmark import main
from t5_fsdp.console import Console
from tests.conftest import ROOT

# Installed here, but not on the machine with the GPU.
MISSING = (
    "accelerate", "datasets", "docstring_parser", "jsonargparse", "lightning", "nltk", "peft",
    "pyarrow", "rouge_score", "sentencepiece", "sentencex",
)  # fmt: skip


def run_suite(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of a run in a Python that can't import what is missing."""
    # Python imports this by itself, in the processes that are spawned too.
    blocker = f"import sys\nsys.modules.update(dict.fromkeys({MISSING!r}))\n"
    (folder / "sitecustomize.py").write_text(blocker, encoding="utf-8")
    file = folder / "gpu.json"
    done = subprocess.run(
        [sys.executable, "scripts/benchmark.py", "--suite", "gpu", "--device", "cpu", "--tiny",
         "--json", str(file), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    table = done.stdout.split("\n\n")[-1].splitlines()
    assert max(map(len, table)) <= 80
    assert len(table) == len(rows) + 2
    return rows


def check_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["note"] == ""
        assert row["tokens_per_second"] > 0
        real = row["source_tokens"] + row["target_tokens"]
        assert (row["planned_bytes"] or 0) > 0 or row["engine"] == "bare"
        assert row["padded_tokens"] == real or row["compiled"]  # widths are rounded up
        # Blocks: the first of a stack and the others, of encoder and decoder. Rows share their
        # code, and with it a limit of graphs.
        assert row["compiled_graphs"] == (4 if row["compiled"] else 0)


def test_it_runs_without_what_the_machine_lacks(tmp_path: Path) -> None:
    quick = "^large, (bare|unsharded|fsdp2)$|selective"
    rows = run_suite(tmp_path, "--only", quick)
    assert len(rows) == len(chosen_rows(quick)) == 5
    check_rows(rows)


@pytest.mark.exhaustive
def test_a_compiled_row(tmp_path: Path) -> None:
    rows = run_suite(tmp_path, "--only", "^large, fsdp2, compiled$", "--limit_seconds", "280")
    assert len(rows) == 1
    check_rows(rows)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_rows(tmp_path: Path) -> None:
    rows = run_suite(tmp_path, "--limit_seconds", "800")
    assert len(rows) == len(ROWS)
    check_rows(rows)


def test_what_has_no_time_left_says_so() -> None:
    measured = measure(
        "cpu", tiny=True, only=None, deadline=time.monotonic() + 1.0, console=Console(False)
    )
    assert {item.note for item in measured} == {"left out, no time is left"}
    assert {item.short_note for item in measured} == {"left out"}


def test_what_is_not_done_in_time_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    # Importing torch alone takes longer.
    rows = tuple(dataclasses.replace(row, limit_seconds=1.0) for row in ROWS)
    monkeypatch.setattr(gpu_suite, "ROWS", rows)
    began = time.monotonic()
    code = main(["--suite", "gpu", "--device", "cpu", "--tiny", "--only", "bare",
                 "--json", str(tmp_path / "gpu.json")])  # fmt: skip
    assert time.monotonic() - began < 30.0
    shown = capsys.readouterr()
    assert code == 2
    assert re.fullmatch("error: no row could be measured: not done in 1 s; .*--only\n", shown.err)
    table = shown.out.split("\n\n")[-1].splitlines()
    assert max(map(len, table)) <= 80
    assert " time " in table[2] and " time " in table[3]
    assert table[-2:] == [
        "large, bare: not done in 1 s", "3B, bare, recompute full: not done in 1 s"
    ]  # fmt: skip


def test_titles_differ_in_the_table() -> None:
    shown = text_table(["", *["x" * width for width in (7, 8, 5, 5, 7, 6)]],
                       [[row.title, *[""] * 6] for row in ROWS])  # fmt: skip
    assert len(set(shown.splitlines()[2:])) == len(ROWS)


def test_rows_have_names_of_their_own() -> None:
    assert len({row.title for row in ROWS}) == len(ROWS)
