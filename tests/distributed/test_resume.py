"""Going on from a checkpoint: bit for bit on the same layout, to rounding on any other."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.conftest import DROPOUT_MODEL, make_pairs, read_metrics, tiny_options, write_jsonl
from tests.distributed.test_training import final_weights, losses, train
from tests.workers import run_command

ENGINES = ["fsdp2", "fsdp1", "ddp"]


@pytest.mark.parametrize("engine", ENGINES)
def test_four_and_four_and_four_steps_are_twelve(
    pools: Any, corpus: Path, tmp_path: Path, engine: str
) -> None:
    options = {
        "parallel.engine": engine,
        "model.config": DROPOUT_MODEL,
        "parallel.param_dtype": "bf16",
        "train.max_steps": 12,
        "schedule.name": "linear",
        "schedule.warmup_steps": 6,
        "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 3,
        "evaluation.max_examples": 2,
    }
    train(pools(2), corpus, tmp_path / "whole", **options)
    for name, start in (("second", "whole/checkpoints/step-00000004"),
                        ("third", "second/checkpoints/step-00000008")):  # fmt: skip
        train(pools(2), corpus, tmp_path / name, **options,
              **{"checkpoint.resume": tmp_path / start})  # fmt: skip
    whole = read_metrics(tmp_path / "whole", "train")
    for name, first in (("second", 4), ("third", 8)):  # resumed in the warm-up, and in the decay
        rows = read_metrics(tmp_path / name, "train")
        for figure in ("step", "loss", "grad_norm", "learning_rate", "epoch", "examples_seen"):
            assert [row[figure] for row in rows] == [row[figure] for row in whole[first:]]
    expected, found = (final_weights(tmp_path / name, 12) for name in ("whole", "third"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


SOME_LAYOUTS = [("fsdp2", 4), ("fsdp1", 1), ("ddp", 2)]
ALL_LAYOUTS = [(engine, world_size) for engine in ENGINES for world_size in (1, 2, 4)]


@pytest.mark.parametrize(
    ("first", "layouts"),
    [("fsdp2", SOME_LAYOUTS)]
    + [pytest.param(e, ALL_LAYOUTS, marks=pytest.mark.exhaustive) for e in ENGINES],
)
def test_a_checkpoint_of_two_ranks_goes_on_under_other_engines_and_numbers_of_ranks(
    pools: Any, corpus: Path, tmp_path: Path, first: str, layouts: list[tuple[str, int]]
) -> None:
    options = {"train.max_steps": 8, "checkpoint.every_steps": 4, "evaluation.max_examples": 2}
    train(pools(2), corpus, tmp_path / "whole", **options, **{"parallel.engine": first})
    start = {"checkpoint.resume": tmp_path / "whole/checkpoints/step-00000004"}
    for engine, world_size in layouts:
        run_dir = tmp_path / f"{engine}-{world_size}"
        train(pools(world_size), corpus, run_dir, **options, **start, **{"parallel.engine": engine})
        assert losses(run_dir) == pytest.approx(losses(tmp_path / "whole")[4:], rel=1e-5)


def train_and_record(argv: list[str], last_step: int) -> list[list[int]]:
    """On a rank of the pool: train, as if killed after a step; the sources it saw, without ends."""
    from t5_fsdp.training.trainer import Trainer

    seen = []
    compute = Trainer._compute_gradients

    def record(self: Any, batch: Any) -> Any:
        if batch.step > last_step:
            os.kill(os.getpid(), 10)  # SIGUSR1: the first step of a launch stops at once
        for micro in batch.micro_batches:
            seen.extend(row[row > 1].tolist() for row in micro.input_ids)
        return compute(self, batch)

    with mock.patch.object(Trainer, "_compute_gradients", record):
        code, _, err = run_command("train", argv)
    assert code in (0, 75), err
    return [row for row in seen if row]


def test_each_of_37_examples_once_an_epoch_on_2_1_and_4_ranks(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    pairs = make_pairs(37, 21)
    for number, pair in enumerate(pairs):  # so that the source tells which one it is
        pair["document"] = f"{'rinse ' * (number // 6 + 1)}{'water ' * (number % 6 + 1)}lamp."
    options = {
        "data.train_files": write_jsonl(tmp_path / "train.jsonl", pairs),
        "train.global_batch_size": 5,
        "train.micro_batch_tokens": 200,
        "train.max_steps": 24,  # of 8 an epoch
        "checkpoint.every_steps": 1,
        "evaluation.max_examples": 2,
        "logging.every_steps": 100,
    }
    argv = tiny_options(corpus, tmp_path / "run", **options)
    seen: list[str] = []
    # Stopped in the first and the second epoch.
    for world_size, last_step in ((2, 3), (1, 12), (4, 24)):
        for rows in pools(world_size).run(train_and_record, argv, last_step):
            seen += [json.dumps(row) for row in rows]
    assert len(seen) == 3 * 37 and set(Counter(seen).values()) == {3}
