"""A metric of the caller's own, beside ROUGE: a function of predictions and references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.rouge import METRICS

# (predictions, references), a text each an example, to figures by name; higher is better.
Metric = Callable[[list[str], list[str]], Mapping[str, float]]

# These stand beside it in a row of metrics.jsonl.
_TAKEN = (*METRICS, "loss", "examples", "seconds", "evaluation_share", "step", "kind")
TRIED_EXAMPLES = 8


def call_metric(
    metric: Metric, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The figures, which may not be finite.

    Args:
        references: the texts of each example, of which the first is used.

    Raises:
        UserError: they are no mapping of names of their own to numbers.
    """
    found: Any = metric(list(predictions), [texts[0] for texts in references])
    what = getattr(metric, "__name__", type(metric).__name__)
    if not isinstance(found, Mapping):
        raise UserError(
            f"the metric {what} gives a {type(found).__name__}; give a mapping of names to "
            'numbers, e.g. {"coverage": 0.5}'
        )
    figures: dict[str, float] = {}
    for name, value in found.items():
        if not isinstance(name, str) or name in _TAKEN:
            raise UserError(
                f"the metric {what} gives a figure the name {name!r}; give a text that is none of "
                f"{', '.join(_TAKEN)}"
            )
        value = value.item() if hasattr(value, "item") else value  # of numpy and torch
        if not isinstance(value, Real):
            raise UserError(f"the metric {what} gives {name} = {value!r}; give a number")
        figures[name] = float(value)
    return figures


def try_metric(metric: Metric, references: Sequence[str]) -> list[str]:
    """The names of its figures, found by calling it on a few references as if predicted.

    A mistake in it is met before training instead of at the first validation.

    Raises as `call_metric`, and whatever the metric raises.
    """
    return list(call_metric(metric, references, [[text] for text in references]))
