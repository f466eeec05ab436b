"""Merged layers, made a `Config`; every problem in it is listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonargparse

from t5_fsdp.cli.options.layers import Entries
from t5_fsdp.cli.options.messages import (
    at_place,
    not_a_section,
    similar_options,
    unknown_option,
    unknown_section,
    wrong_type,
)
from t5_fsdp.cli.options.table import options_by_name, section_types
from t5_fsdp.cli.options.values import from_object
from t5_fsdp.config import Config, DataConfig, normalize
from t5_fsdp.config_problems import value_problems


@dataclass(frozen=True)
class Found:
    """What `look_over` makes of a configuration that may have problems.

    Attributes:
        config: the values as they were given, the impossible ones too; the default of what can't
            be read.
        problems: a line each.
        in_doubt: dotted names of the options that may have been given but can't be read.
    """

    config: Config
    problems: list[str]
    in_doubt: list[str]


def check_layers(
    merged: Mapping[str, Any],
    origins: Mapping[str, str],
    *,
    check_values: bool,
    check_data: Callable[[DataConfig], Sequence[str]] | None = None,
    own_metrics: Collection[str] | None = (),
) -> Found:
    """Build the configuration and list the problems; what can't be read keeps its default."""
    given, unsettled, problems = _flatten(merged, origins)
    # With an option that is unknown the files of the default may not be what was meant.
    files_named = not problems or "data" in merged
    # A default written as 3 is 3.0 as well, so that what is printed does not depend on its source.
    values = {
        name: float(option.default)
        for name, option in options_by_name().items()
        if option.type is float
    }
    for name, value in given.items():
        try:
            values[name] = from_object(options_by_name()[name], value)
        except (jsonargparse.ArgumentError, OverflowError):
            unsettled.add(name)
            problems.append(wrong_type(options_by_name()[name], value) + at_place(name, origins))
    config = normalize(_build(values))
    found = value_problems(config, own_metrics) if check_values else []
    in_doubt = [*unsettled, *found]
    if any(text.startswith("data.") for text in in_doubt) or not files_named:
        check_data = None
    if check_data is not None:
        found = [*found, *(text for text in check_data(config.data) if text not in found)]
    for problem in found:
        # A default stands in for what could not be read; a complaint about it would mislead.
        if not any(_mentions(problem, name) for name in unsettled):
            leading = re.match(r"[\w.]*\w", problem)
            problems.append(problem + at_place(leading[0] if leading else "", origins))
    return Found(config, problems, [name for name in options_by_name() if name in unsettled])


def _flatten(
    merged: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Known options by dotted name, the names that are in doubt, and the problems found."""
    given: dict[str, Any] = {}
    unsettled: set[str] = set()
    problems: list[str] = []
    unknown: list[str] = []
    absent = [name for name in section_types() if name not in merged]
    for key, value in merged.items():
        if key in section_types():
            if isinstance(value, dict):
                for key_inside, inner in value.items():
                    name = f"{key}.{key_inside}"
                    if name in options_by_name():
                        given[name] = dict(inner) if isinstance(inner, Entries) else inner
                    else:
                        unknown.append(name)
            else:
                unsettled |= {name for name in options_by_name() if name.startswith(f"{key}.")}
                problems.append(not_a_section(key, value) + at_place(key, origins))
        elif key in options_by_name() and "." not in key:
            given[key] = value
        elif isinstance(value, dict):
            problems.append(unknown_section(str(key), value) + at_place(key, origins))
            # It may be any section that is not there, and that one's defaults are not meant.
            in_doubt = tuple(f"{name}." for name in absent)
            unsettled |= {name for name in options_by_name() if name.startswith(in_doubt)}
        else:
            unknown.append(str(key))
    for name in unknown:
        section, dot, option = name.partition(".")
        if dot and name in options_by_name():
            message = f"unknown option {name}; in a file write {section}: {{{option}: ...}}"
        else:
            message = unknown_option(name, options_by_name())
        problems.append(message + at_place(name, origins))
        unsettled |= {
            likely for likely in similar_options(name, options_by_name()) if likely not in given
        }
    return given, unsettled, problems


def _build(values: Mapping[str, Any]) -> Config:
    config = Config()
    for name, value in values.items():
        section, dot, option = name.partition(".")
        setattr(getattr(config, section) if dot else config, option or section, value)
    return config


def _mentions(problem: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", problem) is not None
