"""Operations that keep other tensors for the backward pass on a GPU than on a CPU.

Fake tensors live on the CPU of a machine without GPU, where attention with a bias that needs a
gradient is computed by plain matrix products, which keep the scores of every layer: [batch, heads,
query, key], the largest tensors of all. A GPU has a kernel that keeps the queries, keys and values,
the output and one number a query.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


@contextlib.contextmanager
def gpu_kernels(enabled: bool = True) -> Iterator[None]:
    """Attention and dropout as CUDA computes them: by the memory-efficient kernel, by byte masks.

    For a process of its own: torch's functions are replaced for all that run in it. Tensors must be
    fake ones, since a CPU has no such kernel. A mode of torch's own would not be heard in the
    recomputation, which runs inside `backward`.
    """
    if not enabled:
        yield
        return
    saved = F.scaled_dot_product_attention, F.dropout
    F.scaled_dot_product_attention, F.dropout = _attend, _drop  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = saved  # type: ignore[assignment]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # As torch's own function prepares the arguments of the kernel. Without a mask CUDA has a
    # kernel that keeps the same tensors.
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    output, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return output


def _drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input
