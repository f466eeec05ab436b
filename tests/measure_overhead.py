"""What a run's own meters and log cost, as a share of a step.

    OMP_NUM_THREADS=1 python -m tests.measure_overhead [--steps 20] [--ranks 1] [--small]

Trains the model of the benchmark (4 + 4 layers, d_model 256, bf16, global batch 32) on the bundled
sample, writing a row each step, which is ten times as often as by default, with TensorBoard. What
is measured is the time inside of the meters' and the log's own functions, and not the difference
of two runs, which on a busy machine differ by more than this. With --small a model that is quick
enough for many steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import read_metrics
from tests.workers import Pool, run_command

ROOT = Path(__file__).parents[1]
MODEL = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
SMALL = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def options(run_dir: Path, steps: int, small: bool) -> list[str]:
    """Command line of the run."""
    values = {
        "run_dir": run_dir,
        "data.cache_dir": run_dir.parent / "cache",
        "model.config": json.dumps(SMALL if small else MODEL),
        "parallel.param_dtype": "bf16",
        "train.max_steps": steps,
        "train.epochs": 1000,
        "train.global_batch_size": 8 if small else 32,
        "checkpoint.every_steps": "null",
        "checkpoint.keep_best": 0,
        "evaluation.every_steps": "null",
        "evaluation.max_examples": 1,
        "evaluation.max_new_tokens": 2,
        "logging.every_steps": 1,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return ["--config", str(ROOT / "configs/demo.yaml"), *words]


def timed_run(argv: list[str]) -> tuple[int, str, dict[str, float]]:
    """On a rank of the pool: train; exit code, errors, and seconds inside of each function."""
    from t5_fsdp.training.meters import Meters
    from t5_fsdp.training.trainer import Trainer

    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - began

        return call

    patched = {Meters: ("begin_step", "lap", "end_step", "count", "row"), Trainer: ("_log",)}
    before = {(owner, name): getattr(owner, name) for owner in patched for name in patched[owner]}
    for (owner, name), function in before.items():
        setattr(owner, name, timed(name, function))
    try:
        code, _, err = run_command("train", argv)
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)
    return code, err, dict(seconds) | {"hooks of a block": _hooks_of_a_block()}


def _hooks_of_a_block(count: int = 2000) -> float:
    """Seconds that a sampled step's two hooks, inside of the model, take for one of its blocks."""
    from torch.nn import Identity

    from t5_fsdp.training.stopwatch import HostTimeline, Stopwatch

    def run_blocks(block: Identity) -> float:
        began = time.perf_counter()
        for _ in range(count):
            block(0)
        return (time.perf_counter() - began) / count

    block = Identity()
    with Stopwatch(HostTimeline()).spans_of([block], "work"):
        hooked = run_blocks(block)
    return hooked - run_blocks(block)


def measure(folder: Path, steps: int, ranks: int, small: bool) -> dict[str, float]:
    """Figures of one run; of rank 0, since it alone writes."""
    pool = Pool(ranks)
    try:
        [(code, err, seconds), *_] = pool.run(timed_run, options(folder / "run", steps, small))
    finally:
        pool.close()
    assert code == 0, err
    rows = read_metrics(folder / "run", "train")
    step = sum(row["step_seconds"] for row in rows[1:]) / (len(rows) - 1)
    marks = sum(seconds[name] for name in ("begin_step", "lap", "end_step", "count")) / steps
    blocks = 2 * (SMALL if small else MODEL)["num_layers"]
    hooks = blocks * seconds["hooks of a block"]
    return {
        "step": step,
        "marks": marks,
        "hooks": hooks,
        "row": seconds["row"] / steps,
        "log": seconds["_log"] / steps,
        "share": (marks + hooks + seconds["_log"] / steps) / step,
        "agreement": sum(row["communication_seconds"] for row in rows[1:]) / (len(rows) - 1),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), given.steps, given.ranks, given.small)
    print(
        f"a step takes {1e3 * found['step']:.1f} ms; of them, in microseconds: marks "
        f"{1e6 * found['marks']:.0f}, hooks {1e6 * found['hooks']:.0f}, the row and its log "
        f"{1e6 * found['log']:.0f} (of them the meters' row {1e6 * found['row']:.0f})"
    )
    print(
        f"share of a step: {found['share']:.3%} with a row each step, "
        f"{(found['marks'] + (found['hooks'] + found['log']) / 10) / found['step']:.3%} with one "
        f"in ten; the ranks' agreement takes {1e6 * found['agreement']:.0f} microseconds a step"
    )


if __name__ == "__main__":
    main()
