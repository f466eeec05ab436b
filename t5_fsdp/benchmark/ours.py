"""This program: its own engine, optimizer, batches and training loop, meters included."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from t5_fsdp.benchmark.clock import Clock, StepTokens
from t5_fsdp.benchmark.saving import new_state
from t5_fsdp.benchmark.workload import Workload, random_weight
from t5_fsdp.benchmark.world import device_name, entered_world
from t5_fsdp.checkpoint.manager import CheckpointManager
from t5_fsdp.checkpoint.retention import Retention
from t5_fsdp.config import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)
from t5_fsdp.console import Console
from t5_fsdp.data.batching import StepBatch, StepBatches
from t5_fsdp.distributed import World
from t5_fsdp.interruption import Interruption
from t5_fsdp.model.build import build_on_meta, draw_weights
from t5_fsdp.model.devices import peak_flops
from t5_fsdp.model.flops import T5Shape
from t5_fsdp.model.forward import attach_loss
from t5_fsdp.model.loss import LossOptions
from t5_fsdp.parallel.common import local_part, stored_tensors
from t5_fsdp.parallel.engine import Engine, parallelize
from t5_fsdp.training.optimizer import make_optimizer
from t5_fsdp.training.trackers.tracker import TrackedRun
from t5_fsdp.training.trackers.trackers import Trackers, open_trackers
from t5_fsdp.training.trainer import LoopOptions, Trainer


def train(workload: Workload, clock_options: dict[str, int], engine: str) -> dict[str, Any]:
    """On a rank: train with `engine`, and stop for the clock; losses by step as they are logged."""
    with entered_world(workload.device) as world, tempfile.TemporaryDirectory() as run_dir:
        clock = Clock(T5Shape.of(workload.spec().config), world.device, **clock_options)
        _train(workload, clock, engine, world, Path(run_dir))
        return {"losses": _losses(Path(run_dir))}


def step_batches(workload: Workload, world: World) -> StepBatches:
    """This rank's share of every step."""
    return StepBatches(
        workload.examples.split(),
        workload.special(),
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=workload.global_batch_size,
        micro_batch_tokens=workload.micro_batch_tokens,
        batching="length_grouped",
        seed=workload.seed,
        width_multiple=workload.width_multiple,
    )


def tokens_of(batch: StepBatch, world: World) -> StepTokens:
    """Of the whole global batch, on rank 0; the others add nothing to it."""
    if not world.is_main:
        return StepTokens(0, 0, 0, 0)
    return StepTokens(
        batch.num_examples, batch.source_tokens, batch.target_tokens, batch.padded_tokens
    )


class _ClockedBatches:
    """Batches whose steps are timed; the rest is that of the batches inside."""

    def __init__(self, batches: StepBatches, clock: Clock, world: World) -> None:
        self._batches, self._clock, self._world = batches, clock, world
        self.steps_per_epoch = batches.steps_per_epoch
        self.num_examples = batches.num_examples
        self.longest_example = batches.longest_example

    def iterate(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        for batch in self._batches.iterate(first_step, last_step):
            self._clock.tick(tokens_of(batch, self._world))
            yield batch


def _train(workload: Workload, clock: Clock, engine: str, world: World, run_dir: Path) -> None:
    options = LoopOptions(
        seed=workload.seed,
        parallel=ParallelConfig(
            **{
                "engine": engine,
                "param_dtype": workload.param_dtype,
                "activation_checkpointing": workload.activation_checkpointing,
                **workload.parallel,
            }
        ),
        optimizer=OptimizerConfig(lr=workload.learning_rate),
        schedule=ScheduleConfig(name="constant"),
        train=TrainConfig(epochs=1e9, max_steps=clock.total_steps),
        checkpoint=CheckpointConfig(),
        evaluation=EvaluationConfig(),
        logging=LoggingConfig(every_steps=workload.log_every),
    )
    model = _build(workload, options.parallel, world)
    peak = peak_flops(device_name(workload.device), workload.param_dtype)
    trainer = Trainer(
        options,
        run_dir=run_dir,
        world=world,
        console=Console(False),
        interruption=Interruption(),
        engine=model,
        optimizer=make_optimizer(model.model, options.optimizer, seed=workload.seed),
        batches=_ClockedBatches(step_batches(workload, world), clock, world),
        state=new_state(workload),
        checkpoints=CheckpointManager(
            run_dir, world, retention=Retention(0, 0, "loss"), background=True
        ),
        save=lambda state: None,
        validate=None,
        shape=T5Shape.of(workload.spec().config),
        peak_flops=None if peak is None else peak * world.world_size,
        trackers=_trackers(options.logging, world, run_dir),
    )
    trainer.run()


def _trackers(options: LoggingConfig, world: World, run_dir: Path) -> Trackers:
    """TensorBoard, which a run has by default."""
    if not world.is_main:
        return Trackers.none(Console(False))
    run = TrackedRun(run_dir, run_dir.name, None, {}, first_step=1)
    return open_trackers(options, run, Console(False))


def _build(workload: Workload, parallel: ParallelConfig, world: World) -> Engine:
    model = build_on_meta(workload.spec(), workload.attention)
    attach_loss(model, LossOptions())
    engine = parallelize(model, parallel, world)
    if world.device.type == "cpu":
        engine.load_full(draw_weights(workload.spec(), workload.seed) if world.is_main else {})
    else:
        engine.materialize()
        fill(engine, workload.seed, world.device)
    return engine


def fill(engine: Engine, seed: int, device: torch.device) -> None:
    """The weights of `Workload.weights`, each drawn whole on every rank, which keeps its shard.

    Drawn on the GPU: on the CPU three billion of them take minutes.
    """
    with torch.no_grad():
        for name, tensor in stored_tensors(engine.model).items():
            whole = random_weight(name, tensor.shape, seed, device)
            if isinstance(tensor, DTensor):
                # Without a source rank nothing is sent.
                shards = distribute_tensor(whole, tensor.device_mesh, tensor.placements,
                                           src_data_rank=None)  # fmt: skip
                whole = shards.to_local()
            local_part(tensor).copy_(whole)


def _losses(run_dir: Path) -> dict[int, float]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():  # on rank 0 alone
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
