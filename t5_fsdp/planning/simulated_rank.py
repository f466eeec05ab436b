"""One step of one rank, without GPU, weights or network: what `simulation` runs in a child process.

The process group is torch's "fake" one, whose collectives return at once, and tensors are fake:
they have a shape, a dtype and a storage of a size, but no memory. The code that runs is the real
one: the model's, `parallelize`, torch's FSDP2, autograd.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from t5_fsdp.distributed import Launch, World
from t5_fsdp.parallel.engine import Engine, parallelize
from t5_fsdp.parallel.wrapping import find_blocks
from t5_fsdp.planning.gpu_kernels import gpu_kernels
from t5_fsdp.planning.memory_tracker import ShardedTracker, WholeTracker, check_torch
from t5_fsdp.planning.parts import MemoryParts
from t5_fsdp.training.optimizer import local_state_bytes

Build = Callable[[], nn.Module]
Step = Callable[[nn.Module], torch.Tensor]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Task:
    """What to simulate; see `simulation.simulate_model`."""

    build: Build
    step: Step
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    world_size: int
    devices_per_node: int
    micro_batches: int
    for_gpu: bool


def run(task: Task, report: Report) -> tuple[MemoryParts, tuple[str, ...]]:
    """The memory of rank 0, which has the largest shards, and what is simulated otherwise than run.

    For a process of its own: it sets up a process group and does not end it.

    Args:
        report: told (units done, all units) as the passes go through the model.

    Raises:
        UserError: this torch has no memory tracker, or see `parallelize`.
    """
    check_torch()
    parallel, world_size, notes = _as_simulated(task.parallel, task.world_size)
    dist.init_process_group("fake", rank=0, world_size=world_size)
    launch = Launch(world_size=world_size, local_world_size=min(world_size, task.devices_per_node))
    world = World(launch, dist.HashStore(), torch.device("cpu"))
    model = task.build()
    names = [name for name, _ in find_blocks(model)]
    engine = parallelize(model, parallel, world)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run itself gives them
        # Buffers that were computed already are real tensors.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu_kernels(task.for_gpu))
        engine.materialize()
        parts = _measure(engine, names, replace(task, parallel=parallel), report)
    return parts, tuple(notes)


def _as_simulated(
    parallel: ParallelConfig, world_size: int
) -> tuple[ParallelConfig, int, list[str]]:
    """The engine that stands for the configured one, its number of ranks, and what that leaves out.

    Only FSDP2 can be tracked. FSDP1 shards the same weights by the same units; where every rank
    holds everything, one rank alone is simulated. FSDP1 on one rank computes under autocast, as DDP
    does; on several without shards it casts the weights themselves.
    """
    notes = []
    if parallel.compile:
        notes.append("compiled blocks are simulated as they are before compilation")
        parallel = replace(parallel, compile=False)
    if parallel.engine == "fsdp2":
        return parallel, world_size, notes
    if parallel.engine == "ddp" or (world_size == 1 and not parallel.cpu_offload):
        if parallel.engine == "fsdp1":
            notes.append("fsdp1 on one rank is simulated as ddp")
        return replace(parallel, engine="ddp", sharding=None, cpu_offload=False), 1, notes
    if parallel.sharding == "no_shard":
        notes.append("fsdp1 without shards is simulated as fsdp2 on one rank")
        whole = replace(parallel, engine="fsdp2", sharding=None, reshard_after_forward=False)
        return whole, 1, notes
    notes.append("fsdp1 is simulated as fsdp2 with the same sharding")
    return replace(parallel, engine="fsdp2"), world_size, notes


def _measure(engine: Engine, blocks: list[str], task: Task, report: Report) -> MemoryParts:
    # Gradients pile up over micro-batches; the third adds nothing to the second.
    repeats = min(task.micro_batches, 2)
    model = engine.model.train()
    tracker: Any
    if isinstance(model, FSDPModule):
        tracker = ShardedTracker(model, task.parallel.cpu_offload)
    else:
        tracker = WholeTracker(model)
    _follow(model, blocks, tracker, _Progress(report, repeats))
    with tracker:
        for index in range(repeats):
            tracker.begin_forward()
            with engine.micro_batch(is_last=index == repeats - 1):
                loss = task.step(model)
                tracker.begin_loss()  # of a model that does not say where its loss begins
                engine.backward(loss)
                del loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return tracker.parts(local_state_bytes(trained, task.optimizer))


class _Progress:
    """Counts the forward and backward passes of units."""

    def __init__(self, report: Report, repeats: int) -> None:
        self._report, self._repeats = report, repeats
        self.num_units = self._done = 0

    def advance(self, *_: Any) -> None:
        self._done += 1
        total = 2 * self._repeats * self.num_units
        self._report(min(self._done, total), total)


def _follow(model: Any, blocks: list[str], tracker: Any, progress: _Progress) -> None:
    """Tell the tracker and the progress where the passes are, by hooks."""
    units: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for unit in units or [model.get_submodule(name) for name in blocks]:
        progress.num_units += 1
        unit.register_forward_hook(lambda m, i, output: _on_gradient(output, progress.advance))
        unit.register_forward_hook(progress.advance)
        if units:  # before FSDP's own hook, which frees the gathered weights
            unit.register_forward_hook(lambda m, i, o: tracker.watch_gradients(m))

    def begin(states: Any) -> None:
        _on_gradient(states, lambda gradient: tracker.end_loss())
        tracker.begin_loss()

    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # A T5's loss uses the head's weight without calling it.
        model.get_decoder().register_forward_hook(lambda m, i, output: begin(output))
    elif head is not None:
        head.register_forward_pre_hook(lambda m, inputs: begin(inputs))
    elif blocks:
        last = model.get_submodule(blocks[-1])
        last.register_forward_hook(lambda m, i, output: begin(output))


def _on_gradient(output: Any, act: Callable[[torch.Tensor], None]) -> None:
    """Call `act` when the backward pass has the gradient of the first tensor in `output`."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    if isinstance(first, torch.Tensor) and first.requires_grad:
        first.register_hook(lambda gradient: act(gradient))
