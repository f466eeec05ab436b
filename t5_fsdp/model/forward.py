"""The model's forward with the loss inside.

The loss needs the head's weight, which a sharded model has whole only while its own forward runs.
So the loss is computed in there: `attach_loss` gives a model a forward that, called with targets,
returns sums of the loss instead of logits, and otherwise does what it did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from t5_fsdp.model.loss import LossOptions, target_loss


def attach_loss(model: nn.Module, options: LossOptions) -> None:
    """Let `model(**inputs, target_rows=..., target_ids=...)` return the loss, see `forward`.

    Args:
        model: an encoder-decoder of transformers, not yet sharded; changed in place.
        options: smoothing, z-loss and the size of a chunk.
    """
    without_loss = model.forward

    def forward(
        *args: Any,
        target_rows: torch.Tensor | None = None,
        target_ids: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """(objective, cross-entropy), summed, of the targets; without them: as transformers'.

        Args:
            target_rows: int64 [targets], where the real targets stand in [batch x target].
            target_ids: int64 [targets].
            inputs: as of `MicroBatch.inputs`.
        """
        if target_rows is None or target_ids is None:
            return without_loss(*args, **inputs)
        states = head_inputs(model, **inputs).flatten(0, 1).index_select(0, target_rows)
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        bias = getattr(model, "final_logits_bias", None)  # BART's
        return target_loss(
            states, head.weight, target_ids, options, None if bias is None else bias.flatten()
        )

    model.forward = forward  # type: ignore[method-assign]


def head_inputs(
    model: Any,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    decoder_input_ids: torch.Tensor,
    use_cache: bool = False,
) -> torch.Tensor:
    """What the output head is applied to: [batch, target, d_model].

    As the model's own forward does it up to the head; a T5 with a tied head scales here.
    """
    encoded = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
    decoded = model.get_decoder()(
        input_ids=decoder_input_ids,
        encoder_hidden_states=encoded[0],
        encoder_attention_mask=attention_mask,
        use_cache=use_cache,
    )
    states = decoded[0]
    if getattr(model.config, "scale_decoder_outputs", False):
        states = states * model.config.d_model**-0.5
    return states
