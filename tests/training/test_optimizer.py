"""The learning rate is a pure function of the step; only matrices are decayed."""

from __future__ import annotations

import pytest

from t5_fsdp.config import OptimizerConfig, ScheduleConfig
from t5_fsdp.training.optimizer import learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("inverse_sqrt", [0.5, 1.0, 0.816497, 0.707107, 0.632456, 0.57735]),
    ],
)
def test_rates_of_six_steps_with_two_of_warm_up(name: str, expected: list[float]) -> None:
    options = ScheduleConfig(name=name, warmup_steps=2)  # type: ignore[arg-type]
    rates = [learning_rate(step, 6, 1.0, options) for step in range(1, 7)]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_norms_and_position_biases_are_not_decayed() -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        kept = "layer_norm" in name or "relative_attention_bias" in name
        expected = before[name] if kept else 0.95 * before[name]
        torch.testing.assert_close(value.detach(), expected)
