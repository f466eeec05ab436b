"""What engines share: dtypes, clean names, and what FSDP1 and DDP do alike."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from t5_fsdp.config import ParallelConfig
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


class WholeModelEngine:
    """What FSDP1 and DDP do alike, see `engine.Engine` for the methods.

    The whole model is filled in each rank's host memory before it is wrapped. Both average
    gradients over all ranks and have `no_sync` for accumulation.
    """

    def __init__(self, model: nn.Module, options: ParallelConfig, world: World) -> None:
        self.model = model
        self._options, self._world = options, world

    def load_full(self, weights: StateDict) -> None:
        _fill_whole(self.model, weights, self._world)
        self._wrap()

    def materialize(self) -> None:
        _fill_whole(self.model, None, self._world)
        self._wrap()

    def _wrap(self) -> None:
        """Replace `model` by its wrapped form."""
        raise NotImplementedError

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        alone = not hasattr(self.model, "no_sync")  # DDP's bare model on a single process
        if alone or is_last or self._options.sync_every_micro_batch:
            return contextlib.nullcontext()
        return self.model.no_sync()  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        # The average over ranks is undone: the loss is divided by the tokens of all ranks already.
        (loss * self._world.world_size).backward()


def _fill_whole(model: nn.Module, weights: StateDict | None, world: World) -> None:
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
