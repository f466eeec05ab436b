"""The options of a run, as config.py declares them, and what `--help` says of each."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docstring_parser

from t5_fsdp.config import Config

CONFIG_EXAMPLE = "configs/demo.yaml"


@dataclass(frozen=True)
class Option:
    """One option as jsonargparse needs it.

    Args:
        name: dotted for those of a section, e.g. `train.epochs`.
        type: as in config.py.
        default: its value when it is not given.
        help: what it means.
        metavar: how `--help` calls its value.
    """

    name: str
    type: Any
    default: Any
    help: str
    metavar: str | None = None

    @property
    def takes_mapping(self) -> bool:
        return dict in (self.type, typing.get_origin(self.type))

    @property
    def takes_text(self) -> bool:
        return not self.takes_mapping and str in (self.type, *typing.get_args(self.type))

    @property
    def takes_null(self) -> bool:
        return type(None) in (self.type, *typing.get_args(self.type))


@functools.cache
def section_types() -> dict[str, type]:
    hints = typing.get_type_hints(Config)
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


@functools.cache
def options_by_name() -> dict[str, Option]:
    """Every option of a run by its dotted name, in the order of config.py."""
    options = {}
    for section, owner in {"": Config, **section_types()}.items():
        hints = typing.get_type_hints(owner)
        defaults = owner()
        for item in dataclasses.fields(owner):
            if section or item.name not in section_types():
                name = f"{section}.{item.name}" if section else item.name
                default = getattr(defaults, item.name)
                options[name] = Option(name, hints[item.name], default, "")
    return options


def _meanings(owner: type) -> dict[str, str]:
    """The docstrings under the fields of a section, one line each."""
    parsed = docstring_parser.parse_from_object(owner)
    return {item.arg_name: " ".join((item.description or "").split()) for item in parsed.params}


@dataclass(frozen=True)
class Section:
    """Options of a run that belong together.

    Attributes:
        name: as in a file; empty for the options that belong to no section.
        meaning: a sentence.
        options: with their meanings, in the order of config.py.
    """

    name: str
    meaning: str
    options: list[Option]


def described_sections() -> list[Section]:
    """Every option of a run with its meaning, by sections, in the order of config.py."""
    described = []
    for name, owner in {"": Config, **section_types()}.items():
        meanings = _meanings(owner)
        options = [
            dataclasses.replace(option, help=meanings.get(option.name.rpartition(".")[2], ""))
            for option in options_by_name().values()
            if option.name.rpartition(".")[0] == name
        ]
        described.append(Section(name, str(owner.__doc__), options))
    return described


def run_options() -> dict[str, Any]:
    """The type of every option of a run, by its dotted name."""
    return {name: option.type for name, option in options_by_name().items()}


def mapping_with(name: str, known: Mapping[str, Option]) -> str | None:
    """The option whose value is a mapping with `name` as an entry, e.g. model.config."""
    return next(
        (key for key, item in known.items() if item.takes_mapping and name.startswith(f"{key}.")),
        None,
    )
