"""Which optimizer a run uses, over which parameters, and its learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from t5_fsdp.config import OptimizerConfig, ScheduleConfig
from t5_fsdp.parallel.common import local_part
from t5_fsdp.training.adafactor import Adafactor, is_factored
from t5_fsdp.training.adamw import LowPrecisionMomentsAdamW


def make_optimizer(
    model: nn.Module, options: OptimizerConfig, *, seed: int = 0, shard: int = 0
) -> torch.optim.Optimizer:
    """The optimizer over what the model trains: fused AdamW with float32 moments by default.

    Args:
        model: sharded, with its weights in place.
        options: which one, rate and decay.
        seed: of the rounding of bfloat16 moments.
        shard: which shard of the model this rank holds, see `mesh.shard_index`.
    """
    groups = parameter_groups(model, options.weight_decay)
    if options.name == "adafactor":
        return Adafactor(groups, lr=options.lr)
    if options.moments_dtype == "bf16":
        return LowPrecisionMomentsAdamW(groups, lr=options.lr, seed=seed, shard=shard)
    return torch.optim.AdamW(groups, lr=options.lr, fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: those that are decayed, and norms and biases, which are not.

    Pulling a scale or an offset towards 0 regularizes nothing; relative position biases are
    offsets too. Whether a parameter is one is read off the module it belongs to, since FSDP1 hands
    out flat pieces, whose shape tells nothing.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    seen: set[int] = set()  # a shared weight is met in several modules
    for module_name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()  # nn.LayerNorm, T5LayerNorm, ...
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_offset = name.endswith("bias") or module_name.endswith("bias")
            (others if is_norm or is_offset else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def state_bytes(options: OptimizerConfig) -> int:
    """Bytes of optimizer state for each trained parameter: its two moments, if it keeps them."""
    if options.name == "adafactor":
        return 0  # a row and a column for a matrix: next to nothing
    return 4 if options.moments_dtype == "bf16" else 8


def local_state_bytes(parameters: Iterable[torch.Tensor], options: OptimizerConfig) -> int:
    """Bytes of optimizer state on this rank, from what it holds of each trained parameter.

    Exactly what `step` will make of them, but for the count of steps: a number a parameter.
    """
    return sum(_state_bytes_of(parameter, options) for parameter in parameters)


def _state_bytes_of(parameter: torch.Tensor, options: OptimizerConfig) -> int:
    held = local_part(parameter)
    if options.name == "adamw":
        return held.numel() * state_bytes(options)
    if is_factored(parameter.shape):
        return 4 * sum(held.shape)  # of a matrix's columns each rank has all
    return 4 * held.numel()


def learning_rate(step: int, total_steps: int, peak: float, options: ScheduleConfig) -> float:
    """The rate that step `step` (the first is 1) is made with.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`. linear and cosine then fall
    and would be 0 at step total_steps + 1, so that the last step still learns; inverse_sqrt is
    peak * sqrt(w / step) with w = max(warmup_steps, 1): the rule of Vaswani et al. 2017, in T5X
    linear_warmup * rsqrt_normalized_decay. T5's own pre-training had no rise, but a constant 0.01
    for the first 10,000 steps.
    """
    warmup = options.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if options.name == "constant":
        return peak
    if options.name == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / step)
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    if options.name == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def take_step(
    optimizer: torch.optim.Optimizer, *, number: int, rate: float, is_skipped: torch.Tensor
) -> None:
    """Change the weights, or leave them and all moments as they are; nobody waits to know which.

    Args:
        optimizer: of `make_optimizer`.
        number: of the step.
        is_skipped: 1 where loss or gradients are not finite, else 0; a scalar on any device.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    if isinstance(optimizer, LowPrecisionMomentsAdamW):
        optimizer.number = number
    # With cpu_offload the parameters are on the host, where this has to be known: that waits.
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = is_skipped.to(device)  # type: ignore[attr-defined]
    optimizer.step()
