"""Recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The one place for this module: torch documents these functions (FSDP tutorial, torchtitan) but
# keeps them below a private name.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from t5_fsdp.config import ParallelConfig
from t5_fsdp.parallel.wrapping import select_units

# Dear to compute and small to keep: matrix products and attention.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply(model: nn.Module, options: ParallelConfig, policy: Callable[..., bool]) -> None:
    """Wrap the blocks that the options choose so that they are recomputed.

    full: a block keeps only its input; selective: also its matrix products and attention outputs.
    The random state is put back for the recomputation: with other dropout masks there the
    gradients would be silently wrong. The model must be called with `use_cache=False`.

    Args:
        model: not yet sharded.
        options: activation_checkpointing, its stack and its every_blocks.
        policy: what a block is, see `wrapping.wrap_policy`.
    """
    if options.activation_checkpointing == "none":
        return
    chosen = _choose(model, options, policy)
    arguments: dict[str, Any] = {}
    if options.activation_checkpointing == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(
            checkpoint_wrapper,
            checkpoint_impl=CheckpointImpl.NO_REENTRANT,
            preserve_rng_state=True,
            **arguments,
        ),
        check_fn=lambda module: id(module) in chosen,
    )


def _choose(model: nn.Module, options: ParallelConfig, policy: Callable[..., bool]) -> set[int]:
    chosen: set[int] = set()
    for stack in ("encoder", "decoder"):
        if options.activation_checkpointing_stack in ("both", stack):
            units = [
                unit
                for name, unit in select_units(model, policy)
                if name.startswith(f"{stack}.") or f".{stack}." in name
            ]
            chosen |= {id(unit) for unit in units[:: options.activation_checkpointing_every]}
    return chosen


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
