"""What a run says of itself before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from t5_fsdp.cli.process import Session
from t5_fsdp.config import Config
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.cli.starting_point import StartingPoint
    from t5_fsdp.distributed import World


def describe_size(start: StartingPoint) -> str:
    """Training examples and steps an epoch, in words."""
    examples, steps = start.batches.num_examples, start.batches.steps_per_epoch
    if examples is None or steps is None:
        return "a stream of training examples, steps"
    return f"{counted(examples, 'training example')}, {counted(steps, 'step')} an epoch"


def describe_parameters(model: Any, start: StartingPoint) -> str:
    """How many parameters a model has, and how many of them train, in words."""
    from t5_fsdp.model.build import num_parameters

    count, trained = num_parameters(model), num_parameters(model, trained=True)
    if start.spec.adapter is None:
        return f"{count:,} parameters"
    return f"{count:,} parameters, of which an adapter's {trained:,} train ({trained / count:.2%})"


def say_units(model: Any, config: Config, session: Session, world: World) -> None:
    """With `parallel.explain`: which modules become units of their own, with their sizes."""
    if config.parallel.explain:
        from t5_fsdp.parallel.mesh import num_shards
        from t5_fsdp.parallel.wrapping import describe_units, find_trained_parts

        session.console.say(
            describe_units(model, config.parallel, num_shards(config.parallel, world))
        )
        parts = find_trained_parts(model, config.parallel)
        if parts and config.parallel.engine == "fsdp1":
            session.console.say(
                f"each of the {len(parts)} modules in them that train beside frozen ones is one too"
            )


def device_name(world: World) -> str:
    """As torch names this rank's device."""
    if world.device.type != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(world.device)
