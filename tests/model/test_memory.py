"""Closed forms for memory, against what tensors take."""

from __future__ import annotations

import torch
from transformers import T5Config

from t5_fsdp.model.devices import free_memory_bytes
from t5_fsdp.model.flops import T5Shape
from t5_fsdp.model.memory import decoding_bytes


def test_decoding_of_t5_3b() -> None:
    config = T5Config(
        d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32, vocab_size=32128
    )
    options = {
        "num_parameters": 2_851_598_336,
        "itemsize": 2,
        "num_beams": 4,
        "max_source_tokens": 512,
        "max_new_tokens": 150,
    }
    weights = 2 * options["num_parameters"]
    shape = T5Shape.of(config)
    # 32 hypotheses of 512 + 2 x 150 tokens with keys and values of 4,096 numbers in 24 layers.
    caches = 32 * 812 * 2 * 4096 * 24 * 2
    long = decoding_bytes(shape, batch_tokens=16384, **options) - weights
    assert caches < long < 1.1 * caches
    twice = decoding_bytes(shape, batch_tokens=32768, **options) - weights
    assert 1.9 * long < twice < 2.1 * long
    fewer = decoding_bytes(shape, batch_tokens=16384, batch_examples=4, **options) - weights
    assert 0.4 * long < fewer < 0.6 * long
    more = decoding_bytes(shape, batch_tokens=16384, batch_examples=99, **options) - weights
    assert more == long


def test_free_memory_of_the_host_is_shared_by_its_processes() -> None:
    cpu = torch.device("cpu")
    one, four = free_memory_bytes(cpu, 1), free_memory_bytes(cpu, 4)
    assert one is not None and four is not None
    assert 2**20 < four < one < 2**50
