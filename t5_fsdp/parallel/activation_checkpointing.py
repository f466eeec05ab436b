"""Recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
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
from t5_fsdp.errors import UserError
from t5_fsdp.parallel.wrapping import find_blocks

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


def apply(model: nn.Module, options: ParallelConfig) -> None:
    """Wrap the blocks that the options choose so that they are recomputed.

    full: a block keeps only its input; selective: also its matrix products and attention outputs.
    The random state is put back for the recomputation: with other dropout masks there the
    gradients would be silently wrong. The model must be called with `use_cache=False`.

    Args:
        model: not yet sharded.
        options: activation_checkpointing, activation_checkpointing_stack and _every.

    Raises:
        UserError: there is no such block.
    """
    if options.activation_checkpointing == "none":
        return
    chosen = {id(block) for block in _choose(model, options)}
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


def _choose(model: nn.Module, options: ParallelConfig) -> list[nn.Module]:
    wanted = options.activation_checkpointing_stack
    stacks: dict[str, list[nn.Module]] = {}
    for name, block in find_blocks(model):
        if wanted == "both" or wanted in name.split("."):
            stacks.setdefault(name.rpartition(".")[0], []).append(block)
    if not stacks:
        where = "" if wanted == "both" else f" in its {wanted}"
        raise UserError(
            f"{type(model).__name__} names no repeated blocks{where} (in _no_split_modules), so "
            "none can be recomputed; set parallel.activation_checkpointing: none"
        )
    every = options.activation_checkpointing_every
    return [block for blocks in stacks.values() for block in blocks[::every]]


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
