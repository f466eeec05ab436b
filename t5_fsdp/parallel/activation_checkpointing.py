"""Recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

# The one place for this module: torch documents these functions (FSDP tutorial, torchtitan) but
# keeps them below a private name.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


def apply_full(model: nn.Module, policy: Callable[..., bool]) -> None:
    """Wrap each unit that `policy` picks so that it keeps only its input.

    The random state is put back for the recomputation: with other dropout masks there the
    gradients would be silently wrong. The model must be called with `use_cache=False`.
    """
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(
            checkpoint_wrapper,
            checkpoint_impl=CheckpointImpl.NO_REENTRANT,
            preserve_rng_state=True,
        ),
        check_fn=lambda module: policy(module=module, recurse=False, nonwrapped_numel=0),
    )
