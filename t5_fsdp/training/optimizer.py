"""The optimizer and the learning rate, both pure functions of the options and the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from t5_fsdp.config import OptimizerConfig, ScheduleConfig


def make_optimizer(model: nn.Module, options: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW over the sharded parameters; its moments are float32 as they are.

    Norms, biases and the relative position bias are not decayed: pulling a scale or an offset
    towards 0 regularizes nothing. Frozen parameters are in no group.

    Args:
        model: sharded, with its weights in place.
        options: rate and decay.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # By name: FSDP1 hands out flat pieces, whose shape tells nothing.
        is_matrix = "norm" not in name and "bias" not in name
        (decayed if is_matrix else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, fused=True)


def learning_rate(step: int, total_steps: int, peak: float, options: ScheduleConfig) -> float:
    """The rate that step `step` (the first is 1) is made with.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`. linear and cosine then fall
    and would be 0 at step total_steps + 1, so that the last step still learns; inverse_sqrt is
    peak * sqrt(w / step) with w = max(warmup_steps, 1) (Noam's rule as in T5X).
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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
