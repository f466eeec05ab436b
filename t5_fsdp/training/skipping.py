"""Steps that change nothing, which is decided on the device: the host needs not wait to know it.

A scalar tensor says whether a step is skipped, 1 or 0. torch's fused AdamW reads one from the
attribute `found_inf` that torch.amp.GradScaler gives it; the optimizers here do alike.
"""

from __future__ import annotations

import torch


def count_step(count: torch.Tensor, is_skipped: torch.Tensor | None) -> None:
    """Add 1 to an optimizer's count of steps, unless the step is skipped.

    Args:
        is_skipped: 1 or 0; None: it is not.
    """
    count += 1
    if is_skipped is not None:
        count -= is_skipped


def assign(target: torch.Tensor, value: torch.Tensor, is_skipped: torch.Tensor | None) -> None:
    """Give `target` its new value, unless the step is skipped; what `value` is then doesn't count.

    Args:
        value: of the same shape and dtype.
        is_skipped: 1 or 0; None: it is not.
    """
    if is_skipped is None:
        target.copy_(value)
    else:
        torch.where(is_skipped > 0, target, value, out=target)
