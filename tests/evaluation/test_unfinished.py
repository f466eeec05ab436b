"""An evaluation that was killed goes on from its finished batches."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from t5_fsdp.evaluation.generation import GeneratedSummary
from t5_fsdp.evaluation.unfinished import Unfinished
from tests.conftest import make_pairs, tiny_options, write_jsonl
from tests.workers import run_command

MADE = {3: GeneratedSummary("a\nb", True, 0), 1: GeneratedSummary("", False, 2)}
SOURCES = [np.array([1, 2], np.int32), np.array([3], np.int32)]


def test_batches_are_read_back_and_others_are_not(tmp_path: Path) -> None:
    kept = Unfinished(tmp_path, {"num_beams": 2}, SOURCES)
    kept.add(0, 4, MADE)
    kept.add(1, 2, {0: GeneratedSummary("c", False, 0)})
    with (tmp_path / ".unfinished/rank-0.jsonl").open("a") as file:
        file.write('{"key": "torn')
    kept.add(0, 5, MADE)
    again = Unfinished(tmp_path, {"num_beams": 2}, SOURCES)
    assert again.read() == {4: MADE, 5: MADE, 2: {0: GeneratedSummary("c", False, 0)}}
    for settings, sources in (({"num_beams": 3}, SOURCES), ({"num_beams": 2}, SOURCES[::-1])):
        assert Unfinished(tmp_path, settings, sources).read() == {}
        kept.add(0, 4, MADE)  # deleted, being of no use to others
    kept.delete()
    assert not list(tmp_path.iterdir())


def evaluate_until(argv: list[str], batches: int) -> Any:
    """On a rank of the pool: eval_rouge, which ends as if killed after so many batches of it."""
    from t5_fsdp.evaluation import evaluate

    class Killed(Exception):
        pass

    write, seen = Unfinished.add, []

    def add(self: Any, rank: int, batch: int, made: Any) -> None:
        write(self, rank, batch, made)
        seen.append(batch)
        if len(seen) == batches and os.environ["RANK"] == "0":
            raise Killed

    with mock.patch.object(evaluate.Unfinished, "add", add):
        code, out, err = run_command("eval_rouge", argv)
    return code, out, err, seen


@pytest.fixture(scope="module")
def trained(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("unfinished") / "run"
    many = write_jsonl(run_dir.parent / "many.jsonl", make_pairs(101, 8))
    # Steps enough for summaries that differ.
    options = tiny_options(
        corpus, run_dir,
        **{"train.max_steps": 40, "train.epochs": 99, "data.test_files": many,
           "evaluation.max_examples": 1},
    )  # fmt: skip
    code, _, err = pools(2).command("train", options)
    assert code == 0, err
    return run_dir


def test_a_killed_evaluation_goes_on(pools: Any, trained: Path, tmp_path: Path) -> None:
    argv = ["--checkpoint", str(trained), "--evaluation.batch_tokens", "300", "--output_dir"]
    assert pools(1).command("eval_rouge", [*argv, str(tmp_path / "whole")])[0] == 0
    output = tmp_path / "parts"
    [(code, _, _, first), (_, _, _, others)] = pools(2).run(evaluate_until, [*argv, str(output)], 3)
    assert code == 1 and len(first) == 3 and not (output / "predictions.jsonl").exists()
    [(code, out, err, second)] = pools(1).run(evaluate_until, [*argv, str(output)], 10**6)
    assert code == 0, err
    assert "summaries are there already" in out
    assert not {*first, *others} & {*second} and len(second) > 3
    for name in ("predictions.jsonl", "rouge.json"):
        texts = [(folder / name).read_text() for folder in (tmp_path / "whole", output)]
        assert texts[0] == texts[1]
    assert not (output / ".unfinished").exists()
    rows = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(101)]


def test_a_kill_while_the_baseline_decodes_loses_nothing(
    pools: Any, trained: Path, tmp_path: Path
) -> None:
    argv = ["--checkpoint", str(trained), "--baseline", str(trained)]
    argv += ["--evaluation.batch_tokens", "900", "--output_dir", str(tmp_path)]
    # 101 sources of at most 64 tokens are at least two batches.
    [(code, out, _, whole)] = pools(1).run(evaluate_until, argv, 10**6)
    assert code == 0 and "summarizing 101 documents" in out
    batches = len(whole) // 2
    shutil.rmtree(tmp_path)
    [(code, _, _, first)] = pools(1).run(evaluate_until, argv, batches + 2)
    assert code == 1 and len(first) == batches + 2 and (tmp_path / "predictions.jsonl").exists()
    [(code, out, err, second)] = pools(1).run(evaluate_until, argv, 10**6)
    assert code == 0, err
    assert "101 of 101 summaries are there already" in out
    assert len(second) == batches - 2 > 0
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["metrics"]["rouge1"]["ties"] == 101
    assert not list(tmp_path.rglob(".unfinished"))


def test_sharded_evaluation_is_the_same(pools: Any, trained: Path, tmp_path: Path) -> None:
    found = []
    # Training's sharding does not matter: neither ddp nor what two ranks could not do.
    for mode, engine in (("gather", "fsdp2"), ("sharded", "ddp"), ("sharded", "fsdp2")):
        output = tmp_path / f"{mode}-{engine}"
        argv = ["--checkpoint", str(trained), "--evaluation.generation_mode", mode]
        argv += ["--evaluation.batch_tokens", "900", "--output_dir", str(output)]
        argv += ["--parallel.engine", engine]
        if (mode, engine) == ("sharded", "fsdp2"):
            argv += ["--parallel.sharding", "hybrid_shard", "--parallel.num_replicas", "8"]
        code, _, err = pools(2).command("eval_rouge", argv)
        assert code == 0, err
        lines = (output / "predictions.jsonl").read_text().splitlines()
        found.append([json.loads(line)["prediction"] for line in lines])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 5 and "" not in found[0]
