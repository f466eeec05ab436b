"""T5's attention with the position bias and the padding mask of a stack added once.

transformers adds the two in every layer, into a new [batch, heads, query, key] tensor each time,
and adds a bias of zeros in cross-attention. Here the first layer of a stack, which owns the bias,
adds the mask to it and hands the sum on as "the bias"; cross-attention gets the mask alone. The
numbers are those of transformers' eager attention, see tests/model/test_attention.py.

This rests on transformers' public registries of attention and mask functions, and on three names
inside its T5 classes (`compute_bias`, `has_relative_attention_bias`, and the arguments `mask` and
`position_bias`), which `install` checks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from t5_fsdp.model.autocast import compute_dtype

# The sum is handed from layer to layer (T5, mT5), or each layer has a bias of its own (umT5).
_SHARED, _OWN = "t5_shared_bias_sdpa", "t5_own_bias_sdpa"
# What CUDA's memory-efficient attention asks of a bias's rows; it would copy the tensor in every
# layer otherwise.
_ALIGNMENT = 16


def implementation(model_type: str, attention: str) -> str:
    """transformers' name for the option `model.attention` in a model of this type.

    Other models than T5's have no position bias: theirs is transformers' `sdpa`.
    """
    if attention == "sdpa_per_layer":
        return "sdpa"
    if attention == "sdpa" and model_type in ("t5", "mt5"):
        return _SHARED
    if attention == "sdpa" and model_type == "umt5":
        return _OWN
    return attention


def shares_source(model: Any) -> bool:
    """Whether its cross-attention can do with a row of keys an example for all of its beams."""
    return model.config._attn_implementation in (_SHARED, _OWN)


def describe(model: Any) -> str:
    """The attention that a model uses, for the log."""
    name = str(model.config._attn_implementation)
    return {_SHARED: "sdpa", _OWN: "sdpa_per_layer"}.get(name, f"{name} (of transformers)")


def register() -> None:
    """Make the attention known to transformers; call it before a model is built with it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, choose_bias in ((_SHARED, _shared_bias), (_OWN, _own_bias)):
        AttentionInterface.register(name, functools.partial(_attend, choose_bias))
        # Without a mask function of that name transformers would leave the masks out.
        AttentionMaskInterface.register(name, _mask)


def install(model: nn.Module) -> None:
    """Have the first layer of each stack hand on the sum; for a model built with our attention.

    Raises:
        RuntimeError: the installed transformers' T5 has other names inside.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != _SHARED:
        return
    for module in model.modules():
        if hasattr(module, "compute_bias"):
            names = inspect.signature(module.forward).parameters
            if not {"mask", "position_bias"} <= set(names):
                raise RuntimeError(
                    f"{type(module).__name__} of this transformers release has another forward; "
                    "set model.attention: sdpa_per_layer"
                )
            module.register_forward_pre_hook(_complete_bias, with_kwargs=True)


def _complete_bias(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """In the first layer of a stack: the bias of all its layers, mask included.

    A function of its inputs alone, so that a recomputation and a compiler see the same.
    """
    mask = kwargs.get("mask")
    if kwargs.get("position_bias") is not None or mask is None:
        return None
    states = args[0] if args else kwargs["hidden_states"]
    dtype = compute_dtype(states)
    if module.has_relative_attention_bias:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else cache.get_seq_length(module.layer_idx)
        bias = _biased_mask(module, mask, states.shape[1], past, dtype)
    else:
        bias = _additive(mask, dtype)
    return args, {**kwargs, "position_bias": bias}


def _biased_mask(
    attention: Any, mask: torch.Tensor, queries: int, past: Any, dtype: torch.dtype
) -> torch.Tensor:
    """[batch, heads, query, key]: the position bias where a query may look, else the least value.

    Args:
        mask: bool [batch, 1, query, key].
        past: tokens decoded before.
    """
    # A copy, as in transformers: a cache may change the length in place.
    past = past.clone() if isinstance(past, torch.Tensor) else past
    bias = attention.compute_bias(
        queries, mask.shape[-1], device=mask.device, past_seen_tokens=past
    )
    return _sum(bias.to(dtype), mask)


def _sum(bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, heads, query, key] of a bias [1, heads, query, key], laid out as CUDA likes it."""
    # transformers' bias has its heads innermost, which `where` would keep.
    rows = _pad_rows(bias.contiguous())
    total = torch.where(_pad_rows(mask), rows, torch.finfo(bias.dtype).min)
    return total[..., : mask.shape[-1]]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `mask` is true, else the dtype's least value; [batch, 1, query, key]."""
    padded = _pad_rows(mask)
    zeros = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(padded, zeros, torch.finfo(dtype).min)[..., : mask.shape[-1]]


def _pad_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    return F.pad(tensor, (0, -tensor.shape[-1] % _ALIGNMENT))


def _mask(**kwargs: Any) -> torch.Tensor | None:
    """bool [batch, 1, query, key], always: to leave it out, transformers asks the device."""
    from transformers.masking_utils import sdpa_mask

    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(**kwargs)


def _shared_bias(module: nn.Module, mask: Any, position_bias: Any) -> torch.Tensor | None:
    """The first layer's sum, which every layer of the stack is handed."""
    return position_bias


def _own_bias(module: Any, mask: Any, position_bias: Any) -> torch.Tensor:
    """The sum of a layer whose bias nobody else uses; of cross-attention the mask."""
    assert mask is not None  # `_mask` always makes one
    if not module.has_relative_attention_bias:
        return mask
    assert position_bias is not None
    return _sum(position_bias, mask)


def _attend(
    choose_bias: Callable[[Any, Any, Any], torch.Tensor | None],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function behind its first argument.

    Args:
        choose_bias: (module, mask, position bias) -> what is added to the scores.
        query, key, value: [batch, heads, tokens, d_kv]; in decoding key and value may have a row an
            example where the query has one a beam, see `cross_attention_cache.py`.

    Returns:
        [batch, query, heads, d_kv], and no weights.
    """
    bias = choose_bias(module, attention_mask, position_bias)
    rows, heads, _, d_kv = query.shape
    beams = rows // key.shape[0]
    if beams > 1:
        # A beam's only query becomes one of several of its example.
        query = query.view(-1, beams, heads, d_kv).transpose(1, 2)
        bias = None if bias is None else bias[::beams]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    output = output.transpose(1, 2).contiguous()
    return output.view(rows, 1, heads, d_kv) if beams > 1 else output, None
