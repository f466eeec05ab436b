"""The one loss: cross-entropy summed over real target tokens, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from t5_fsdp.data.batching import IGNORED_LABEL


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood in nats, summed over the labels that are not padding.

    The caller divides by the number of real targets of the whole global batch, so that neither
    micro-batches nor ranks change the loss; a mean in here would be a mean of means. The softmax
    is taken in float32, because bf16 resolves a loss near 5 in steps of 0.03 only.

    Args:
        logits: [batch, target, vocab], any float type.
        labels: int64 [batch, target], -100 at padding.

    Returns:
        float32 scalar; exactly 0, with gradient, when no label is real.
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
