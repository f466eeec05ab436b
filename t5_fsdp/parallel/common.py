"""What the engines share: dtypes, clean parameter names, a whole model filled on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from t5_fsdp.distributed import World
from t5_fsdp.model.build import StateDict, check_names, retie

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# What wrappers put into the names of parameters: activation checkpointing and FSDP1.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # DDP's; a model may have a part of that name inside


def fill_whole(model: nn.Module, weights: StateDict | None, world: World) -> None:
    """Allocate a meta model on the CPU of every rank and give all of them rank 0's weights.

    Args:
        model: built on the meta device; changed in place, its tied weights stay tied.
        weights: the full weights on rank 0, {} elsewhere; None: leave them without values.
        world: whose ranks take part.
    """
    model.to_empty(device="cpu")
    retie(model)  # type: ignore[arg-type]
    if weights is None:
        return
    parameters = {clean_name(name): value for name, value in model.named_parameters()}
    if world.is_main:
        check_names(set(weights), set(parameters))
    with torch.no_grad():
        for name, parameter in parameters.items():
            if world.is_main:
                parameter.copy_(weights[name])
            if world.world_size > 1:
                dist.broadcast(parameter.data, src=0)
