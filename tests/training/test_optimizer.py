"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest

from t5_fsdp.config import ScheduleConfig
from t5_fsdp.training.optimizer import learning_rate


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
