"""LoRA without training: what it is put into, what it starts from, how it is merged and stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import T5Config

from t5_fsdp.config import ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.model.adapter import LoraAdapter, choose_adapter, is_adapter
from t5_fsdp.model.build import (
    ModelSpec,
    build_on_meta,
    build_with_weights,
    check_names,
    draw_weights,
    fit_adapter,
    num_parameters,
)


def spec_of(targets: Any = "all-linear", own_head: bool = False, **shape: Any) -> ModelSpec:
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0, **shape,
    )  # fmt: skip
    spec = ModelSpec(config, own_head)
    options = ModelConfig(adapter="lora", lora_rank=3, lora_targets=targets)
    spec.adapter = choose_adapter(options, build_on_meta(spec))
    return spec


class Recorded(Mapping[str, torch.Tensor]):
    """Weights that remember which of them were read."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def test_all_linear_layers_but_the_head_are_targets() -> None:
    assert spec_of(own_head=True).adapter.targets == ["k", "o", "q", "v", "wi", "wo"]  # type: ignore[union-attr]
    gated = spec_of(feed_forward_proj="gated-gelu").adapter
    assert gated is not None and gated.targets == ["k", "o", "q", "v", "wi_0", "wi_1", "wo"]
    assert spec_of(["v", "q", "v"]).adapter == LoraAdapter(3, 32.0, 0.0, ["q", "v"])


@pytest.mark.parametrize("target", ["SelfAttention", "layer_norm", "relative_attention_bias", "0"])
def test_only_linear_layers_can_be_targets(target: str) -> None:
    with pytest.raises(UserError, match=f"model.lora_targets: {target} is "):
        spec_of([target, "q"])


def test_the_pairs_alone_are_trained() -> None:
    model = build_on_meta(spec_of(["SelfAttention.q", "wo"]))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    # Rank 3; two layers a stack, each with one q of 16 x 16 and one wo of 24 x 16.
    assert num_parameters(model, trained=True) == 4 * 3 * ((16 + 16) + (24 + 16))


def test_the_size_that_the_3b_recipe_states() -> None:
    config = T5Config(d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32)
    config.decoder_start_token_id = 0
    spec = ModelSpec(config, False, LoraAdapter(16, 32.0, 0.0, ["k", "o", "q", "v", "wi", "wo"]))
    model = build_on_meta(spec)
    assert num_parameters(model, trained=True) == 50_331_648
    assert num_parameters(model) == 2_851_598_336 + 50_331_648


def test_first_values_are_those_of_peft_and_depend_on_seed_and_name_alone() -> None:
    spec, fewer = spec_of(), spec_of(["q"])
    base = draw_weights(spec, 1)
    weights = fit_adapter(base, None, spec, 1)
    name = "encoder.block.1.layer.0.SelfAttention.q.lora_A.default.weight"
    assert torch.equal(weights[name], fit_adapter(base, None, fewer, 1)[name])
    assert not torch.equal(weights[name], fit_adapter(base, None, fewer, 2)[name])
    assert not torch.equal(weights[name], weights[name.replace("block.1", "block.0")])
    assert not weights[name.replace("lora_A", "lora_B")].any()
    drawn = torch.cat([weights[n].flatten() for n in weights if "q.lora_A" in n])
    # Uniform in +-1 / sqrt(16): kaiming_uniform_ with a = sqrt(5).
    assert 0.24 < float(drawn.max()) <= 0.25 and -0.25 <= float(drawn.min()) < -0.24
    assert float(drawn.std()) == pytest.approx(0.25 / 3**0.5, rel=0.1)


def test_a_weight_is_read_when_it_is_asked_for() -> None:
    spec = spec_of()
    base = Recorded(draw_weights(spec, 1))
    weights = fit_adapter(base, None, spec, 1)
    names = {name for name, _ in build_on_meta(spec).named_parameters()}
    assert set(weights) == names and len(weights) == len(names) and base.read == []
    q = "decoder.block.0.layer.1.EncDecAttention.q"
    assert torch.equal(weights[f"{q}.base_layer.weight"], base[f"{q}.weight"])
    assert base.read == [f"{q}.weight"] * 2
    merged = fit_adapter(recorded := Recorded(weights), spec.adapter, spec.without_adapter(), 1)
    assert set(merged) == set(base) and len(merged) == len(base) and recorded.read == []
    assert torch.equal(merged["shared.weight"], base["shared.weight"])
    assert recorded.read == ["shared.weight"]


def test_a_base_that_does_not_fit_is_refused() -> None:
    weights = draw_weights(spec_of(own_head=True), 1)
    spec = spec_of()  # tied: the head's own weight must not vanish unseen
    names = {name for name, _ in build_on_meta(spec).named_parameters()}
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        check_names(set(fit_adapter(weights, None, spec, 1)), names)
    del weights["lm_head.weight"], weights["encoder.block.0.layer.0.SelfAttention.k.weight"]
    with pytest.raises(UserError, match=r"SelfAttention\.k\.base_layer"):
        check_names(set(fit_adapter(weights, None, spec, 1)), names)


@pytest.mark.parametrize("own_head", [False, True])
def test_a_merged_model_computes_the_same(own_head: bool) -> None:
    spec = spec_of(own_head=own_head)
    weights = dict(fit_adapter(draw_weights(spec, 1), None, spec, 1))
    generator = torch.Generator().manual_seed(2)
    for name, value in weights.items():
        if "lora_B" in name:
            weights[name] = 0.1 * torch.randn(value.shape, generator=generator)
    plain = spec.without_adapter()
    ids = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        adapted, merged, base = (
            build_with_weights(described, values).eval()(input_ids=ids, labels=ids).logits
            for described, values in (
                (spec, weights),
                (plain, fit_adapter(weights, spec.adapter, plain, 1)),
                (plain, draw_weights(spec, 1)),
            )
        )
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    assert (adapted - base).abs().max() > 0.01


def test_a_checkpoint_describes_its_adapter_and_older_ones_have_none() -> None:
    spec = spec_of(["q"])
    stored = spec.to_json()
    assert stored["adapter"]["type"] == "lora"
    assert ModelSpec.from_json(stored).adapter == spec.adapter
    del stored["adapter"]
    assert ModelSpec.from_json(stored).adapter is None
