"""One interface for all ways to spread the model, and the recipe that applies them in order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import StateDict, restore_buffers
from t5_fsdp.parallel import activation_checkpointing, compilation
from t5_fsdp.parallel.ddp import DDPEngine
from t5_fsdp.parallel.fsdp1 import FSDP1Engine
from t5_fsdp.parallel.fsdp2 import FSDP2Engine
from t5_fsdp.parallel.mesh import mesh_problems


class Engine(Protocol):
    """A model spread over ranks, and what a training loop needs of it.

    Attributes:
        model: call it for the forward pass; its parameters go to the optimizer. It is whole once
            `load_full` or `materialize` was called, and may be another object from then on.
    """

    model: nn.Module

    def load_full(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give every rank its shard of rank 0's full weights (the others pass {}).

        One tensor after the other is taken from `weights`, by its name as of `unique_state_dict`:
        no rank needs the whole model in memory for it.

        Raises:
            UserError: on rank 0, the weights are not the model's; PeerFailed on the others.
            whatever `weights` raises, on rank 0; PeerFailed on the others.
        """

    def materialize(self) -> None:
        """Allocate the shards without values: a checkpoint is loaded into them next."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Round a micro-batch: gradients need to be reduced after the last one only."""

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss`, this rank's part of the global one: summed over ranks in the end."""

    def after_evaluation(self) -> None:
        """Free what forward passes without a backward have gathered.

        An engine may keep the root's parameters gathered for a backward pass that never comes;
        after an optimizer step the next forward would compute with the old ones.
        """

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to at most `max_norm` (null: don't); the global norm before, a scalar.

        The same on every rank; not finite when any rank's gradient is not.
        """

    def sharded_generation(self) -> AbstractContextManager[Any]:
        """A model whose `generate` all ranks call together, while the weights stay sharded.

        Every rank has to call it as often as the others, with `synced_gpus`.
        """

    def gather_bytes(self, dtype: torch.dtype) -> int:
        """What `gather_full` takes on this device at its peak, in bytes a parameter."""

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        """The whole model's weights on every rank, floating ones in `dtype`; a collective.

        Buffers (a running mean) are rank 0's.
        """


def parallelize(model: nn.Module, options: ParallelConfig, world: World) -> Engine:
    """Activation checkpointing -> compile -> shard. Make the optimizer from the loaded model.

    The order matters: recomputation must lie inside a sharding unit, so that the unit's weights
    are gathered once for recomputation and backward together.

    Args:
        model: any module, on the meta device or on the CPU; the engine's `load_full` or
            `materialize` comes next. One on the CPU keeps its buffers; its parameters get the
            values that are loaded: take them with `unique_state_dict` before.
        options: which engine, and how.
        world: its process group is up.

    Raises:
        UserError: the number of ranks does not suit the sharding, or the model names no blocks to
            recompute.
        ValueError: a buffer has no value that could be found out, see `restore_buffers`.
    """
    problems = mesh_problems(options, world)
    if problem := compilation.compilation_problem(options, world.device):
        problems.append(problem)
    if problems:
        raise UserError(*problems)
    restore_buffers(model)
    activation_checkpointing.apply(model, options)
    compilation.apply(model, options)
    if options.engine == "ddp":
        return DDPEngine(model, options, world)
    if options.engine == "fsdp1":
        return FSDP1Engine(model, options, world)
    return FSDP2Engine(model, options, world)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that was made before the model was sharded: it would update nothing.

    Raises:
        ValueError: a parameter of one is not a parameter of the other.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if held != trained:
        raise ValueError(
            "the optimizer does not hold the sharded model's parameters; make it after parallelize"
        )
