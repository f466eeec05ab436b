"""Predictions and scores depend neither on the ranks nor on the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_pairs, tiny_options, write_jsonl

ENGINES = ("fsdp2", "fsdp1", "ddp")
SOME = [("fsdp2", 1), ("fsdp1", 2), ("ddp", 4)]
ALL = [(engine, world_size) for engine in ENGINES for world_size in (1, 2, 4)]


@pytest.fixture(scope="module")
def checkpoint(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that has learned a little, so that its summaries differ."""
    run_dir = tmp_path_factory.mktemp("evaluate") / "run"
    code, _, err = pools(2).command(
        "train", tiny_options(corpus, run_dir, **{"train.max_steps": 60, "train.epochs": 99})
    )
    assert code == 0, err
    return run_dir / "checkpoints/step-00000060"


@pytest.mark.parametrize(
    ("count", "layouts"),
    [
        (7, SOME),
        pytest.param(301, SOME, marks=pytest.mark.long),
        pytest.param(1001, ALL, marks=pytest.mark.exhaustive),
    ],
)
def test_the_same_on_any_number_of_ranks_under_each_engine(
    pools: Any,
    corpus: Path,
    tmp_path: Path,
    checkpoint: Path,
    count: int,
    layouts: list[tuple[str, int]],
) -> None:
    files = {
        split: write_jsonl(tmp_path / f"{split}.jsonl", make_pairs(count, 31))
        for split in ("validation", "test")
    }
    found = []
    for engine, world_size in layouts:
        name = f"{engine}-{world_size}"
        data = {f"data.{split}_files": path for split, path in files.items()}
        # A step of no size: each engine validates the same weights.
        options = {"model.name": checkpoint, "optimizer.lr": 0, "train.max_steps": 1,
                   "evaluation.max_examples": "null", "parallel.engine": engine,
                   "evaluation.batch_tokens": 1200}  # fmt: skip
        argv = tiny_options(
            corpus, tmp_path / name, **data, **options, **{"model.init": "pretrained"}
        )
        code, _, err = pools(world_size).command("train", argv)
        assert code == 0, err
        code, _, err = pools(world_size).command("eval_rouge", ["--checkpoint", tmp_path / name])
        assert code == 0, err
        for split in files:
            folder = tmp_path / name / "evaluation/step-00000001" / split
            rows = [json.loads(x) for x in (folder / "predictions.jsonl").read_text().splitlines()]
            scores = json.loads((folder / "rouge.json").read_text())["scores"]
            found.append((rows, scores))
    rows, _ = found[0]
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(count)]
    assert len({row["prediction"] for row in rows}) > min(count, 20) // 2
    assert all(one == found[0] for one in found)
