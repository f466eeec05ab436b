"""Our attention against transformers' eager one, and that bias and mask are added once a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from t5_fsdp.model.build import ModelSpec, build_with_weights, draw_weights

FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "t5": ("t5", {}, False),
    "v1.1": ("t5", {"feed_forward_proj": "gated-gelu"}, True),
    "mt5": ("mt5", {}, True),
    "umt5": ("umt5", {}, True),
}
LAYERS = 3


def spec(family: str) -> ModelSpec:
    from transformers import AutoConfig

    model_type, extra, own_head = FAMILIES[family]
    config = AutoConfig.for_model(
        model_type, vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, **extra,
    )  # fmt: skip
    return ModelSpec(config, own_head)


def build(family: str, attention: str) -> Any:
    described = spec(family)
    return build_with_weights(described, draw_weights(described, seed=1), attention)


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 101, (3, 17), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[2, 3:] = 0, 0
    target = torch.randint(2, 101, (3, 7), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}


def outputs(model: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits, and the gradients of a weighted sum of them."""
    model.train()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(**batch(), use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, 101)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_per_layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_eager_attention(family: str, attention: str) -> None:
    logits, gradients = outputs(build(family, "eager"))
    found, found_gradients = outputs(build(family, attention))
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(found_gradients[name] / scale, gradient / scale,
                                   rtol=0, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_equals_eager_attention(family: str) -> None:
    inputs = {name: value for name, value in batch().items() if name != "decoder_input_ids"}
    eager, ours = (
        build(family, attention).generate(**inputs, num_beams=3, max_new_tokens=9)
        for attention in ("eager", "sdpa")
    )
    assert torch.equal(eager, ours)


def biases_of_a_forward(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[torch.Tensor]:
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs["attn_mask"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    model(**batch(), use_cache=False)
    return seen


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_layers_of_a_stack_share_one_bias(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    seen = biases_of_a_forward(monkeypatch, build(family, "sdpa"))
    encoder, decoder = seen[:LAYERS], seen[LAYERS:]
    for stack in (encoder, decoder[0::2], decoder[1::2]):
        assert len(stack) == LAYERS
        assert len({tensor.data_ptr() for tensor in stack}) == 1
    assert [tuple(stack[0].shape) for stack in (encoder, decoder[0::2])] == [
        (3, 4, 17, 17),
        (3, 4, 7, 7),
    ]
    # Cross-attention has no bias: the mask alone, for all heads at once.
    assert tuple(decoder[1].shape) == (3, 1, 7, 17)


def test_the_way_of_transformers_adds_anew_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = biases_of_a_forward(monkeypatch, build("t5", "sdpa_per_layer"))
    assert len({id(tensor) for tensor in seen}) == 3 * LAYERS


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_autocast_keeps_to_the_low_precision(family: str) -> None:
    logits, _ = outputs(build(family, "sdpa"), torch.bfloat16)
    exact, _ = outputs(build(family, "eager"))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), exact, rtol=0, atol=0.1 * float(exact.abs().max()))


def test_a_source_without_padding_has_a_mask_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers would look whether it is needed, for which a GPU has to be waited for.
    full = batch()
    full["attention_mask"] = torch.ones_like(full["attention_mask"])
    monkeypatch.setitem(globals(), "batch", lambda: full)
    seen = biases_of_a_forward(monkeypatch, build("t5", "sdpa"))
    assert len(seen) == 3 * LAYERS and all(bias is not None for bias in seen)


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_the_bias_lies_as_fused_kernels_want_it(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    # With another order of dimensions CUDA's would copy it in each layer.
    seen = biases_of_a_forward(monkeypatch, build(family, "sdpa"))
    assert all(bias.stride(-1) == 1 for bias in seen)
    assert all(bias.stride(-2) >= bias.shape[-1] for bias in seen if bias.shape[-2] > 1)


def test_a_model_does_not_change_the_attention_of_another_one() -> None:
    described = spec("t5")
    weights = draw_weights(described, seed=1)
    first = build_with_weights(described, weights, "eager")
    build_with_weights(described, weights, "sdpa")
    assert first.config._attn_implementation == "eager"


def test_another_forward_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.t5 import modeling_t5

    def other(self: Any, states: Any, masks: Any) -> None: ...

    monkeypatch.setattr(modeling_t5.T5Attention, "forward", other)
    with pytest.raises(RuntimeError, match="sdpa_per_layer"):
        build("t5", "sdpa")
