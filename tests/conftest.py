"""Shared fixtures: worker pools, a tiny tokenizer, tiny data files."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers import Pool

os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported: on small tensors two threads that share their cores with the worker
# pools are a hundred times slower than one.
os.environ["OMP_NUM_THREADS"] = "1"
# A suite that a shell runs in the background, or nohup, would hand its deafness to Ctrl-C on to
# the processes that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).parents[1]
WORDS = ["rinse", "cut", "rice", "soil", "water", "door", "lamp", "blue", "green", "sun", "rain"]


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported: commands collect before they end."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Pools of 1, 2 or 4 ranks, started when first asked for, anew after one that hung."""
    started: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in started or started[world_size].is_closed:
            started[world_size] = Pool(world_size)
        return started[world_size]

    yield get
    for pool in started.values():
        pool.close()


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    """torchrun, where a test calls it in this process, leaves its handlers behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A command that fails in this process leaves its group up; the next test begins without."""
    yield
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def make_pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Documents of 5 to 30 words whose summary is every third of them."""
    rng = random.Random(seed)
    pairs = []
    for number in range(count):
        words = [rng.choice(WORDS) for _ in range(rng.randint(5, 30))]
        pairs.append(
            {
                "id": f"row-{number}",
                "document": " ".join(words) + ".",
                "summary": " ".join(words[::3]) + ".",
            }
        )
    return pairs


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build_corpus(folder: Path) -> Path:
    """Write train.jsonl (60), validation.jsonl (13), test.jsonl (11) and tokenizer/ to it."""
    from t5_fsdp.data.tokenization import train_tokenizer

    for seed, (split, count) in enumerate({"train": 60, "validation": 13, "test": 11}.items()):
        write_jsonl(folder / f"{split}.jsonl", make_pairs(count, seed))
    texts = [row["document"] for row in make_pairs(200, 9)] + ["summarize: "]
    train_tokenizer(texts, 180, folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `build_corpus` makes."""
    return build_corpus(tmp_path_factory.mktemp("corpus"))


_SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODEL = json.dumps(_SHAPE | {"dropout_rate": 0.0})
DROPOUT_MODEL = json.dumps(_SHAPE | {"dropout_rate": 0.1})


def tiny_options(corpus: Path, run_dir: Path, **overrides: Any) -> list[str]:
    """Command line of a run on the corpus: float32, dropout 0, seconds on a CPU."""
    values: dict[str, Any] = {
        "data.source": "files",
        "data.train_files": corpus / "train.jsonl",
        "data.validation_files": corpus / "validation.jsonl",
        "data.test_files": corpus / "test.jsonl",
        "data.max_source_tokens": 64,
        "data.max_target_tokens": 32,
        "data.cache_dir": corpus / "cache",
        "model.name": "null",
        "model.init": "random",
        "model.tokenizer": corpus / "tokenizer",
        "model.config": MODEL,
        "parallel.param_dtype": "fp32",
        "optimizer.lr": "1e-2",
        "schedule.name": "constant",
        "train.max_steps": 10,
        "train.global_batch_size": 16,
        "train.micro_batch_tokens": 600,
        "train.collective_timeout_seconds": 20,
        "checkpoint.every_steps": "null",
        "evaluation.every_steps": "null",
        "evaluation.num_beams": 2,
        "evaluation.max_new_tokens": 12,
        "logging.every_steps": 1,
        "logging.tensorboard": "false",
    }
    values.update(overrides)
    # train asks for a file; an empty one is refused, so the run's name goes in there.
    config = run_dir.with_name(f"{run_dir.name}.yaml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f"run_dir: {run_dir}\n", encoding="utf-8")
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return ["--config", str(config), *words]


def read_metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of one kind; of a step logged twice the last row counts."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return list({row["step"]: row for row in rows if row["kind"] == kind}.values())
