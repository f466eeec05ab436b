"""The closed form of activations, against what real forward passes on the CPU leave behind."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from t5_fsdp.config import ParallelConfig
from t5_fsdp.model.activations import ActivationOptions, MicroBatchShape, saved_activations
from t5_fsdp.model.build import ModelSpec, build_with_weights, draw_weights
from t5_fsdp.model.flops import T5Shape
from t5_fsdp.model.forward import attach_loss
from t5_fsdp.model.loss import LossOptions
from t5_fsdp.parallel import activation_checkpointing
from tests.live_tensors import LiveTensors

BATCH = MicroBatchShape(rows=3, source=40, target=24)


def measured_and_estimated(
    mode: str,
    *,
    dropout: bool = True,
    dtype: torch.dtype = torch.float32,
    is_gated: bool = False,
    autocast: bool = False,
    attention: str = "sdpa",
    model_type: str = "t5",
    **checkpointing: Any,
) -> tuple[int, int]:
    from transformers import T5Config, UMT5Config

    config = (UMT5Config if model_type == "umt5" else T5Config)(
        vocab_size=512, d_model=64, d_kv=16, d_ff=160, num_layers=4, num_decoder_layers=3,
        num_heads=4, dropout_rate=0.1 * dropout, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu" if is_gated else "relu",
    )  # fmt: skip
    spec = ModelSpec(config, own_head=False)
    model = build_with_weights(spec, draw_weights(spec, 1), attention).to(dtype).train()
    attach_loss(model, LossOptions())
    activation_checkpointing.apply(
        model, ParallelConfig(activation_checkpointing=mode, **checkpointing)  # type: ignore[arg-type]
    )  # fmt: skip
    sources = torch.zeros((BATCH.rows, BATCH.source), dtype=torch.int64)
    targets = torch.zeros((BATCH.rows, BATCH.target), dtype=torch.int64)
    casting = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with LiveTensors() as live, casting:
        loss = model(
            input_ids=sources,
            attention_mask=torch.ones_like(sources),
            decoder_input_ids=targets,
            use_cache=False,
            target_rows=torch.arange(BATCH.target_tokens),
            target_ids=targets.flatten(),
        )
    measured = live.bytes_left(parameter.shape for parameter in model.parameters())
    del loss
    options = ActivationOptions(
        itemsize=2 if autocast else dtype.itemsize,
        autocast=autocast,
        on_gpu=False,
        attention=attention,  # type: ignore[arg-type]
        dropout=dropout,
        checkpointing=mode,  # type: ignore[arg-type]
        stack=checkpointing.get("activation_checkpointing_stack", "both"),
        every=checkpointing.get("activation_checkpointing_every", 1),
    )
    return measured, saved_activations(T5Shape.of(config), BATCH, options)


MODES = ("none", "selective", "full")


@pytest.mark.parametrize("mode", MODES)
def test_what_a_forward_pass_keeps(mode: str) -> None:
    for dropout, is_gated, (dtype, autocast) in itertools.product(
        (False, True),
        (False, True),
        ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)),
    ):
        measured, estimated = measured_and_estimated(
            mode, dropout=dropout, is_gated=is_gated, dtype=dtype, autocast=autocast
        )
        # Ids, masks and the random state are all that is not counted.
        case = (dropout, is_gated, dtype, autocast)
        assert estimated == pytest.approx(measured, rel=0.02), case


@pytest.mark.parametrize("mode", MODES)
def test_other_attention_and_families(mode: str) -> None:
    for other in ({"attention": "eager"}, {"attention": "sdpa_per_layer"}, {"model_type": "umt5"}):
        measured, estimated = measured_and_estimated(mode, **other)  # type: ignore[arg-type]
        assert estimated == pytest.approx(measured, rel=0.05), other


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_part_of_the_layers_is_recomputed(mode: str) -> None:
    for chosen in ({"every": 2}, {"every": 3}, {"stack": "encoder"}, {"stack": "decoder"}):
        options = {f"activation_checkpointing_{name}": value for name, value in chosen.items()}
        measured, estimated = measured_and_estimated(mode, **options)  # type: ignore[arg-type]
        assert estimated == pytest.approx(measured, rel=0.02), chosen


def test_a_gpu_keeps_no_scores() -> None:
    shape = T5Shape(512, 512, 2048, 2048, 2, 32128, 6, 6, num_heads=8)
    gpu, cpu = ActivationOptions(itemsize=2), ActivationOptions(itemsize=2, on_gpu=False)

    def growth(options: ActivationOptions) -> float:
        """Bytes of a source of 2,048 tokens to those of one of 1,024."""
        sizes = [
            saved_activations(shape, MicroBatchShape(1, length, 16), options)
            for length in (1024, 2048)
        ]
        return sizes[1] / sizes[0]

    # The bias of the encoder is kept once; on a CPU scores are, in each layer.
    assert 2.0 < growth(gpu) < 2.3 and growth(cpu) > 3.3
