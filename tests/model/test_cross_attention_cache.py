"""The source's keys: a row an example, whatever the beams do, and the same hypotheses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache

from t5_fsdp.model.adapter import LoraAdapter
from t5_fsdp.model.build import ModelSpec, build_with_weights, draw_weights, fit_adapter
from t5_fsdp.model.cross_attention_cache import source_inputs
from tests.model.test_attention import FAMILIES, batch
from tests.model.test_attention import spec as plain_spec

BEAMS = 3


def spec(kind: str) -> ModelSpec:
    described = plain_spec(kind if kind in FAMILIES else "t5")
    if kind == "lora":
        described.adapter = LoraAdapter(rank=2, alpha=4.0, dropout=0.0, targets=["k", "q", "v"])
    if kind == "deep":
        described.config.num_decoder_layers = 5  # the encoder has 3
    return described


def build(kind: str, attention: str) -> Any:
    described = spec(kind)
    plain = described.without_adapter()
    weights = dict(fit_adapter(draw_weights(plain, seed=1), None, described, seed=2))
    generator = torch.Generator().manual_seed(7)
    for name, weight in weights.items():
        if "lora_B" in name:  # zeros, which would change nothing
            weight.normal_(generator=generator)
    return build_with_weights(described, weights, attention).eval()


def sources() -> dict[str, torch.Tensor]:
    return {name: batch()[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("kind", ["t5", "umt5", "lora", "deep"])
@torch.no_grad()
def test_keys_have_a_row_an_example_and_stay_when_beams_change_places(kind: str) -> None:
    model = build(kind, "sdpa")
    inputs = source_inputs(model, **sources())
    assert "input_ids" not in inputs
    [cache] = [value for value in inputs.values() if isinstance(value, EncoderDecoderCache)]
    rows, length = batch()["input_ids"].shape
    layers = len(model.get_decoder().block)
    before = [layer.keys.clone() for layer in cache.cross_attention_cache.layers]
    assert [tuple(keys.shape) for keys in before] == [(rows, 4, length, 8)] * layers
    generated = model.generate(**inputs, num_beams=BEAMS, max_new_tokens=9)
    assert generated.shape[0] == rows
    # The same tensors, after beams have been moved; their own keys have a row a beam.
    for keys, layer in zip(before, cache.cross_attention_cache.layers, strict=True):
        assert torch.equal(keys, layer.keys)
    own = cache.self_attention_cache.layers[0].keys
    assert own.shape[0] == rows * BEAMS
    moved = own[torch.arange(rows * BEAMS - 1, -1, -1)]
    cache.reorder_cache(torch.arange(rows * BEAMS - 1, -1, -1))
    assert torch.equal(cache.self_attention_cache.layers[0].keys, moved)
    assert torch.equal(cache.cross_attention_cache.layers[0].keys, before[0])


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("kind", ["t5", "v1.1", "umt5", "lora"])
@torch.no_grad()
def test_beams_are_those_of_transformers(kind: str, sampling: bool) -> None:
    options = {"num_beams": BEAMS, "max_new_tokens": 9, "do_sample": sampling}
    found = []
    for attention, inputs_of in (("eager", lambda _, **inputs: inputs), ("sdpa", source_inputs)):
        model = build(kind, attention)
        inputs = inputs_of(model, **sources())
        torch.manual_seed(4)
        found.append(model.generate(**inputs, **options))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) > 1


def test_other_attention_gets_its_ids() -> None:
    assert source_inputs(build("t5", "eager"), **sources()).keys() == sources().keys()
