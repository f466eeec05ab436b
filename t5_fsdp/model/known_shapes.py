"""Shapes of the published T5s, so that a plan needs no download.

From the configurations on the Hugging Face Hub, read for the families' papers and model cards: T5
(google-t5), T5 v1.1 and Flan-T5 (google), mT5, umT5 and ByT5. Only what decides about sizes is
kept; a run reads its model's own config.json.
"""

from __future__ import annotations

from typing import Any

# d_model, d_kv, d_ff, encoder layers, decoder layers, heads
_Row = tuple[int, int, int, int, int, int]

_T5: dict[str, _Row] = {
    "small": (512, 64, 2048, 6, 6, 8),
    "base": (768, 64, 3072, 12, 12, 12),
    "large": (1024, 64, 4096, 24, 24, 16),
    "3b": (1024, 128, 16384, 24, 24, 32),
    "11b": (1024, 128, 65536, 24, 24, 128),
}
_GATED: dict[str, _Row] = {  # T5 v1.1, Flan-T5, mT5 and umT5 alike
    "small": (512, 64, 1024, 8, 8, 6),
    "base": (768, 64, 2048, 12, 12, 12),
    "large": (1024, 64, 2816, 24, 24, 16),
    "xl": (2048, 64, 5120, 24, 24, 32),
    "xxl": (4096, 64, 10240, 24, 24, 64),
}
_BYT5: dict[str, _Row] = {
    "small": (1472, 64, 3584, 12, 4, 6),
    "base": (1536, 64, 3968, 18, 6, 12),
    "large": (1536, 64, 3840, 36, 12, 16),
    "xl": (2560, 64, 6720, 36, 12, 32),
    "xxl": (4672, 64, 12352, 36, 12, 64),
}
_UMT5 = {size: _GATED[size] for size in ("small", "base", "xl", "xxl")}

# Hub id up to the size, table, model type, vocabulary, whether gated with a head of its own.
_FAMILIES: tuple[tuple[str, dict[str, _Row], str, int, bool], ...] = (
    ("google-t5/t5-", _T5, "t5", 32128, False),
    ("google/t5-v1_1-", _GATED, "t5", 32128, True),
    ("google/flan-t5-", _GATED, "t5", 32128, True),
    ("google/mt5-", _GATED, "mt5", 250112, True),
    ("google/umt5-", _UMT5, "umt5", 256384, True),
    ("google/byt5-", _BYT5, "t5", 384, True),
)


def known_models() -> list[str]:
    """The Hub ids whose shapes are known."""
    return [prefix + size for prefix, table, *_ in _FAMILIES for size in table]


def known_config(name: str) -> dict[str, Any] | None:
    """T5 configuration values of a published model, `model_type` among them; None for others.

    `tie_word_embeddings` says whether the output head is the embedding.

    Args:
        name: Hub id; the short ids of the first T5s (t5-small) are known as well.
    """
    if "/" not in name:
        name = f"google-t5/{name}"
    for prefix, table, model_type, vocab_size, is_gated in _FAMILIES:
        size = name.removeprefix(prefix)
        if name.startswith(prefix) and size in table:
            d_model, d_kv, d_ff, encoder, decoder, heads = table[size]
            return {
                "model_type": model_type,
                "vocab_size": vocab_size,
                "d_model": d_model,
                "d_kv": d_kv,
                "d_ff": d_ff,
                "num_layers": encoder,
                "num_decoder_layers": decoder,
                "num_heads": heads,
                "feed_forward_proj": "gated-gelu" if is_gated else "relu",
                "tie_word_embeddings": not is_gated,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "decoder_start_token_id": 0,
            }
    return None
