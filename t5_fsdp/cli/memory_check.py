"""What `train` asks the planner's closed forms before it loads weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from t5_fsdp.config import Config
from t5_fsdp.console import Console
from t5_fsdp.distributed import World
from t5_fsdp.quantities import memory_size

if TYPE_CHECKING:
    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.model.build import ModelSpec
    from t5_fsdp.planning.run import PlannedRun
    from t5_fsdp.training.out_of_memory import Estimate, Settings


def refuse_what_cannot_fit(
    config: Config,
    world: World,
    spec: ModelSpec,
    prepared: PreparedData,
    device_bytes: int | None = None,
) -> None:
    """Stop a run that would end in an out-of-memory error; a collective.

    Args:
        spec: the run's model.
        prepared: its data: the longest examples decide, not what the options would allow.
        device_bytes: memory of a device; None: that of this rank's GPU, on a CPU its part of the
            host's, and no run is refused where the system does not tell that.

    Raises:
        UserError: with what would fit, see `fit.refusal`.
    """
    from t5_fsdp.planning.fit import refusal

    if device_bytes is None:
        device_bytes = _gpu_bytes(world) or host_part_bytes(world)
    if device_bytes is None:
        return

    def check() -> None:
        error = refusal(planned_training(config, world, spec, prepared), device_bytes)
        if error is not None:
            raise error

    world.on_rank_zero(check)


def say_memory(
    config: Config, world: World, spec: ModelSpec, prepared: PreparedData, console: Console
) -> None:
    """The estimate in three lines, on rank 0."""
    from t5_fsdp.planning.memory import estimate_memory

    if not world.is_main:
        return
    run = planned_training(config, world, spec, prepared)
    parts = estimate_memory(run, run.micro_batch(*run.longest))
    device = _gpu_bytes(world)
    of = "" if device is None else f", of {memory_size(device)}"
    rest = "Python and PyTorch" if device is None else "CUDA and NCCL"
    console.say(
        f"memory of a rank, estimated: {memory_size(parts.peak)} of tensors at the peak{of}\n"
        f"  weights, gradients and optimizer state {memory_size(parts.state)}, activations "
        f"{memory_size(parts.activations)}\n"
        f"  {rest} come on top; scripts/plan.py says more"
    )


def step_estimate(
    config: Config, world: World, spec: ModelSpec, prepared: PreparedData
) -> Estimate:
    """What a step needs with other options, for the advice when memory runs out."""
    from t5_fsdp.planning.memory import estimate_memory

    @functools.cache
    def planned() -> PlannedRun:  # nobody asks in a run that goes well
        return planned_training(config, world, spec, prepared)

    def estimate(settings: Settings) -> int:
        run = dataclasses.replace(
            planned(),
            parallel=settings.parallel,
            optimizer=settings.optimizer,
            train=settings.train,
        )
        return estimate_memory(run, settings.forward).peak

    return estimate


def planned_training(
    config: Config, world: World, spec: ModelSpec, prepared: PreparedData
) -> PlannedRun:
    """The planner's view of a run whose data is prepared."""
    from t5_fsdp.cli.plan import plan_run

    run = plan_run(config, world, spec)
    split = prepared.split("train")
    if split is None or not len(split):  # streamed
        return run
    return run.with_longest(int(split.source_lengths.max()), int(split.target_lengths.max()))


def _gpu_bytes(world: World) -> int | None:
    import torch

    if world.device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(world.device).total_memory


def host_part_bytes(world: World) -> int | None:
    """A process's part of the memory of its host, or container; None where nothing tells that."""
    from t5_fsdp.cli.machine_checks.limits import host_memory_bytes

    try:
        return host_memory_bytes() // world.launch.local_world_size
    except (AttributeError, ValueError, OSError):
        return None
