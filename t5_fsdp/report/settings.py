"""The options of the runs: what is unlike the defaults, and where the runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from t5_fsdp.config import Config, leaves, normalize, to_dict
from t5_fsdp.report.markup import Markup, each, join, table, tag
from t5_fsdp.report.plots import swatch
from t5_fsdp.report.runs import Run, as_number

_HIDDEN_OPTIONS = ("run_dir",)  # every run has its own
_UNSET = "(not set)"


def _written(value: Any) -> str:
    """An option's value on one line, as on the command line."""
    if value is _UNSET or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _differs(value: Any, default: Any) -> bool:
    numbers = [as_number(value), as_number(default)]
    if None not in numbers:
        return numbers[0] != numbers[1]
    return value != default


def configuration_of(runs: Sequence[Run]) -> Markup:
    """Of one run what is unlike the defaults; of several first where they differ."""
    known = [run for run in runs if run.config]
    if not known:
        return Markup()
    if len(runs) > 1:
        return join([_differences(runs), each(runs, _own_configuration)])
    return _own_configuration(runs[0])


def _own_configuration(run: Run) -> Markup:
    if not run.config:
        return Markup()
    defaults = leaves(to_dict(normalize(Config())))
    options = leaves(run.config)
    changed = {
        name: value
        for name, value in options.items()
        if name not in _HIDDEN_OPTIONS and _differs(value, defaults.get(name, _UNSET))
    }
    rows = [
        [name, _written(value), _written(defaults.get(name, _UNSET))]
        for name, value in changed.items()
    ]
    every = [[name, _written(value)] for name, value in options.items()]
    return join(
        [
            table(["option", "value", "default"], rows, "Options unlike the defaults", texts=3)
            if rows
            else tag("p", "All options have their defaults."),
            tag(
                "details",
                tag("summary", f"All {len(every)} options"),
                table(["option", "value"], every, "All options", texts=2),
            ),
        ]
    )


def _differences(runs: Sequence[Run]) -> Markup:
    by_run = [leaves(run.config) for run in runs]
    names = dict.fromkeys(name for options in by_run for name in options)
    rows = []
    for name in names:
        values = [options.get(name, _UNSET) for options in by_run]
        if name not in _HIDDEN_OPTIONS and any(_differs(value, values[0]) for value in values):
            rows.append([name, *map(_written, values)])
    if not rows:
        return tag("p", "The runs have the same configuration.")
    heads = (join([swatch(color), tag("bdi", run.name)]) for color, run in enumerate(runs))
    return table(["option", *heads], rows, "Options in which the runs differ", texts=len(runs) + 1)
