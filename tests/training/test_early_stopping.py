"""When validation scores end a run, from the scores alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from t5_fsdp.config import Config, EvaluationConfig
from t5_fsdp.config_problems import value_problems
from t5_fsdp.training.early_stopping import (
    describe_early_stop,
    stops_early,
    validations_without_best,
)


def scores(metric: str, values: list[float | None]) -> dict[str, dict[str, float]]:
    # In the order of text, "10" stands before "2".
    steps = [str(2 * number) for number in range(1, len(values) + 1)]
    pairs = sorted(zip(steps, values, strict=True))
    return {step: {metric: value} for step, value in pairs}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("metric", "values", "min_delta", "expected"),
    [
        ("rougeL", [], 0.0, 0),
        ("rougeL", [0.1], 0.0, 0),
        ("rougeL", [0.1, 0.2, 0.2, 0.1], 0.0, 2),  # an equal one is no new best
        ("rougeL", [0.1, 0.1, 0.1, 0.1, 0.2], 0.0, 0),
        ("rougeL", [0.5, 0.1, 0.2, 0.3, 0.4, 0.45], 0.0, 5),  # better than the last is not enough
        ("rougeL", [0.1, 0.14, 0.18, 0.25], 0.1, 0),  # 0.25 is measured against 0.1
        ("rougeL", [0.1, 0.14, 0.18], 0.1, 2),
        ("loss", [3.0, 2.0, 2.5, 4.0], 0.0, 2),
        ("loss", [3.0, 2.0, 1.9], 0.5, 1),
        ("loss", [None, float("nan"), float("inf")], 0.0, 3),
        ("loss", [None, 3.0, float("nan")], 0.0, 1),
    ],
)
def test_validations_are_counted_since_the_best(
    metric: str, values: list[float | None], min_delta: float, expected: int
) -> None:
    assert validations_without_best(scores(metric, values), metric, min_delta) == expected


def test_patience_and_what_is_said(tmp_path: Path) -> None:
    found = scores("rougeL", [0.1, 0.4, 0.3, 0.2])
    options = EvaluationConfig(best_metric="rougeL")
    assert not stops_early(found, options)
    options.early_stopping_patience = 3
    assert not stops_early(found, options)
    options.early_stopping_patience = 2
    assert stops_early(found, options)
    told = describe_early_stop(found, options, 8, 20, tmp_path)
    assert told.startswith("stopped early at step 8 of 20: 2 validations in a row without a better")
    assert "step 4 (0.4000)" in told and f"{tmp_path} has no checkpoint of it" in told
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "COMPLETE").write_text("{}")
    assert describe_early_stop(found, options, 8, 20, tmp_path).endswith("step-00000004")


def test_options_that_could_never_stop_are_refused() -> None:
    config = Config()
    config.evaluation.early_stopping_patience = 0
    config.evaluation.every_steps = None
    first, second = value_problems(config)
    assert "early_stopping_patience is 0; the smallest allowed value is 1" in first
    assert "every_steps: null" in second
    config = Config()
    config.evaluation.early_stopping_min_delta = 0.1
    assert "nothing stops early" in value_problems(config)[0]
    config.evaluation.early_stopping_patience = 3
    assert not value_problems(config)
