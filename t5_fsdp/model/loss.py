"""The one loss: cross-entropy summed over real target tokens, in float32, by chunks of rows.

Logits are the largest tensor of a T5: of a batch of 8 x 150 targets and mT5's 250,112 pieces,
1.2 GB in float32, and its gradient as much again. Here the head sees the rows of real targets only,
some of them at a time, and their gradients are made at once, so that no logits are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from t5_fsdp.config import TrainConfig
from t5_fsdp.model.autocast import compute_dtype

# 256 MiB of float32 logits at a time, where the options do not say.
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class LossOptions:
    """What is added to the cross-entropy, and how much of it is computed at a time.

    Attributes:
        label_smoothing: share of a target's weight that is spread evenly over the vocabulary.
        z_loss: weight of the squared logarithm of the softmax's denominator (PaLM, T5X).
        chunk_rows: target tokens that pass the head together; None: 256 MiB of logits.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_rows: int | None = None

    @classmethod
    def of(cls, train: TrainConfig) -> LossOptions:
        """As the options of a run say."""
        return cls(train.label_smoothing, train.z_loss, train.loss_chunk_rows)

    def rows_at_a_time(self, vocab: int) -> int:
        """Target tokens in a chunk for a vocabulary of this size."""
        return self.chunk_rows or max(1, _CHUNK_ELEMENTS // vocab)


def target_loss(
    states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the targets, in nats, float32 scalars: what is minimized, and its cross-entropy.

    The caller divides by the number of real targets of the whole global batch, so that neither
    micro-batches nor ranks change the loss; a mean in here would be a mean of means. The softmax
    is taken in float32, because bf16 resolves a loss near 5 in steps of 0.03 only. With
    l = the logits of a row, y its target, e the smoothing and Z = logsumexp(l), the row's part is
    (1 - e) (Z - l[y]) + e (Z - mean(l)) + z_loss Z^2.

    Args:
        states: [targets, d_model], as the head takes them; any float type.
        weight: [vocab, d_model] of the head.
        targets: int64 [targets]; none is padding.
        bias: [vocab] that is added to the logits; gets no gradient.

    Returns:
        (objective, with gradients for `states` and `weight`; cross-entropy, without). Both are
        exactly 0, with gradients of 0, when there are no targets.
    """
    # Inside the function gradients are off, whether anybody wants them or not.
    wants_gradients = torch.is_grad_enabled()
    return _TargetLoss.apply(states, weight, targets, options, bias, wants_gradients)


class _TargetLoss(torch.autograd.Function):
    """The gradients are linear in that of the sum, so the forward pass makes them already."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        options: LossOptions,
        bias: torch.Tensor | None,
        wants_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = compute_dtype(states)
        head = weight.detach().to(dtype)
        wants_states, wants_weight = (wants_gradients and w for w in ctx.needs_input_grad[:2])
        sums = torch.zeros(2, dtype=torch.float32, device=states.device)
        states_gradient = torch.zeros_like(states) if wants_states else None
        weight_gradient: torch.Tensor | None = None
        size = options.rows_at_a_time(weight.shape[0])
        with torch.autocast(states.device.type, enabled=False):  # all casts here are spelt out
            for start in range(0, len(targets), size):
                rows = slice(start, start + size)
                part = states[rows].detach().to(dtype)
                logits = F.linear(part, head).float()
                if bias is not None:
                    logits += bias.detach()
                chunk_sums, gradient = _chunk(
                    logits, targets[rows], options, wants_states or wants_weight
                )
                sums += chunk_sums
                if gradient is None:
                    continue
                gradient = gradient.to(dtype)
                if states_gradient is not None:
                    states_gradient[rows] = gradient @ head
                if wants_weight:
                    weight_gradient = _add(weight_gradient, gradient.T @ part)
        if wants_weight:
            found = torch.zeros_like(weight) if weight_gradient is None else weight_gradient
            weight_gradient = found.to(weight.dtype)
        ctx.save_for_backward(states_gradient, weight_gradient)
        objective, cross_entropy = sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        # In float32: the factor rounded to bf16 would be off by up to 0.2 % for all of them.
        made = tuple(
            None if saved is None else (saved.float() * gradients[0]).to(saved.dtype)
            for saved in ctx.saved_tensors
        )
        return *made, None, None, None, None


def _add(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    # Float32 from the second on: a sum of many in bf16 would lose the late ones.
    return part if total is None else total.float().add_(part)


def _chunk(
    logits: torch.Tensor, targets: torch.Tensor, options: LossOptions, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums of a chunk [objective, cross-entropy], and the gradient of the first by the logits.

    Args:
        logits: float32 [rows, vocab]; overwritten.
        targets: int64 [rows].
    """
    smoothing, z_loss = options.label_smoothing, options.z_loss
    log_z = logits.logsumexp(dim=-1, keepdim=True)
    picked = logits.gather(1, targets[:, None])
    cross_entropy = (log_z - picked).sum()
    objective = cross_entropy
    if smoothing:
        spread = (log_z - logits.mean(dim=-1, keepdim=True)).sum()
        objective = (1.0 - smoothing) * cross_entropy + smoothing * spread
    if z_loss:
        objective = objective + z_loss * log_z.square().sum()
    sums = torch.stack([objective, cross_entropy])
    if not with_gradient:
        return sums, None
    gradient = logits.sub_(log_z).exp_()
    if z_loss:
        gradient *= 1.0 + 2.0 * z_loss * log_z
    if smoothing:
        gradient -= smoothing / logits.shape[1]
    gradient.scatter_add_(1, targets[:, None], torch.full_like(picked, smoothing - 1.0))
    return sums, gradient
