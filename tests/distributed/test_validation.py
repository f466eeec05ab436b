"""Validation in training: it changes no number of it, may end it, and shows what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import DROPOUT_MODEL, read_metrics, tiny_options
from tests.distributed.test_training import final_weights, losses, train

LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        ("fsdp2", "gather"),
        pytest.param("fsdp2", "sharded", marks=LONG),
        pytest.param("fsdp1", "gather", marks=LONG),
        pytest.param("fsdp1", "sharded", marks=LONG),
        pytest.param("ddp", "gather", marks=LONG),
    ],
)
def test_training_is_the_same_with_and_without(
    pools: Any, corpus: Path, tmp_path: Path, engine: str, mode: str
) -> None:
    options = {
        "parallel.engine": engine,
        "parallel.param_dtype": "bf16",
        "model.config": DROPOUT_MODEL,
        "train.max_steps": 8,
    }
    often, never = tmp_path / "often", tmp_path / "never"
    often_options = {
        "evaluation.every_steps": 2,
        "evaluation.generation_mode": mode,
        "logging.tensorboard": "true",
    }
    out, _ = train(pools(2), corpus, often, **options, **often_options)
    train(pools(2), corpus, never, **options, **{"data.validation_files": "[]"})
    validations = read_metrics(often, "validation")
    assert [row["step"] for row in validations] == [2, 4, 6, 8]
    assert not read_metrics(never, "validation")
    assert losses(often) == losses(never)
    expected, found = final_weights(never, 8), final_weights(often, 8)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(0 < row["evaluation_share"] < 1 for row in validations)
    [ending] = [line for line in out.splitlines() if line.startswith("done:")]
    assert "% of it validation); the run is in" in ending
    _check_shown(often, out)


def _check_shown(run_dir: Path, out: str) -> None:
    """The same three examples at each of four validations, in log and TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = [
        json.loads(line)
        for line in (run_dir / "evaluation/step-00000008/validation/predictions.jsonl")
        .read_text()
        .splitlines()
    ]
    chosen = [rows[index] for index in (0, 4, 8)]
    lines = out.splitlines()
    for row in chosen:
        assert sum(line.startswith(f"example {row['id']}, ROUGE-1/2") for line in lines) == 4
    # The first validation shows documents; the later ones leave them out.
    assert sum(line.startswith("  document  ") for line in lines) == 3
    assert sum(line.startswith("  summary  ") for line in lines) == 12
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    for number, row in enumerate(chosen, 1):
        shown = events.Tensors(f"summaries/{number}/text_summary")
        assert [event.step for event in shown] == [2, 4, 6, 8]
        [text] = shown[-1].tensor_proto.string_val
        assert row["document"].rstrip(".").encode() in text and b"**document**" in text
    assert "validation/evaluation_share" in events.Tags()["scalars"]


STOPPING = {
    "schedule.name": "linear",
    "train.max_steps": 8,
    "evaluation.every_steps": 1,
    "evaluation.max_examples": 2,
    "evaluation.best_metric": "loss",
    "logging.num_summaries": 0,
}
# Nothing is better by so much: the second validation behind the first one ends the run.
PATIENCE = {"evaluation.early_stopping_patience": 2, "evaluation.early_stopping_min_delta": 100}


def test_a_run_stops_early_stays_stopped_and_goes_on_with_more_patience(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    # Nothing else than the end asks for a checkpoint at step 3.
    out, _ = train(pools(2), corpus, run_dir, **STOPPING, **PATIENCE, **{"checkpoint.keep_best": 0})
    assert "warning: checkpoint.keep_best is 0" in out
    said = "stopped early at step 3 of 8: 2 validations in a row without a better loss by more"
    assert f"done: {said}" in out and "1 of 2 validations without a better loss" in out
    assert len(losses(run_dir)) == 3
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 3) and said in status["message"]
    best = min(read_metrics(run_dir, "validation"), key=lambda row: row["loss"])["step"]
    assert f"the best is step {best} (" in out
    assert (run_dir / "checkpoints/step-00000003/COMPLETE").exists()

    out, _ = train(pools(2), corpus, run_dir, **STOPPING, **PATIENCE)
    assert said in out and "nothing to do" in out and "early_stopping_patience" in out
    assert json.loads((run_dir / "status.json").read_text()) == status

    # The same steps as if it had never stopped, learning rate included.
    train(pools(2), corpus, run_dir, **STOPPING)
    train(pools(2), corpus, whole, **{**STOPPING, "evaluation.every_steps": "null"})
    for figure in ("step", "loss", "learning_rate"):
        found = [row[figure] for row in read_metrics(run_dir, "train")]
        assert found == [row[figure] for row in read_metrics(whole, "train")]


def test_it_stops_also_where_the_last_validation_has_to_be_made_up_for(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # No row is due at step 3, but that may be the last one, and its checkpoint comes behind it.
    options = {**STOPPING, **PATIENCE, "checkpoint.every_steps": 3, "logging.every_steps": 100}
    train(pools(2), corpus, run_dir, **options)
    # As a kill between a checkpoint and the validation behind it leaves the folder.
    (run_dir / "checkpoints/step-00000003/scores.json").unlink()
    out, _ = train(pools(2), corpus, run_dir, **options)
    assert "done: stopped early at step 3 of 8" in out
    assert len(losses(run_dir)) == 3


def test_patience_without_anything_to_validate_on_is_refused(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    options = {**STOPPING, **PATIENCE, "data.validation_files": "[]"}
    code, _, err = pools(2).command("train", tiny_options(corpus, tmp_path / "run", **options))
    assert code == 2 and "no validation split" in err and len(err.splitlines()) == 1
