"""Closed form of what a T5's forward pass keeps for the backward pass, in bytes on one device.

Every term is a tensor that autograd holds when the forward pass is done; tests/model/
test_activations.py counts them in real passes. Per layer, with n tokens, d = d_model, I = all heads
together, f = d_ff, b bytes a number of the computation:

* a norm keeps its input (the residual, b d), a float32 copy of it where b is 2, the normalized
  states (b d) and its output (b d), which the linear layers behind it read;
* attention keeps query, key, value and output (b I each) and what its kernel needs;
* a ReLU layer keeps its inner states (b f), a gated GELU seven of them, since transformers'
  gelu_new is made of single operations;
* each dropout keeps its mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from t5_fsdp.model.flops import T5Shape

AttentionKernel = Literal["efficient", "math", "flash_cpu", "eager"]

_GATED_STATES = 7  # x, x / 2, tanh, 1 + tanh, their product, the other factor, the layer's output
_RELU_STATES = 1


@dataclass(frozen=True)
class MicroBatchShape:
    """One forward pass of one device: `rows` sources and targets, padded to these widths."""

    rows: int
    source: int
    target: int

    @property
    def source_tokens(self) -> int:
        """Padded tokens of the sources."""
        return self.rows * self.source

    @property
    def target_tokens(self) -> int:
        """Padded tokens of the targets."""
        return self.rows * self.target


@dataclass(frozen=True)
class ActivationOptions:
    """What besides the shapes decides how much is kept.

    Attributes:
        itemsize: bytes of a number of the computation: 2 for bf16 and fp16, 4 for fp32.
        autocast: weights and residuals are float32, matrix products alone are computed in
            `itemsize` (DDP); then each linear layer keeps a copy of its input.
        on_gpu: GPUs have a fused attention with a bias, and dropout masks of a byte; on a CPU a
            bias that is trained, or dropout, takes the path that keeps the scores, in float32.
        attention: as of `model.attention`.
        dropout: whether there is any.
        checkpointing, stack, every: as of `parallel.activation_checkpointing` and its two others.
    """

    itemsize: int
    autocast: bool = False
    on_gpu: bool = True
    attention: Literal["sdpa", "sdpa_per_layer", "eager"] = "sdpa"
    dropout: bool = True
    checkpointing: Literal["none", "selective", "full"] = "none"
    stack: Literal["both", "encoder", "decoder"] = "both"
    every: int = 1

    @property
    def residual(self) -> int:
        """Bytes of a number of the residual stream."""
        return 4 if self.autocast else self.itemsize

    @property
    def mask(self) -> int:
        """Bytes of a number of a dropout mask on states of the computation; 0 without dropout."""
        return self._mask(self.itemsize)

    @property
    def residual_mask(self) -> int:
        """The same of the residual stream."""
        return self._mask(self.residual)

    def _mask(self, itemsize: int) -> int:
        return 0 if not self.dropout else 1 if self.on_gpu else itemsize

    def recomputed(self, stack: str, layers: int) -> int:
        """How many of a stack's layers are recomputed."""
        if self.checkpointing == "none" or self.stack not in ("both", stack):
            return 0
        return -(-layers // self.every)


def saved_activations(shape: T5Shape, batch: MicroBatchShape, options: ActivationOptions) -> int:
    """Bytes from forward to backward, without the loss (see `loss_bytes`) and without weights."""
    layers = _Layers(shape, batch, options)
    total = 0
    for stack, count in (("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)):
        recomputed = options.recomputed(stack, count)
        kept = layers.checkpointed(stack)
        total += recomputed * kept + (count - recomputed) * layers.whole(stack)
    return total + layers.ends() + layers.biases()


def decoder_activations(shape: T5Shape, batch: MicroBatchShape, options: ActivationOptions) -> int:
    """The part of `saved_activations` that the decoder's layers keep."""
    layers, count = _Layers(shape, batch, options), shape.decoder_layers
    recomputed = options.recomputed("decoder", count)
    return recomputed * layers.checkpointed("decoder") + (count - recomputed) * layers.whole(
        "decoder"
    )


def backward_bytes(
    shape: T5Shape, batch: MicroBatchShape, options: ActivationOptions, stack: str
) -> int:
    """What the backward pass of one layer needs besides what was kept, at most.

    What is recomputed first; then gradients of the inner states, or of query, key, value and scores
    when what the feed-forward layer kept is gone; of the residual with its float32 copies; and, of
    a position bias, what the layers behind have added up, less the kept tensors of one of them,
    which are gone by then: of very long sources the bias is more. An upper bound by some.
    """
    layers = _Layers(shape, batch, options)
    is_recomputed = options.recomputed(stack, 1) == 1
    anew = layers.whole(stack) - layers.checkpointed(stack) if is_recomputed else 0
    return anew + layers.gradients(stack, is_recomputed)


class _Layers:
    """The terms of a forward pass."""

    def __init__(self, shape: T5Shape, batch: MicroBatchShape, options: ActivationOptions) -> None:
        self._shape, self._batch, self._options = shape, batch, options

    def _tokens(self, stack: str) -> int:
        return self._batch.source_tokens if stack == "encoder" else self._batch.target_tokens

    def whole(self, stack: str) -> int:
        """All that a layer keeps which is not recomputed."""
        options, tokens = self._options, self._tokens(stack)
        length = self._batch.source if stack == "encoder" else self._batch.target
        total = self._norm(tokens, readers=3) + self._self_attention(tokens, length)
        if stack == "decoder":
            total += self._norm(tokens, readers=1) + self._cross_attention()
        total += self._norm(tokens, readers=self._shape.ff_matrices - 1)
        total += self._feed_forward(tokens, stack)
        sublayers = 2 if stack == "encoder" else 3
        return total + sublayers * tokens * self._shape.d_model * options.mask

    def checkpointed(self, stack: str) -> int:
        """What a recomputed layer keeps: its input, and with `selective` its products."""
        options, shape, tokens = self._options, self._shape, self._tokens(stack)
        kept = tokens * shape.d_model * options.residual
        if options.checkpointing != "selective":
            return kept
        length = self._batch.source if stack == "encoder" else self._batch.target
        b, d, inner = options.itemsize, shape.d_model, shape.inner
        kept += tokens * b * (3 * inner + d) + self._kept_attention(length, length, biased=True)
        if stack == "decoder":
            kept += tokens * b * (inner + d) + self._batch.source_tokens * b * 2 * inner
            kept += self._kept_attention(length, self._batch.source, biased=False)
        return kept + tokens * b * ((shape.ff_matrices - 1) * self._d_ff(stack) + d)

    def gradients(self, stack: str, is_recomputed: bool) -> int:
        """Gradients of a layer's states that are there at the same time."""
        options, shape, tokens = self._options, self._shape, self._tokens(stack)
        length = self._batch.source if stack == "encoder" else self._batch.target
        b, d = options.itemsize, shape.d_model
        inner = shape.ff_matrices * self._d_ff(stack) * tokens * b
        scores = self._batch.rows * shape.num_heads * length * self._row(length)
        attention = 3 * shape.inner * tokens * b + scores * self._score_gradient()
        bias = 0 if shape.frozen else self._bias_gradient(scores * b, stack, is_recomputed)
        gone = self._feed_forward(tokens, stack)
        return max(inner, attention - gone) + bias + tokens * d * (2 * options.residual + 4)

    def _score_gradient(self) -> int:
        """Bytes a score in the backward pass of an attention."""
        kernel, b = self._kernel(biased=True), self._options.itemsize
        if kernel == "efficient":  # that of the bias alone
            return 0 if self._shape.frozen else b
        return 8 if kernel == "math" else 2 * b

    def _bias_gradient(self, size: int, stack: str, is_recomputed: bool) -> int:
        """What layers behind have added up of a bias of `size` bytes, less what is gone by then.

        A recomputed first layer makes the bias itself anew, when the other layers are done with.
        """
        if not is_recomputed:
            return max(0, size - self.whole(stack))
        others = getattr(self._shape, f"{stack}_layers") - 1
        return max(size, 2 * size - others * self.checkpointed(stack))

    def ends(self) -> int:
        """Embeddings and last norms of both stacks, and the encoder's output."""
        options, d = self._options, self._shape.d_model
        both = self._batch.source_tokens + self._batch.target_tokens
        total = both * (2 * d * options.residual_mask + self._last_norm())
        return total + self._batch.source_tokens * d * options.residual

    def biases(self) -> int:
        """Position biases and masks that all layers of a stack share."""
        options, batch = self._options, self._batch
        b, heads = options.itemsize, self._shape.num_heads
        cross = batch.rows * batch.target * self._row(batch.source) * b
        total = cross + batch.source_tokens * batch.source  # and a mask of bytes
        for stack, length in (("encoder", batch.source), ("decoder", batch.target)):
            layers = getattr(self._shape, f"{stack}_layers")
            recomputed = options.recomputed(stack, layers)
            # transformers' own attention keeps the bias alone, without the masks of the rows.
            rows = batch.rows if options.attention == "sdpa" else 1
            one = rows * heads * length * self._row(length) * b
            if self._shape.own_bias:
                total += (layers - recomputed) * one * self._keeps_bias
            elif recomputed or self._keeps_bias:
                total += one
            if not recomputed:
                total += length * length * 8  # which bucket a distance falls into
        return total

    @property
    def _keeps_bias(self) -> bool:
        return self._kernel(biased=True) == "efficient"

    def _row(self, keys: int) -> int:
        return -(-keys // 16) * 16 if self._options.on_gpu else keys

    def _kernel(self, biased: bool) -> AttentionKernel:
        options = self._options
        if options.attention == "eager":
            return "eager"
        if options.on_gpu:
            return "efficient"
        # A bias has a gradient unless the model is frozen.
        trained = biased and not self._shape.frozen
        return "math" if trained or options.dropout else "flash_cpu"

    def _norm(self, tokens: int, readers: int) -> int:
        """A norm in front of a sublayer whose `readers` linear layers read its output."""
        options, d = self._options, self._shape.d_model
        output = readers * options.itemsize if options.autocast else options.itemsize
        return tokens * (self._last_norm() + output * d)

    def _last_norm(self) -> int:
        """Bytes a token of a norm whose output nobody keeps."""
        r, d = self._options.residual, self._shape.d_model
        copy = 4 if r == 2 else 0
        normalized = 0 if self._shape.frozen else r
        return d * (r + copy + normalized) + 4

    def _self_attention(self, tokens: int, length: int) -> int:
        return self._projected(tokens, 3, True) + self._attention(length, length, biased=True)

    def _cross_attention(self) -> int:
        batch, options = self._batch, self._options
        total = self._projected(batch.target_tokens, 1, False)
        total += self._projected(batch.source_tokens, 2, False)
        if options.autocast:  # of the encoder's output, for keys and for values
            total += 2 * batch.source_tokens * self._shape.d_model * options.itemsize
        return total + self._attention(batch.target, batch.source, biased=False)

    def _projected(self, tokens: int, matrices: int, biased: bool) -> int:
        itemsize = 4 if self._kernel(biased) == "math" else self._options.itemsize
        return tokens * matrices * self._shape.inner * itemsize

    def _attention(self, queries: int, keys: int, *, biased: bool) -> int:
        """Output of the attention and what its kernel keeps besides query, key and value."""
        options, batch = self._options, self._batch
        kernel, b = self._kernel(biased), options.itemsize
        output = batch.rows * queries * self._shape.inner * b
        scores = batch.rows * self._shape.num_heads * queries * keys
        if kernel == "efficient":
            total = output + self._log_sums(queries, 32)
            if options.attention == "sdpa_per_layer":
                total += batch.rows * self._shape.num_heads * queries * keys * b
            return total
        if kernel == "flash_cpu":
            return output + self._log_sums(queries, 1)
        size = 4 if kernel == "math" else b
        dropped = size + options._mask(size) if options.dropout else 0
        return output + scores * (size + dropped)

    def _kept_attention(self, queries: int, keys: int, *, biased: bool) -> int:
        """What `selective` keeps of an attention: outputs of its products or of its kernel."""
        options, kernel = self._options, self._kernel(biased)
        size = 4 if kernel == "math" else options.itemsize
        output = self._batch.rows * queries * self._shape.inner * size
        if kernel == "efficient":
            return output + self._log_sums(queries, 32)
        if kernel == "flash_cpu":
            return output + self._log_sums(queries, 1)
        return output + self._batch.rows * self._shape.num_heads * queries * keys * size

    def _log_sums(self, queries: int, multiple: int) -> int:
        padded = -(-queries // multiple) * multiple
        return 4 * self._batch.rows * self._shape.num_heads * padded

    def _d_ff(self, stack: str) -> int:
        return self._shape.d_ff if stack == "encoder" else self._shape.decoder_d_ff

    def _feed_forward(self, tokens: int, stack: str) -> int:
        options, b = self._options, self._options.itemsize
        states = _GATED_STATES
        if self._shape.ff_matrices == 2:
            # The last layer's input is the ReLU's output, unless something lies between.
            states = _RELU_STATES + (options.dropout or options.autocast)
        return tokens * self._d_ff(stack) * (states * b + options.mask)
