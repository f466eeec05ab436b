"""Generation, checkpoints, data preparation and start-up, as the benchmark measures them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5_fsdp.benchmark.commands import run_command
from t5_fsdp.benchmark.data_preparation import group_by_length
from t5_fsdp.benchmark.generation import GenerationWork, ours, seq2seq_trainer, write_random_model
from t5_fsdp.benchmark.ranks import Ranks, Turns
from t5_fsdp.benchmark.rounds import measure_in_turn, medians, ratio
from t5_fsdp.benchmark.saving import save
from t5_fsdp.benchmark.tables import markdown_table, text_table
from t5_fsdp.cli.benchmark import main
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from tests.benchmark.test_contestants import MODEL, make_workload
from tests.conftest import make_pairs, write_jsonl


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, environment={"CUDA_VISIBLE_DEVICES": ""}, threads=1, quiet=True) as started:
        yield started


def test_both_generate_the_same_summaries(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write_random_model(tmp_path, MODEL | {"vocab_size": 256}, str(corpus / "tokenizer"), seed=2)
    work = GenerationWork(
        checkpoint=str(tmp_path),
        rows=[{n: row[n] for n in ("document", "summary")} for row in make_pairs(7, 5)],
        num_beams=2,
        max_new_tokens=8,
        max_source_tokens=64,
        max_target_tokens=32,
        device="cpu",
        param_dtype="fp32",
        seed=1,
    )
    found = []
    for function in (ours, seq2seq_trainer):
        turns = Turns(ranks, 120, function, work, 2)
        for _ in range(2):
            figures = turns.take()
            assert figures[1] == {}
            assert figures[0]["summaries_per_second"] > 0
        turns.end()
        found.append(figures[0])
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-9)
    assert found[0]["rouge1"] > 0


def test_a_checkpoint_is_timed_and_deleted(ranks: Ranks, tmp_path: Path) -> None:
    workload = dataclasses.replace(make_workload(), model=MODEL)
    for background in (True, False):
        turns = Turns(ranks, 120, save, workload, 2, background, str(tmp_path))
        for _ in range(2):
            figures = turns.take()[0]
            assert 0 < figures["blocked_seconds"] <= figures["total_seconds"]
            assert figures["bytes"] > 12 * 128 * 32  # weights and two moments of the embedding
        turns.end()
        assert list(tmp_path.iterdir()) == []


def test_rounds_are_interleaved_and_ratios_are_of_a_round() -> None:
    calls: list[str] = []

    def make(name: str, values: list[float]) -> Any:
        def measure() -> dict[str, float]:
            calls.append(name)
            return {"seconds": values[calls.count(name) - 1]}

        return measure

    contestants = {"a": make("a", [2.0, 30.0, 6.0]), "b": make("b", [1.0, 10.0, 2.0])}
    found = measure_in_turn(contestants, 3, Console(False))
    assert calls == ["a", "b"] * 3
    assert medians(found["a"]) == {"seconds": 6.0}
    assert ratio(found["a"], found["b"], "seconds") == 3.0


def test_tables() -> None:
    header, rows = ["", "one", "two"], [["a" * 100, "1.00", "3"], ["b", "20.00", "-"]]
    lines = text_table(header, rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("aaa") and "~" in lines[2]
    assert lines[3].endswith("20.00    -")
    assert markdown_table(header, rows).splitlines()[1] == "|---|---|---|"


@pytest.mark.parametrize("count", [100, 3000])
def test_group_by_length_sorts_as_large_groups_as_transformers_does(count: int) -> None:
    source = np.random.default_rng(0).permutation(count)
    order = group_by_length(source)
    assert sorted(order.tolist()) == list(range(count))
    # Sorted within groups, whose first places may be exchanged, to begin with the longest.
    size = min(count // (16 * 4), 50) * 16
    assert size == {100: 16, 3000: 736}[count]
    for start in range(0, count, size):
        group = source[order[start : start + size]]
        assert (np.diff(group[1:]) < 0).all()
        assert start == 0 or source[order[start - 1]] < group[1]
    assert source[order[0]] == count - 1


def test_a_command_that_refuses_is_a_users_error(tmp_path: Path) -> None:
    script = tmp_path / "refuse.py"
    script.write_text("import sys\nsys.exit(sys.argv[1])\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"^too few rows \(so refuse.py says\)$"):
        run_command([str(script), "error: too few rows"])
    with pytest.raises(RuntimeError, match="Traceback"):
        run_command([str(script), "Traceback"])
    assert run_command(["-c", ""]).seconds > 0


@pytest.mark.long
def test_the_modes_as_commands(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", make_pairs(5, 5))
    tokenizer = str(corpus / "tokenizer")
    options = ["--rounds", "1", "--device", "cpu", "--folder", str(tmp_path),
               "--model_config", json.dumps(MODEL | {"vocab_size": 256})]  # fmt: skip
    commands = {
        "generate": ["--texts", str(texts), "--tokenizer", tokenizer, "--max_new_tokens", "4"],
        "checkpoint": [],
        "data": ["--tokenizer", tokenizer, "--examples", "40"],
        "startup": [],
    }
    for mode, own in commands.items():
        file = tmp_path / f"{mode}.json"
        code = main(["--mode", mode, *options, *own, "--json", str(file)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        results = json.loads(file.read_text(encoding="utf-8"))
        assert len(results["contestants"]) == (3 if mode == "startup" else 2)
        for figures in results["contestants"].values():
            assert all(value >= 0 for value in figures["medians"].values())
        if mode == "data":
            assert 0 <= results["padding"]["this program, length_grouped"] < 1
