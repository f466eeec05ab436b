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
    is 1 and stays so. It lies on the device, where it is found out whether a step overflowed: the
    host needs not wait for that.

    torch.amp.GradScaler would look for infinities in each gradient and need FSDP's own variant to
    agree over ranks; the trainer has the global norm, which is the same on all ranks and finite
    only if every gradient is.

    Args:
        initial: the first factor; None: no scaling.
        saved: what `to_json` gave at a checkpoint, or {}.
        device: of the losses.

    Attributes:
        factor: float32, a scalar.
    """

    def __init__(
        self,
        initial: float | None,
        saved: dict[str, Any],
        device: torch.device | str = "cpu",
    ) -> None:
        self.is_dynamic = initial is not None
        stored = saved if self.is_dynamic else {}
        first = 1.0 if initial is None else initial
        self.factor = torch.tensor(float(stored.get("factor", first)), device=device)
        self._good_steps = torch.tensor(int(stored.get("good_steps", 0)), device=device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What the backward pass is to begin with."""
        return loss * self.factor if self.is_dynamic else loss

    def update(self, is_skipped: torch.Tensor) -> None:
        """After a step.

        Args:
            is_skipped: 1 where its loss or gradients were not finite, else 0; a scalar.
        """
        if not self.is_dynamic:
            return
        factor, overflowed = self.factor, is_skipped > 0
        # Neither is to move a factor that was beyond its bound from the start.
        smaller = torch.minimum(factor, (factor / _FACTOR).clamp(min=_SMALLEST))
        larger = torch.maximum(factor, (factor * _FACTOR).clamp(max=_LARGEST))
        good = torch.where(overflowed, 0, self._good_steps + 1)
        grows = good == _STEPS_TO_GROW
        self.factor = torch.where(overflowed, smaller, torch.where(grows, larger, factor))
        self._good_steps = torch.where(grows, 0, good)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the factor; exact, since it is a power of two."""
        if not self.is_dynamic:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local_part(parameter.grad)
                    gradient.div_(self.factor.to(gradient.device))

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint; {} where nothing is scaled. Waits for the device."""
        if not self.is_dynamic:
            return {}
        return {"factor": float(self.factor), "good_steps": int(self._good_steps)}


def initial_loss_scale(options: ParallelConfig) -> float | None:
    """The first factor of a run, or None where nothing is computed or summed in fp16."""
    return options.initial_loss_scale if options.uses_fp16 else None
