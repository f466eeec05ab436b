"""Dynamic loss scaling, which keeps small gradients of a backward pass in fp16."""

from __future__ import annotations

from typing import Any

import torch

from t5_fsdp.config import ParallelConfig
from t5_fsdp.parallel.common import local_part

# As in torch.amp.GradScaler.
_FACTOR = 2.0
_STEPS_TO_GROW = 2000
# Below 1 scaling would only make small gradients vanish; what overflows there overflows anyway.
_SMALLEST = 1.0
_LARGEST = 2.0**24  # to grow to; a run of zero gradients would go on for ever


class LossScale:
    """The factor on the loss of a backward pass, which its gradients carry until `unscale`.

    fp16 holds nothing below 6e-8 and nothing above 65,504. The factor is halved when a gradient
    overflows, and doubled after 2,000 steps without (Micikevicius et al. 2018). Without fp16 it
    is 1 and stays so.

    torch.amp.GradScaler would look for infinities in each gradient and need FSDP's own variant to
    agree over ranks; the trainer has the global norm, which is the same on all ranks and finite
    only if every gradient is.

    Args:
        initial: the first factor; None: no scaling.
        saved: what `to_json` gave at a checkpoint, or {}.
    """

    def __init__(self, initial: float | None, saved: dict[str, Any]) -> None:
        self.is_dynamic = initial is not None
        self.factor = 1.0
        self._good_steps = 0
        if initial is not None:
            self.factor = float(saved.get("factor", initial))
            self._good_steps = int(saved.get("good_steps", 0))

    def update(self, is_finite: bool) -> None:
        """After a step: whether its loss and gradients were finite."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.factor = min(self.factor, max(_SMALLEST, self.factor / _FACTOR))
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == _STEPS_TO_GROW:
            self.factor = max(self.factor, min(_LARGEST, self.factor * _FACTOR))
            self._good_steps = 0

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the factor; exact, since it is a power of two."""
        if self.factor == 1.0:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local_part(parameter.grad).div_(self.factor)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint; {} where nothing is scaled."""
        if not self.is_dynamic:
            return {}
        return {"factor": self.factor, "good_steps": self._good_steps}


def initial_loss_scale(options: ParallelConfig) -> float | None:
    """The first factor of a run, or None where nothing is computed or summed in fp16."""
    return options.initial_loss_scale if options.uses_fp16 else None
