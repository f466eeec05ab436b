"""Keys and values of the source once an example in beam search, not once a beam.

transformers' `generate` repeats each source for each of its beams, computes its keys and values
that often, and moves them at every step when beams change places. They are the same for all beams
of an example, so here they are computed once, and a step's beams look at them as so many queries of
one row. The numbers are those of `generate` without it, up to rounding.

Only for T5's family with our attention, whose function understands it; see `attention.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from t5_fsdp.model.attention import shares_source


class _SharedSourceCache(EncoderDecoderCache):
    """A cache whose cross-attention has a row an example, of which no beam is moved."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)


def source_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> dict[str, Any]:
    """What `generate` takes about the sources, in place of `input_ids`.

    Args:
        model: a whole one.
        input_ids: int64 [batch, source].
        attention_mask: int64 [batch, source], 1 at real tokens.
    """
    if not shares_source(model):
        return {"input_ids": input_ids, "attention_mask": attention_mask}
    encoded = model.get_encoder()(
        input_ids=input_ids, attention_mask=attention_mask, return_dict=True
    )
    # The layers of a cache made for a configuration are as many as the encoder's.
    keys = DynamicCache()
    states = encoded.last_hidden_state
    for index, block in enumerate(model.get_decoder().block):
        attention = block.layer[1].EncDecAttention
        shape = (*states.shape[:-1], -1, attention.key_value_proj_dim)
        keys.update(
            attention.k(states).view(shape).transpose(1, 2),
            attention.v(states).view(shape).transpose(1, 2),
            index,
        )
    # transformers has renamed the argument.
    forward = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in forward else "past_key_values"
    cache = _SharedSourceCache(DynamicCache(), keys)
    return {"encoder_outputs": encoded, "attention_mask": attention_mask, name: cache}
