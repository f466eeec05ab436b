"""How long a checkpoint keeps training waiting, and until it is complete."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from t5_fsdp.benchmark.ranks import report
from t5_fsdp.benchmark.workload import Workload
from t5_fsdp.benchmark.world import entered_world
from t5_fsdp.checkpoint.format import RunState
from t5_fsdp.checkpoint.manager import CheckpointManager
from t5_fsdp.checkpoint.retention import Retention
from t5_fsdp.config import OptimizerConfig, ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.model.build import build_on_meta, draw_weights
from t5_fsdp.parallel.engine import parallelize
from t5_fsdp.training.optimizer import make_optimizer


def save(workload: Workload, rounds: int, background: bool, folder: str) -> None:
    """On a rank: write model and optimizer, once a turn, after one that is not counted.

    Args:
        background: train on while the files are written; False: wait for them.
        folder: on the disk that is measured; what is written is deleted.
    """
    with (
        entered_world(workload.device) as world,
        tempfile.TemporaryDirectory(dir=folder) as scratch,
    ):
        run_dir = Path(world.on_rank_zero(lambda: scratch))
        _save(workload, rounds, background, run_dir, world)
        world.barrier()


def _save(workload: Workload, rounds: int, background: bool, run_dir: Path, world: World) -> None:
    engine = parallelize(build_on_meta(workload.spec()), ParallelConfig(param_dtype="fp32"), world)
    engine.load_full(draw_weights(workload.spec(), workload.seed) if world.is_main else {})
    optimizer = make_optimizer(engine.model, OptimizerConfig())
    manager = CheckpointManager(
        run_dir, world, retention=Retention(1, 0, "loss"), background=background
    )
    sizes: list[int] = []
    manager.on_saved = lambda saved: sizes.append(saved.num_bytes)
    (run_dir / "tokenizer").mkdir(exist_ok=True)
    for step in range(rounds + 1):
        world.barrier()
        began = time.perf_counter()
        state = new_state(workload, step + 1)
        manager.save(engine.model, optimizer, state, "", run_dir / "tokenizer")
        blocked = time.perf_counter() - began
        manager.wait()
        figures = {
            "blocked_seconds": blocked,
            "total_seconds": time.perf_counter() - began,
            "bytes": float(sizes[-1]) if sizes else 0.0,
        }
        report(None if step == 0 else figures)


def new_state(workload: Workload, step: int = 0) -> RunState:
    """Of a run that nobody goes on with."""
    values: dict[str, Any] = {"plan": {}, "window": {}, "scores": {}, "versions": {}}
    return RunState(
        step=step,
        model=workload.spec().to_json(),
        data_hash="",
        tokenizer_hash="",
        prepared="",
        **values,
    )
