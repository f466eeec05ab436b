"""Closed forms for memory."""

from __future__ import annotations

from t5_fsdp.model.flops import T5Shape


def decoding_bytes(
    shape: T5Shape,
    *,
    num_parameters: int,
    itemsize: int,
    batch_tokens: int,
    num_beams: int,
    max_source_tokens: int,
    max_new_tokens: int,
    batch_examples: int | None = None,
) -> int:
    """What a whole model needs on one device to decode a batch of its longest sources.

    Counted are the weights; keys and values of the source, for each beam (at most), and of the
    summary, twice, since they grow by being copied; one layer of the encoder at work; and logits
    with three float32 copies.

    It is no bound: a batch of sources a tenth as long has ten times the rows, and caches and logits
    of as many more summaries, unless `batch_examples` limits them. A whole model halves a batch
    that does not fit.

    Args:
        num_parameters: of the model.
        itemsize: bytes of a number.
        batch_tokens, num_beams, max_new_tokens, batch_examples: of the evaluation options.
        max_source_tokens: longest source.
    """
    rows = max(1, batch_tokens // (max_source_tokens * num_beams))
    rows = rows if batch_examples is None else min(rows, batch_examples)
    hypotheses = rows * num_beams
    a_token = 2 * shape.inner * shape.decoder_layers * itemsize  # key and value in each layer
    caches = hypotheses * (max_source_tokens + 2 * max_new_tokens) * a_token
    # Attention scores are not kept whole.
    widths = 4 * shape.d_model + 4 * shape.inner + 2 * shape.d_ff
    encoder = rows * max_source_tokens * widths * itemsize
    logits = hypotheses * shape.vocab * (itemsize + 3 * 4)
    return itemsize * num_parameters + caches + max(encoder, logits)


def loss_bytes(
    *, d_model: int, vocab: int, targets: int, itemsize: int, rows_at_a_time: int, frozen: bool
) -> int:
    """What `loss.target_loss` needs at most, by chunks of the head's logits.

    A chunk's logits stand in float32 twice, once inside logsumexp, and beside them those of the
    chunk before. The gradient of the head's weight is summed up in float32 beside its last part,
    and scaled in float32 in the backward pass.

    Args:
        d_model, vocab: of the head.
        targets: real target tokens of the micro-batch.
        itemsize: bytes of a number of the computation.
        rows_at_a_time: target tokens of a chunk, see `LossOptions`.
        frozen: the head gets no gradient.
    """
    rows = min(targets, rows_at_a_time)
    second = min(targets - rows, rows)  # the last chunk may be short
    weight = 0 if frozen else vocab * d_model
    first_chunk = 8 * rows * vocab + weight * itemsize
    later_chunk = (4 * rows + 8 * second) * vocab + weight * (4 + itemsize) if second else 0
    backward = weight * (itemsize + 8)
    return max(first_chunk, later_chunk, backward) + targets * d_model * itemsize
