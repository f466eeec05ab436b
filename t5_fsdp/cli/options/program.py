"""What a program says instead of a command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jsonargparse

from t5_fsdp.cli.options.layers import Entries, Layers, merge, read_files
from t5_fsdp.cli.options.messages import wrong_type
from t5_fsdp.cli.options.parsing import Extra
from t5_fsdp.cli.options.table import Option, mapping_with, options_by_name, section_types
from t5_fsdp.cli.options.values import from_object
from t5_fsdp.config import Config
from t5_fsdp.errors import UserError


def layers_of_program(
    options: Mapping[str, Any],
    paths: Iterable[str] = (),
    config: Config | None = None,
) -> Layers:
    """What a program says instead of a command line.

    Numbers of numpy and torch, paths and tuples may stand for plain numbers, texts and lists.

    Args:
        options: sections with a mapping each, and options by (dotted) name.
        paths: of YAML files, later ones win.
        config: whole, instead of files.

    Raises:
        UserError: a file cannot be read.
    """
    files = {} if config is None else _plain(config)
    layers = Layers(files=files, flags=_nest(options), dashes="")
    if problems := read_files(paths, layers):
        raise UserError(*problems)
    return layers


def check_own(extra: Sequence[Extra], given: Mapping[str, Any]) -> dict[str, Any]:
    """A command's own options as a program gives them, checked; for `Layers.own`.

    Raises:
        UserError: lists every wrong type.
    """
    values, problems = {item.name: item.default for item in extra}, []
    for item in extra:
        if item.name in given:
            option, value = Option(item.name, item.type, item.default, ""), _plain(given[item.name])
            try:
                values[item.name] = from_object(option, value)
            except (jsonargparse.ArgumentError, OverflowError):
                problems.append(wrong_type(option, value))
    if problems:
        raise UserError(*problems)
    return values


def _nest(options: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in options.items():
        section, dot, option = name.partition(".")
        plain = _plain(value)
        if (parent := mapping_with(name, options_by_name())) is not None:
            option, plain = parent.partition(".")[2], Entries({name[len(parent) + 1 :]: plain})
        in_section = bool(dot) and section in section_types()
        nested = merge(nested, {section: {option: plain}} if in_section else {name: plain})
    return nested


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy and torch
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
