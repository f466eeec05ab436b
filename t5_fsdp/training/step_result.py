"""What became of a step: on its way from the device, then its figures, and what is not finite."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from t5_fsdp.data.batching import StepBatch
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError

_MOST_SUSPECTS = 8  # of examples that a message names


class HostCopy:
    """A copy of a small tensor on the host, begun now and read later.

    Args:
        tensor: not to be changed any more.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._is_there: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def tolist(self) -> list[float]:
        """Its values; waits for what the device had to do before the copy, and for nothing else."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._copy.tolist()


@dataclass
class StepResult:
    """Figures of one step, the same on every rank.

    Attributes:
        loss_sum: nats over the step's target tokens.
        grad_norm: before clipping, without the loss scale.
        loss_scale: with which the step was made.
    """

    loss_sum: float
    grad_norm: float
    loss_scale: float

    @property
    def is_finite(self) -> bool:
        """Whether the weights were changed."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


@dataclass
class StepInFlight:
    """A step that the device was asked for, and that it may be at work on.

    Attributes:
        losses: of this rank's micro-batches, nats over their targets.
        figures: float64 [loss_sum, grad_norm, loss_scale] of a `StepResult`.
    """

    batch: StepBatch
    losses: list[torch.Tensor]
    figures: HostCopy

    def result(self) -> StepResult:
        """Waits until the device has the figures."""
        return StepResult(*self.figures.tolist())

    def suspects(self, result: StepResult, world: World) -> list[str]:
        """On rank 0: the examples of the micro-batches whose loss is not finite, else of all."""
        any_will_do = math.isfinite(result.loss_sum)
        mine = [
            name
            for names, loss in zip(self.batch.micro_batch_names(), self.losses, strict=True)
            if any_will_do or not math.isfinite(float(loss))
            for name in names
        ]
        return list(itertools.chain(*(world.gather_objects(mine) or [])))


def refusal(
    batch: StepBatch,
    result: StepResult,
    *,
    in_a_row: int,
    limit: int,
    suspects: list[str],
    last_good: Path | None,
    uses_fp16: bool,
) -> UserError:
    """Why a run stops at a step that is not finite, and what to do.

    Args:
        in_a_row: such steps, with this one.
        limit: of them that would have been skipped.
        suspects: names of examples that may be the cause.
        last_good: the newest checkpoint.
    """
    examples = ", ".join(suspects[:_MOST_SUSPECTS])
    if len(suspects) > _MOST_SUSPECTS:
        examples += f", and {len(suspects) - _MOST_SUSPECTS} more"
    streak = ""
    if in_a_row > 1:
        streak = f", {in_a_row} steps in a row (train.skip_nonfinite_steps allows {limit})"
    remedy = "lower optimizer.lr, look at these examples, or set train.skip_nonfinite_steps"
    if uses_fp16:
        remedy = (
            "lower parallel.initial_loss_scale, raise train.skip_nonfinite_steps, or set "
            f"parallel.param_dtype and reduce_dtype to bf16 or fp32; or {remedy}"
        )
    return UserError(
        f"step {batch.step}: loss {result.loss_sum / batch.target_tokens} and gradient norm "
        f"{result.grad_norm} are not both finite{streak}; the weights were left as they were. "
        f"Examples: {examples}. Last good checkpoint: {last_good or 'none yet'}; {remedy}"
    )
