"""Time, memory and padding of preparing a made-up WikiHow, beside datasets' own `map`."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from t5_fsdp.benchmark.commands import run_command
from t5_fsdp.benchmark.rounds import Figures
from t5_fsdp.data.batch_division import divide_batch
from t5_fsdp.data.epoch_plan import plan_epoch
from t5_fsdp.data.prepared import open_prepared

ROOT = Path(__file__).parents[2]
_GLOBAL_BATCH, _RANKS, _MICRO_BATCH_TOKENS = 128, 8, 16384
_ROWS_A_DEVICE = 16
# What a user of Seq2SeqTrainer writes; the lengths are those of the recipe.
_MAP_SCRIPT = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
file, name, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
def encode(batch):
    documents = ["summarize: " + (text or "") for text in batch["text"]]
    encoded = tokenizer(documents, max_length=512, truncation=True)
    summaries = [text or "" for text in batch["headline"]]
    labels = tokenizer(text_target=summaries, max_length=150, truncation=True)
    return {**encoded, "labels": labels["input_ids"]}
rows = load_dataset("csv", data_files=file, split="train", cache_dir=cache)
rows.map(encode, batched=True, remove_columns=rows.column_names)
"""


def write_csv(path: Path, num_rows: int) -> None:
    """wikihowAll.csv: random words of the sample, lengths spread as WikiHow's are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "data/sample/train.jsonl").read_text(encoding="utf-8")
    documents = [json.loads(line)["document"] for line in text.splitlines()]
    vocabulary = np.array(sorted({word for document in documents for word in document.split()}))
    rng = np.random.default_rng(0)
    # 580 words a text; 62 % of the sources are longer than 512 tokens, at 1.5 tokens a word.
    num_words = np.clip(rng.lognormal(math.log(423), 0.8, num_rows), 20, 8000).astype(int)
    num_summary = np.clip(rng.lognormal(math.log(45), 0.6, num_rows), 2, 400).astype(int)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(["headline", "title", "text"])
        for number in range(num_rows):
            words = vocabulary[rng.integers(len(vocabulary), size=num_words[number])]
            summary = vocabulary[rng.integers(len(vocabulary), size=num_summary[number])]
            lines = [" ".join(summary[i : i + 8]) for i in range(0, len(summary), 8)]
            paragraphs = [" ".join(words[i : i + 60]) for i in range(0, len(words), 60)]
            headline = "\n" + ".,\n".join(lines) + "."
            writer.writerow([headline, f"How to Do {number}x", " " + ".\n\n, ".join(paragraphs)])


def prepare(folder: Path, tokenizer: str, num_rows: int) -> Figures:
    """scripts/prepare_data.py anew, from the start of the process to its end.

    Args:
        folder: with wikihowAll.csv.
        tokenizer: folder or Hub id.
    """
    cache = folder / ".cache"
    shutil.rmtree(cache, ignore_errors=True)
    return _timed(
        [str(ROOT / "scripts/prepare_data.py"),
         "--config", str(ROOT / "configs/wikihow_t5_small.yaml"),
         "--run_dir", str(folder / "run"), "--data.cache_dir", str(cache),
         "--data.path", str(folder), "--model.tokenizer", tokenizer],
        num_rows,
    )  # fmt: skip


def map_by_datasets(folder: Path, tokenizer: str, num_rows: int) -> Figures:
    """The same columns through datasets' CSV reader and `map`: no cleaning, splits or audit."""
    cache = folder / ".datasets"
    shutil.rmtree(cache, ignore_errors=True)
    script = ["-c", _MAP_SCRIPT, str(folder / "wikihowAll.csv"), tokenizer, str(cache)]
    return _timed(script, num_rows)


def _timed(command: Sequence[str], num_rows: int) -> Figures:
    """Of a fresh process: rows a second, and the largest resident memory."""
    done = run_command(command)
    return {
        "seconds": done.seconds,
        "rows_per_second": num_rows / done.seconds,
        "peak_memory_bytes": float(done.peak_memory_bytes),
    }


def padding_of_prepared(folder: Path) -> dict[str, float]:
    """Share of padding on the training split that `prepare` left, by the way batches are made."""
    prepared = next((folder / ".cache").glob("prepared-*/meta.json")).parent
    split = open_prepared(prepared).split("train")
    assert split is not None
    source, target = split.source_lengths, split.target_lengths
    shares = {}
    for batching in ("length_grouped", "shuffled"):
        plan = plan_epoch(
            source, target, global_batch_size=_GLOBAL_BATCH, batching=batching, seed=1, epoch=0
        )
        batches = [plan.batch(i) for i in range(len(plan))]
        shares[f"this program, {batching}"] = padding(source, target, batches)
    drawn = np.random.default_rng(1).permutation(len(source))
    shares["random, 16 rows a device"] = padding_per_device(source, target, drawn)
    grouped = group_by_length(source)
    shares["group_by_length, 16 rows a device"] = padding_per_device(source, target, grouped)
    shares["fixed 512 / 150"] = 1 - float(source.sum() + target.sum()) / (len(source) * 662)
    return shares


def padding(source: np.ndarray, target: np.ndarray, batches: list[np.ndarray]) -> float:
    """Share of padding of an epoch's batches, divided over ranks as this program does it."""
    padded = 0
    for number, rows in enumerate(batches):
        shares = divide_batch(
            source[rows].tolist(),
            target[rows].tolist(),
            world_size=_RANKS,
            micro_batch_tokens=_MICRO_BATCH_TOKENS,
            rotation=number,
        )
        for groups in shares:
            for group in filter(None, groups):
                picked = rows[group]
                padded += len(group) * int(source[picked].max() + target[picked].max())
    return 1 - int(source.sum() + target.sum()) / padded


def group_by_length(source: np.ndarray) -> np.ndarray:
    """The order of an epoch under transformers' `group_by_length`, by its own sampler."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(1)
    # Its Trainer gives it the rows of a device, of how many devices there may be.
    sampler = LengthGroupedSampler(_ROWS_A_DEVICE, lengths=source.tolist(), generator=generator)
    return np.fromiter(sampler, np.int64, len(source))


def padding_per_device(source: np.ndarray, target: np.ndarray, order: np.ndarray) -> float:
    """Share of padding where every device takes the next 16 rows, as most trainers do."""
    padded = 0
    for rows in np.split(order, range(_ROWS_A_DEVICE, len(order), _ROWS_A_DEVICE)):
        padded += len(rows) * int(source[rows].max() + target[rows].max())
    return 1 - int(source.sum() + target.sum()) / padded
