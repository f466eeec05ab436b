"""What is wrong with an option or its value, in a line, with what may have been meant."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from t5_fsdp.cli.options.table import Option, options_by_name, section_types


def type_in_words(kind: Any) -> str:
    """A type in words a user knows."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(part) for part in args)
    if origin is list:
        return "a list"
    if origin is dict:
        return 'a mapping with text keys, e.g. {"dropout_rate": 0.0}'
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return {**plain, type(None): "null"}.get(kind, str(kind))


def wrong_type(option: Option, value: Any, written: str | None = None) -> str:
    """`written` is how the user gave the option, where not by its name."""
    advice = type_in_words(option.type)
    if isinstance(value, bool | int | float) and option.takes_text:
        advice += f", in quotes: {_quoted(value)}"
    elif isinstance(value, str) and typing.get_origin(option.type) is Literal:
        advice += _did_you_mean(difflib.get_close_matches(value, typing.get_args(option.type), 1))
    return f"{written or option.name} is {shown(value)}; give {advice}"


def _quoted(value: Any) -> str:
    return f'"{json.dumps(value)}"'


def shown(value: Any) -> str:
    """A value as messages have it: short, on one line."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def at_place(name: str, origins: Mapping[str, str]) -> str:
    """File and line of an option, behind a message about it."""
    return f" ({origins[name]})" if name in origins else ""


def not_a_section(name: str, value: Any) -> str:
    """Of a section whose value is no mapping."""
    example = next(option for option in options_by_name() if option.startswith(f"{name}."))
    what = "empty" if value is None else shown(value)
    return f"section {name} is {what}; give its options indented below it, e.g. {example}"


def unknown_section(name: str, values: Mapping[str, Any]) -> str:
    """Of a mapping in a file; sections with a similar name, else with these options."""
    near = difflib.get_close_matches(name.lower(), section_types(), 1)
    if not near and len(name) > 2:
        near = [section for section in section_types() if section.startswith(name.lower())]
    if not near and values:
        near = [
            section
            for section in section_types()
            if all(f"{section}.{option}" in options_by_name() for option in values)
        ]
    advice = _did_you_mean(near[:3]) or f"; the sections are {', '.join(section_types())}"
    return f"unknown section {name}{advice}"


def unknown_option(name: str, known: Mapping[str, Option], written: str | None = None) -> str:
    """`written` is how the user gave it, where not by its dotted name."""
    section, _, option = name.partition(".")
    message = f"unknown option {written or name}"
    parent = next((key for key in known if name.startswith(f"{key}.")), None)
    if name in section_types():
        example = next(key for key in known if key.startswith(f"{name}."))
        return f"{message}: {name} is a section; give its options, e.g. --{example} VALUE"
    if parent and known[parent].takes_mapping:
        entry = name[len(parent) + 1 :]
        return f"{message}; in a file write {entry} below {parent.partition('.')[2]}:"
    dashes = "--" if written else ""
    alike = [f"{dashes}{likely}" for likely in similar_options(name, known)]
    if alike:
        return message + _did_you_mean(alike)
    if not option and (near := difflib.get_close_matches(name, section_types(), 1)):
        return message + _did_you_mean([f"section {near[0]}"])
    if option and section in section_types():
        names = [key.partition(".")[2] for key in known if key.startswith(f"{section}.")]
        return f"{message}; section {section} has {', '.join(names)}"
    return f"{message}; --help lists all options"


def similar_options(name: str, known: Mapping[str, Any]) -> list[str]:
    """Known options that the user may have meant, at most three."""
    plain = name.replace("-", "_").lower()
    same_end = [key for key in known if key.rpartition(".")[2] == plain.rpartition(".")[2]]
    if plain in known:
        return [plain]
    section = plain.partition(".")[0]
    if same_end and ("." not in plain or section not in section_types()):
        return same_end[:3]
    close = difflib.get_close_matches(plain, known, 1, cutoff=0.8)
    if close:
        return close
    ends = {key.rpartition(".")[2]: key for key in known}
    near = difflib.get_close_matches(plain.rpartition(".")[2], ends, 1, cutoff=0.8)
    return [ends[end] for end in near] or same_end[:3]


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""
