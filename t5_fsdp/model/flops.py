"""Closed form for the arithmetic of an encoder-decoder: a T5, BART or Pegasus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from t5_fsdp.data.token_sums import TokenSums


@dataclass(frozen=True)
class T5Shape:
    """The dimensions that decide about the arithmetic of an encoder-decoder.

    Attributes:
        inner: width of all heads together, num_heads x d_kv.
        d_ff, decoder_d_ff: inner width of a feed-forward layer, in encoder and decoder.
        ff_matrices: matrices of a feed-forward layer: 2 for ReLU, 3 for a gated one.
        num_heads: of an attention layer.
        own_bias: each layer has a position bias of its own (umT5), not the first one's.
        frozen: an adapter trains instead, so that no weight here gets a gradient.
    """

    d_model: int
    inner: int
    d_ff: int
    decoder_d_ff: int
    ff_matrices: int
    vocab: int
    encoder_layers: int
    decoder_layers: int
    num_heads: int = 1
    own_bias: bool = False
    frozen: bool = False

    @classmethod
    def of(cls, config: Any, frozen: bool = False) -> T5Shape:
        """Read the dimensions off a transformers configuration of a T5, BART or Pegasus."""
        if hasattr(config, "encoder_ffn_dim"):
            return cls(
                d_model=config.d_model,
                inner=config.d_model,
                d_ff=config.encoder_ffn_dim,
                decoder_d_ff=config.decoder_ffn_dim,
                ff_matrices=2,
                vocab=config.vocab_size,
                encoder_layers=config.encoder_layers,
                decoder_layers=config.decoder_layers,
                num_heads=config.encoder_attention_heads,
                frozen=frozen,
            )
        return cls(
            d_model=config.d_model,
            inner=config.num_heads * config.d_kv,
            d_ff=config.d_ff,
            decoder_d_ff=config.d_ff,
            ff_matrices=3 if config.is_gated_act else 2,
            vocab=config.vocab_size,
            encoder_layers=config.num_layers,
            decoder_layers=config.num_decoder_layers,
            num_heads=config.num_heads,
            own_bias=config.model_type == "umt5",
            frozen=frozen,
        )


def training_flops(shape: T5Shape, source_tokens: int, target_tokens: int, rows: int = 1) -> float:
    """FLOPs of forward and backward of `rows` sequences that are all as long; see `batch_flops`.

    Args:
        source_tokens, target_tokens: of one sequence, S and T.
    """
    return batch_flops(shape, TokenSums.of_equal(source_tokens, target_tokens, rows))


def batch_flops(shape: T5Shape, tokens: TokenSums) -> float:
    """FLOPs of forward and backward of some sequences; recomputation is not counted.

    Each multiply-add counts 2. A matrix product with a weight costs 2 x tokens x weights; the two
    products of attention cost 4 x queries x keys x inner. The backward pass costs twice the
    forward; frozen weights save the half of theirs that would be their gradients (an adapter's own
    products, some percent, are not counted). "6 N tokens" would count encoder weights for target
    tokens and the reverse, about twofold too much.
    """
    source, target = tokens.source, tokens.target
    d, inner = shape.d_model, shape.inner
    feed_forward = shape.ff_matrices * d * shape.d_ff
    decoder_feed_forward = shape.ff_matrices * d * shape.decoder_d_ff
    encoder_weights = 2 * source * (4 * d * inner + feed_forward)
    # Cross-attention projects queries and outputs for T tokens, keys and values for S tokens.
    decoder_weights = 2 * target * (6 * d * inner + decoder_feed_forward) + 4 * source * d * inner
    encoder_attention = 4 * tokens.source_pairs * inner
    decoder_attention = 4 * (tokens.target_pairs + tokens.cross_pairs) * inner
    head = 2 * target * d * shape.vocab
    layers = shape.encoder_layers, shape.decoder_layers
    weights = layers[0] * encoder_weights + layers[1] * decoder_weights + head
    attention = layers[0] * encoder_attention + layers[1] * decoder_attention
    return (2.0 if shape.frozen else 3.0) * weights + 3.0 * attention
