"""Run folders as training and evaluation leave them, made without either."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from t5_fsdp.checkpoint.format import files_below, write_complete

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def train_row(step: int, every: int = 10, **changed: Any) -> dict[str, Any]:
    """A row over `every` steps of 0.5 s, as of a GPU."""
    noise = random.Random(step).random()
    return {
        "kind": "train", "step": step, "epoch": step / 500,
        "loss": 2.0 + 3.0 * math.exp(-step / 300) + 0.1 * noise,
        "source_tokens": 900 * every, "target_tokens": 100 * every,
        "padding_share": 0.02 + noise / 50, "tokens_per_second": 2000.0,
        "sequences_per_second": 64.0, "step_seconds": 0.5,
        "data_seconds": 0.01, "forward_seconds": 0.14, "backward_seconds": 0.25,
        "communication_seconds": 0.05, "optimizer_seconds": 0.03, "checkpoint_seconds": 0.0,
        "evaluation_seconds": 0.0, "peak_memory_bytes": 30 * 2**30,
        "allocated_memory_bytes": 12 * 2**30, "reserved_memory_bytes": 34 * 2**30,
        "allocator_retries": 0, "resident_memory_bytes": 6 * 2**30, "mfu": 0.4 + noise / 20,
        "slowest_rank": 3, "slowest_rank_ratio": 1.05, "learning_rate": 1e-4 * (1 - step / 1000),
        "grad_norm": 0.5 + noise, "examples_seen": 32 * step, **changed,
    }  # fmt: skip


def validation_row(step: int, **changed: Any) -> dict[str, Any]:
    scores = {name: 0.1 + step / 2000 + number / 50 for number, name in enumerate(METRICS)}
    row = {"kind": "validation", "step": step, "loss": 2.5 - step / 1000, **scores}
    return {**row, "examples": 32, "seconds": 20.0, "evaluation_share": 0.1, **changed}


def save_row(step: int) -> dict[str, Any]:
    return {"kind": "checkpoint", "step": step, "blocked_seconds": 2.0, "total_seconds": 30.0,
            "bytes": 34_000_000_000}  # fmt: skip


def usual_rows(last: int = 500) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(10, last + 1, 10):
        rows.append(train_row(step))
        if step % 100 == 0:
            rows += [save_row(step), validation_row(step)]
    return rows


def prediction(number: int, **changed: Any) -> dict[str, Any]:
    scores = {name: round((number * 37 % 101) / 100, 4) for name in METRICS}
    texts = {
        "id": f"row-{number}",
        "document": f"Document {number} says how to rinse rice. " * 4,
        "reference": f"Rinse rice {number}.",
        "prediction": f"Rinse the rice {number}.",
    }
    return {**texts, **scores, "summary_words": 4 + number % 7, "cut": number % 5 == 0, **changed}


def write_evaluation(
    run_dir: Path, split: str, step: int, rows: Iterable[dict[str, Any]], **more: Any
) -> Path:
    """An evaluation of a run; its scores are not those of the rows."""
    folder = run_dir / "evaluation" / f"step-{step:08d}" / split
    folder.mkdir(parents=True)
    lines = [json.dumps(row) for row in rows]
    (folder / "predictions.jsonl").write_text("".join(f"{line}\n" for line in lines))
    scores = {
        name: {"fmeasure": 0.3 + n / 100, "fmeasure_low": 0.28 + n / 100,
               "fmeasure_high": 0.32 + n / 100}
        for n, name in enumerate(METRICS)
    }  # fmt: skip
    rouge = {"examples": len(lines), "scores": scores, "settings": {}, **more}
    (folder / "rouge.json").write_text(json.dumps(rouge))
    return folder


def make_checkpoint(
    run_dir: Path, step: int, scores: dict[str, dict[str, float]], **state: Any
) -> Path:
    """One of zeros, sound as far as files go."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"\0" * 2_000_000)
    (folder / "config.yaml").write_text("evaluation: {best_metric: loss}\n")
    values = {"step": step, "model": {}, "data_hash": "", "tokenizer_hash": "", "plan": {},
              "window": {}, "scores": scores, "versions": {}, "prepared": ""}  # fmt: skip
    (folder / "state.json").write_text(json.dumps(values | state))
    write_complete(folder, files_below(folder), step, world_size=1, known={})
    return folder


def audit() -> dict[str, Any]:
    tokens = {"mean": 100.5, "median": 90.0, "p90": 180.0, "max": 1127}
    split = {
        "read": 1010, "kept": 1000, "dropped": {"empty summary": 10}, "source_tokens": tokens,
        "target_tokens": tokens, "source_truncated": 0.3, "target_truncated": 0.0,
        "unknown_tokens": 0.001, "unknown_characters": {}, "duplicates": 2,
    }  # fmt: skip
    return {
        "splits": {"train": split, "test": split},
        "dropped": {"empty summary": 20},
        "notes": ["train: ids are row numbers"],
        "duplicates_across": {"test in train": 3},
        "warnings": ["train: 30 % of the sources are cut at 512 tokens"],
    }
