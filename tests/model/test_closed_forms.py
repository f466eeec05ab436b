"""FLOPs and device peaks against figures worked out apart from this code."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import BartConfig, PegasusConfig, T5Config

from t5_fsdp.data.token_sums import TokenSums
from t5_fsdp.model.devices import has_bf16, peak_flops
from t5_fsdp.model.flops import T5Shape, batch_flops, training_flops

SHAPES = {
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
}


@pytest.mark.parametrize(
    ("name", "tera"), [("base", 0.438), ("large", 1.480), ("3b", 5.84), ("11b", 23.3)]
)
def test_training_flops_of_512_source_and_128_target_tokens(name: str, tera: float) -> None:
    shape = T5Shape.of(T5Config(vocab_size=32128, **SHAPES[name]))
    assert training_flops(shape, 512, 128, 1) / 1e12 == pytest.approx(tera, rel=0.005)
    assert training_flops(shape, 512, 128, 7) == 7 * training_flops(shape, 512, 128, 1)


def test_a_batch_costs_what_its_sequences_cost() -> None:
    shape = T5Shape.of(T5Config(**SHAPES["base"]))
    lengths = [(512, 7), (90, 150), (33, 20)]
    sums = TokenSums.of(*(np.array(side, np.int32) for side in zip(*lengths, strict=True)))
    expected = sum(training_flops(shape, *pair) for pair in lengths)
    assert batch_flops(shape, sums) == pytest.approx(expected, rel=1e-12)


def test_frozen_weights_cost_no_gradient_of_theirs() -> None:
    """Against torch's own count of the products of a small model, all lengths the same."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import T5ForConditionalGeneration

    config = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(config)
    ids = torch.ones((1, 32), dtype=torch.int64)
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        # As adapters do from the first layer on: what flows through the model needs a gradient.
        embedded = model.shared(ids).detach().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            output = model(
                inputs_embeds=embedded, decoder_inputs_embeds=embedded, attention_mask=ids
            )
            output.logits.sum().backward()
        expected = training_flops(T5Shape.of(config, frozen=frozen), 32, 32)
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.01), frozen


def test_a_bart_costs_what_a_t5_of_its_shape_does() -> None:
    # BART-large: 12 + 12 layers of width 1,024, 16 heads of 64.
    t5 = T5Config(vocab_size=50265, d_model=1024, d_kv=64, d_ff=4096, num_layers=12, num_heads=16)
    expected = training_flops(T5Shape.of(t5), 512, 128)
    for config in (BartConfig(), PegasusConfig()):
        assert training_flops(T5Shape.of(config), 512, 128) == expected
    narrow = T5Shape.of(BartConfig(decoder_ffn_dim=2048))
    assert expected - training_flops(narrow, 512, 128) == 3 * 12 * 2 * 128 * 2 * 1024 * 2048


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 15.7),  # float32's: it has no bf16
        ("Tesla V100-PCIE-32GB", 14),
        ("Tesla T4", 8.1),
        ("NVIDIA L40S", None),
        ("CPU", None),
    ],
)
def test_peak_of_known_devices_alone(name: str, tera: float | None) -> None:
    assert peak_flops(name, "bf16") == (None if tera is None else tera * 1e12)


def test_devices_without_bf16_have_their_tensor_cores_in_fp16_alone() -> None:
    assert peak_flops("Tesla T4", "fp16") == 65e12
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("Tesla V100-PCIE-32GB", "fp16") == 112e12
    assert peak_flops("Tesla T4", "fp32", tf32=True) == peak_flops("Tesla T4", "fp32") == 8.1e12
    assert not has_bf16("Tesla T4") and has_bf16("NVIDIA A100-SXM4-40GB")
