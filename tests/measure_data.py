"""Time, memory and padding of a WikiHow of full size, which this program makes up.

    python -m tests.measure_data --folder /tmp/full --tokenizer FOLDER [--rows 215365]

writes wikihowAll.csv (580-word articles of the sample's words, lengths as WikiHow's), prepares it
with scripts/prepare_data.py as a process of its own, and prints rows a second, the largest resident
memory, and the share of padding on its lengths, beside two other ways of making batches.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from t5_fsdp.data.batching import divide_batch, plan_epoch
from t5_fsdp.data.prepared import open_prepared
from tests.conftest import ROOT

GLOBAL_BATCH, RANKS, MICRO_BATCH_TOKENS = 128, 8, 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=215_365)
    options = parser.parse_args()
    csv_file = options.folder / "wikihowAll.csv"
    if not csv_file.exists():
        began = time.monotonic()
        write_csv(csv_file, options.rows)
        print(
            f"written: {csv_file.stat().st_size / 1e6:.0f} MB in {time.monotonic() - began:.0f} s"
        )
    prepared = prepare(options.folder, options.tokenizer, options.rows)
    split = open_prepared(prepared).split("train")
    assert split is not None
    print_padding(split.source_lengths, split.target_lengths)


def write_csv(path: Path, num_rows: int) -> None:
    """Articles and summaries of random words whose lengths are spread as WikiHow's are."""
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


def prepare(folder: Path, tokenizer: str, num_rows: int) -> Path:
    """Run prepare_data in a process of its own; the prepared folder."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, ROOT / "scripts/prepare_data.py",
         "--config", ROOT / "configs/wikihow_t5_small.yaml", "--run_dir", folder / "run",
         "--data.path", folder, "--model.tokenizer", tokenizer],
        check=True,
    )  # fmt: skip
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(
        f"prepared: {num_rows:,} rows in {seconds:.0f} s, {num_rows / seconds:,.0f} rows a second"
    )
    print(f"largest resident memory: {peak / 1e9:.2f} GB")
    return next((folder / ".cache").glob("prepared-*/meta.json")).parent


def print_padding(source: np.ndarray, target: np.ndarray) -> None:
    print(
        f"{len(source):,} examples; sources at the limit: {100 * np.mean(source >= 512):.1f} %; "
        f"targets {target.min()} to {target.max()} tokens, mean {target.mean():.1f}"
    )
    for name in ("length_grouped", "shuffled"):
        plan = plan_epoch(
            source, target, global_batch_size=GLOBAL_BATCH, batching=name, seed=1, epoch=0
        )
        share, loads = padding(source, target, [plan.batch(i) for i in range(len(plan))])
        print(f"{name}: padding {100 * share:.2f} %, heaviest / lightest rank {loads:.4f}")
    batches = transformers_batches(source)
    share, loads = padding(source, target, batches)
    print(f"transformers' group_by_length, divided as ours: padding {100 * share:.2f} %")
    for title, chosen in (("random", None), ("transformers' group_by_length", batches)):
        share = padding_per_device(source, target, chosen)
        print(f"{title}, 16 rows a device: padding {100 * share:.2f} %")


def padding(
    source: np.ndarray, target: np.ndarray, batches: list[np.ndarray]
) -> tuple[float, float]:
    """Share of padding, and the heaviest rank's padded tokens over the lightest's, of an epoch."""
    loads = np.zeros(RANKS)
    for number, rows in enumerate(batches):
        shares = divide_batch(
            source[rows].tolist(),
            target[rows].tolist(),
            world_size=RANKS,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            rotation=number,
        )
        for rank, groups in enumerate(shares):
            for group in filter(None, groups):
                picked = rows[group]
                loads[rank] += len(group) * int(source[picked].max() + target[picked].max())
    return 1 - int(source.sum() + target.sum()) / loads.sum(), loads.max() / loads.min()


def transformers_batches(source: np.ndarray) -> list[np.ndarray]:
    """As its LengthGroupedSampler: sorted by source length within 50 batches drawn at random."""
    order = np.random.default_rng(0).permutation(len(source))
    size = 50 * GLOBAL_BATCH
    order = np.concatenate(
        [
            part[np.argsort(-source[part], kind="stable")]
            for part in np.split(order, range(size, len(order), size))
        ]
    )
    return np.split(order, range(GLOBAL_BATCH, len(order), GLOBAL_BATCH))


def padding_per_device(
    source: np.ndarray, target: np.ndarray, batches: list[np.ndarray] | None
) -> float:
    """Share of padding where every device takes the next 16 rows, as most trainers do."""
    order = np.random.default_rng(1).permutation(len(source))
    order = order if batches is None else np.concatenate(batches)
    padded = 0
    for rows in np.split(order, range(16, len(order), 16)):
        padded += len(rows) * int(source[rows].max() + target[rows].max())
    return 1 - int(source.sum() + target.sum()) / padded


if __name__ == "__main__":
    main()
