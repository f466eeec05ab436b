"""The command line and the YAML files of a run, turned into a checked `Config`.

jsonargparse knows the types and writes `--help`. It stops at the first problem, though, and a
user wants all of them at once; so each option is given to it alone, and what it refuses is
collected. Nothing here imports torch: `--help` answers at once.

    layers = parse_layers(argv, command="train", description="...", config_required=True)
    config = resolve(layers)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import docstring_parser
import jsonargparse

from t5_fsdp.cli.yaml_files import read_yaml, scalar, to_yaml
from t5_fsdp.config import BEST_METRICS, Config, DataConfig, normalize, to_dict, value_problems
from t5_fsdp.distributed import print_once
from t5_fsdp.errors import EXIT_DONE, UserError

_CONFIG_EXAMPLE = "configs/demo.yaml"


@dataclass(frozen=True)
class Extra:
    """An option of one command that is no part of the run's configuration.

    Args:
        name: without the leading dashes, e.g. `output_dir`.
        help: what it means; the default is added by `--help`.
        type: a type that jsonargparse understands, e.g. `str | None`, `bool`, `Literal[...]`.
        default: its value when it is not given.
        required: refuse a command line without it.
        metavar: how `--help` and messages call its value, e.g. `DIR`.
    """

    name: str
    help: str
    type: Any = str
    default: Any = None
    required: bool = False
    metavar: str | None = None


@dataclass
class Layers:
    """What files and command line say, before defaults and a checkpoint's configuration.

    Attributes:
        files: the YAML files of `--config`, merged; later files win.
        flags: the overrides of the command line, nested as in a file.
        own: values of the command's own options, defaults included.
        positionals: the FILE arguments.
        origins: "file, line N" of the options and sections in `files`, by dotted name.
        print_config: `--print_config` was given; `resolve` prints and ends the process.
        dashes: before the names of options in messages; none where a program gave them.
    """

    files: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    print_config: bool = False
    dashes: str = "--"

    @property
    def config_argument(self) -> str:
        """What to give a configuration by, for messages."""
        return "--config FILE.yaml" if self.dashes else "config"


class Entries(dict[str, Any]):
    """Some of a mapping's entries, which go into what the layers below say; see `_merge`."""


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


def parse_layers(
    argv: Sequence[str],
    *,
    command: str,
    description: str,
    extra: Sequence[Extra] = (),
    config_required: bool = False,
    positionals_help: str | None = None,
) -> Layers:
    """Read the command line and the files it names; the values are checked by `resolve`.

    Args:
        argv: arguments without the program's name.
        command: name of the command, e.g. `train`, for messages and `--help`.
        description: what the command does, for `--help`.
        extra: the command's own options.
        config_required: refuse a command line without `--config`.
        positionals_help: meaning of FILE arguments; None: the command takes none.

    Raises:
        UserError: the command line or a file cannot be read; wrong values that are known by
            then are listed as well.
        SystemExit: code 0, after `--help`.
    """
    own_options = {
        item.name: Option(
            item.name,
            item.type,
            item.default,
            item.help + (" Required." if item.required else ""),
            item.metavar,
        )
        for item in extra
    }
    scan = _scan(argv, own_options, takes_files=positionals_help is not None)
    if scan.help:
        text = _help(command, description, own_options.values(), positionals_help, config_required)
        print_once(text)
        raise SystemExit(EXIT_DONE)

    layers = Layers(positionals=scan.positionals, print_config=scan.print_config)
    file_problems = _read_files(scan.config_files, layers)
    if config_required and not scan.config_files and not scan.config_without_value:
        file_problems = [f"{command} needs --config FILE.yaml, e.g. --config {_CONFIG_EXAMPLE}"]
    own_problems = _read_own(scan, extra, own_options, layers)
    for name, text in scan.given.items():
        _read_flag(name, text, layers)
    for name, texts in scan.entries.items():
        _read_entries(name, texts, layers)
    problems = scan.problems + file_problems + own_problems
    if problems:
        # Values are judged together, so only where nothing they depend on is missing: no file,
        # and no checkpoint's configuration that the command has yet to read.
        complete = config_required and bool(scan.config_files) and not file_problems
        merged = _merge(layers.files, layers.flags)
        more = _check(merged, layers.origins, check_values=complete)
        raise UserError(*problems, *more.problems)
    return layers


def resolve(
    layers: Layers,
    base: dict[str, Any] | None = None,
    check_data: Callable[[DataConfig], Sequence[str]] | None = None,
    own_metrics: Collection[str] | None = (),
) -> Config:
    """The configuration of a run: defaults <- base <- files <- command line, checked.

    Sections are merged option by option; an option whose value is a mapping (model.config) is
    replaced as a whole, but for single entries of the command line (--model.config.d_model 64).

    Args:
        layers: from `parse_layers`.
        base: a configuration to start from, as nested dicts, e.g. that of a checkpoint.
        check_data: what can be said against the data section, e.g. `source_problems`.
        own_metrics: as of `value_problems`.

    Raises:
        UserError: lists every unknown option, wrong type, impossible value and missing file.
        SystemExit: code 0, after `--print_config` has printed the configuration.
    """
    found = look_over(layers, base, check_data, own_metrics)
    if found.problems:
        raise UserError(*found.problems)
    if layers.print_config:
        print_once(dump_yaml(found.config))
        raise SystemExit(EXIT_DONE)
    return found.config


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


def look_over(
    layers: Layers,
    base: dict[str, Any] | None = None,
    check_data: Callable[[DataConfig], Sequence[str]] | None = None,
    own_metrics: Collection[str] | None = (),
) -> Found:
    """As `resolve`, for who can go on with what there is: the problems are returned."""
    base = base or {}
    origins = dict.fromkeys(_names(base), "the checkpoint's configuration")
    for name in _names(layers.files):
        origins.pop(name, None)
    origins |= layers.origins
    for name in _names(layers.flags):
        if not isinstance(layers.flags.get(name), dict):
            origins.pop(name, None)
    merged = _merge(_merge(base, layers.files), layers.flags)
    if own_metrics is not None:  # the checkpoint was trained by a program that has it
        own_metrics = {*own_metrics, *_own_metric_of(base)}
    # What is printed may be meant for a machine that has the data.
    check_data = None if layers.print_config else check_data
    return _check(
        merged, origins, check_values=True, check_data=check_data, own_metrics=own_metrics
    )


def _own_metric_of(base: Mapping[str, Any]) -> set[str]:
    name = (base.get("evaluation") or {}).get("best_metric")
    return {name} - set(BEST_METRICS) if name else set()


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
    if problems := _read_files(paths, layers):
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
                values[item.name] = _from_object(option, value)
            except (jsonargparse.ArgumentError, OverflowError):
                problems.append(_wrong_type(option, value))
    if problems:
        raise UserError(*problems)
    return values


def _nest(options: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in options.items():
        section, dot, option = name.partition(".")
        plain = _plain(value)
        if (parent := _mapping_of(name, _options())) is not None:
            option, plain = parent.partition(".")[2], Entries({name[len(parent) + 1 :]: plain})
        in_section = bool(dot) and section in _sections()
        nested = _merge(nested, {section: {option: plain}} if in_section else {name: plain})
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
    for name, owner in {"": Config, **_sections()}.items():
        meanings = _meanings(owner)
        options = [
            dataclasses.replace(option, help=meanings.get(option.name.rpartition(".")[2], ""))
            for option in _options().values()
            if option.name.rpartition(".")[0] == name
        ]
        described.append(Section(name, str(owner.__doc__), options))
    return described


def run_options() -> dict[str, Any]:
    """The type of every option of a run, by its dotted name."""
    return {name: option.type for name, option in _options().items()}


def dump_yaml(config: Config) -> str:
    """The configuration as YAML that `--config` reads back to an equal one."""
    return to_yaml(to_dict(config))


# ---------------------------------------------------------------- the options of config.py


@functools.cache
def _sections() -> dict[str, type]:
    hints = typing.get_type_hints(Config)
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


@functools.cache
def _options() -> dict[str, Option]:
    """Every option of a run by its dotted name, in the order of config.py."""
    options = {}
    for section, owner in {"": Config, **_sections()}.items():
        hints = typing.get_type_hints(owner)
        defaults = owner()
        for item in dataclasses.fields(owner):
            if section or item.name not in _sections():
                name = f"{section}.{item.name}" if section else item.name
                default = getattr(defaults, item.name)
                options[name] = Option(name, hints[item.name], default, "")
    return options


def _meanings(owner: type) -> dict[str, str]:
    """The docstrings under the fields of a section, one line each."""
    parsed = docstring_parser.parse_from_object(owner)
    return {item.arg_name: " ".join((item.description or "").split()) for item in parsed.params}


# ---------------------------------------------------------------- the command line


@dataclass
class _Scan:
    """The command line, cut into options and values; values are still text.

    Attributes:
        entries: of options that take a mapping, those that were given one by one.
    """

    given: dict[str, str] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    config_without_value: bool = False
    positionals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    help: bool = False
    print_config: bool = False


def _scan(argv: Sequence[str], own_options: Mapping[str, Option], *, takes_files: bool) -> _Scan:
    scan = _Scan()
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        if word in ("-h", "--help"):
            scan.help = True
        elif word == "--print_config":
            scan.print_config = True
        elif word == "--":
            _take_files(waiting, scan, takes_files)
            break
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            has_value = bool(equals) or (bool(waiting) and not _looks_like_option(waiting[0]))
            if has_value and not equals:
                value = waiting.pop(0)
            _take_option(name, value if has_value else None, scan, own_options)
        elif word.startswith("-") and word != "-" and not _is_number(word):
            scan.problems.append(f"unknown option {word}; options are written --section.option")
        else:
            _take_files([word], scan, takes_files)
    return scan


def _looks_like_option(word: str) -> bool:
    return word.startswith("--") or word == "-h"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _take_files(words: Iterable[str], scan: _Scan, takes_files: bool) -> None:
    for word in words:
        if takes_files:
            scan.positionals.append(word)
        else:
            scan.problems.append(
                f"{_show(word)} belongs to no option; options are written --section.option value"
            )


def _take_option(
    name: str, value: str | None, scan: _Scan, own_options: Mapping[str, Option]
) -> None:
    known = {**_options(), **own_options}
    if name == "config":
        if value:
            scan.config_files.append(value)
        else:
            scan.config_without_value = True
            scan.problems.append(f"--config needs a value: a YAML file, e.g. {_CONFIG_EXAMPLE}")
    elif name == "print_config":
        scan.problems.append("--print_config takes no value")
    elif (parent := _mapping_of(name, known)) is not None:
        if value is None:
            scan.problems.append(f"--{name} needs a value")
        else:
            scan.entries.setdefault(parent, {})[name[len(parent) + 1 :]] = value
    elif name not in known:
        scan.problems.append(_unknown(name, known, written=f"--{name}"))
    elif value is None and known[name].type is not bool:
        scan.problems.append(f"--{name} needs a value: {_words(known[name].type)}")
    else:
        (scan.own if name in own_options else scan.given)[name] = "true" if value is None else value


def _mapping_of(name: str, known: Mapping[str, Option]) -> str | None:
    """The option whose value is a mapping with `name` as an entry, e.g. model.config."""
    return next(
        (key for key, item in known.items() if item.takes_mapping and name.startswith(f"{key}.")),
        None,
    )


def _read_files(paths: Iterable[str], layers: Layers) -> list[str]:
    problems: list[str] = []
    for path in paths:
        try:
            values, origins = read_yaml(path, "--config " if layers.dashes else "")
        except UserError as error:
            problems += error.problems
            continue
        layers.files = _merge(layers.files, values)
        layers.origins |= origins
    return problems


def _read_own(
    scan: _Scan, extra: Sequence[Extra], own_options: Mapping[str, Option], layers: Layers
) -> list[str]:
    problems = []
    for item in extra:
        layers.own[item.name] = item.default
        if item.name in scan.own:
            text = scan.own[item.name]
            try:
                layers.own[item.name] = _from_text(own_options[item.name], text)
            except jsonargparse.ArgumentError:
                problems.append(_wrong_type(own_options[item.name], text, written=f"--{item.name}"))
        elif item.required and not any(f"--{item.name} " in text for text in scan.problems):
            problems.append(f"--{item.name} {item.metavar or 'VALUE'} is required: {item.help}")
    return problems


def _read_flag(name: str, text: str, layers: Layers) -> None:
    value: Any = text
    # What has the wrong type stays as it was written; `_check` reports it with the others.
    with contextlib.suppress(jsonargparse.ArgumentError):
        value = _from_text(_options()[name], text)
    section, dot, option = name.partition(".")
    if dot:
        layers.flags.setdefault(section, {})[option] = value
    else:
        layers.flags[name] = value


def _read_entries(name: str, texts: Mapping[str, str], layers: Layers) -> None:
    values = Entries({key: scalar(text) for key, text in texts.items()})
    section, _, option = name.partition(".")
    flags = layers.flags.setdefault(section, {})
    flags[option] = _merged_value(flags[option], values) if option in flags else values


# ---------------------------------------------------------------- merging and checking


def _names(values: Mapping[str, Any]) -> list[str]:
    """Dotted names of what a layer gives, the sections themselves included."""
    names = []
    for key, value in values.items():
        names.append(str(key))
        if key in _sections() and isinstance(value, dict):
            names += [f"{key}.{option}" for option in value]
    return names


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if key in _sections() and isinstance(value, dict) and isinstance(below, dict):
            merged[key] = {
                **below,
                **{name: _merged_value(below.get(name), inner) for name, inner in value.items()},
            }
        elif key in _sections() and key in merged and not isinstance(below, dict):
            continue  # it is no section: reported when the values are checked
        else:
            merged[key] = value
    return merged


def _merged_value(below: Any, above: Any) -> Any:
    if below is None or not isinstance(above, Entries):
        return above
    if not isinstance(below, dict):
        return below  # reported when the values are checked
    merged = {**below, **above}
    return Entries(merged) if isinstance(below, Entries) else merged


def _check(
    merged: Mapping[str, Any],
    origins: Mapping[str, str],
    *,
    check_values: bool,
    check_data: Callable[[DataConfig], Sequence[str]] | None = None,
    own_metrics: Collection[str] | None = (),
) -> Found:
    """Build the configuration and list the problems; what can't be read keeps its default."""
    given, unsettled, problems = _flatten(merged, origins)
    # A default written as 3 is 3.0 as well, so that what is printed does not depend on its source.
    values = {
        name: float(option.default) for name, option in _options().items() if option.type is float
    }
    for name, value in given.items():
        try:
            values[name] = _from_object(_options()[name], value)
        except (jsonargparse.ArgumentError, OverflowError):
            unsettled.add(name)
            problems.append(_wrong_type(_options()[name], value) + _place(name, origins))
    config = normalize(_build(values))
    found = value_problems(config, own_metrics) if check_values else []
    in_doubt = [*unsettled, *found]
    if check_data is not None and not any(text.startswith("data.") for text in in_doubt):
        found = [*found, *(text for text in check_data(config.data) if text not in found)]
    for problem in found:
        # A default stands in for what could not be read; a complaint about it would mislead.
        if not any(_mentions(problem, name) for name in unsettled):
            leading = re.match(r"[\w.]*\w", problem)
            problems.append(problem + _place(leading[0] if leading else "", origins))
    return Found(config, problems, [name for name in _options() if name in unsettled])


def _flatten(
    merged: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Known options by dotted name, the names that are in doubt, and the problems found."""
    given: dict[str, Any] = {}
    unsettled: set[str] = set()
    problems: list[str] = []
    unknown: list[str] = []
    absent = [name for name in _sections() if name not in merged]
    for key, value in merged.items():
        if key in _sections():
            if isinstance(value, dict):
                for key_inside, inner in value.items():
                    name = f"{key}.{key_inside}"
                    if name in _options():
                        given[name] = dict(inner) if isinstance(inner, Entries) else inner
                    else:
                        unknown.append(name)
            else:
                unsettled |= {name for name in _options() if name.startswith(f"{key}.")}
                problems.append(_not_a_section(key, value) + _place(key, origins))
        elif key in _options() and "." not in key:
            given[key] = value
        elif isinstance(value, dict):
            problems.append(_unknown_section(str(key), value) + _place(key, origins))
            # It may be any section that is not there, and that one's defaults are not meant.
            in_doubt = tuple(f"{name}." for name in absent)
            unsettled |= {name for name in _options() if name.startswith(in_doubt)}
        else:
            unknown.append(str(key))
    for name in unknown:
        section, dot, option = name.partition(".")
        if dot and name in _options():
            message = f"unknown option {name}; in a file write {section}: {{{option}: ...}}"
        else:
            message = _unknown(name, _options())
        problems.append(message + _place(name, origins))
        unsettled |= {likely for likely in _alike(name, _options()) if likely not in given}
    return given, unsettled, problems


def _build(values: Mapping[str, Any]) -> Config:
    config = Config()
    for name, value in values.items():
        section, dot, option = name.partition(".")
        setattr(getattr(config, section) if dot else config, option or section, value)
    return config


def _mentions(problem: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", problem) is not None


# ---------------------------------------------------------------- types, by jsonargparse


@functools.cache
def _parser(name: str, kind: Any) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, default_env=False)
    parser.add_argument(f"--{name}", type=kind)
    return parser


def _from_text(option: Option, text: str) -> Any:
    """The value that a text of the command line stands for.

    Raises:
        jsonargparse.ArgumentError: it has another type.
    """
    if option.takes_mapping and not text.strip():
        raise jsonargparse.ArgumentError(None, "no mapping")
    parsed = _parser(option.name, option.type).parse_args([f"--{option.name}={text}"])
    return _from_object(option, _pick(parsed, option.name))


def _from_object(option: Option, value: Any) -> Any:
    """A value from YAML, checked; a whole number becomes a float where one is wanted.

    Raises:
        jsonargparse.ArgumentError: it has another type.
    """
    if isinstance(value, str) and option.takes_text:
        return value  # jsonargparse would read "null" or "[a]" once more
    keys_are_text = not isinstance(value, dict) or all(isinstance(key, str) for key in value)
    if (value is None and not option.takes_null) or not keys_are_text:
        raise jsonargparse.ArgumentError(None, "wrong type")
    if option.takes_mapping:
        if not isinstance(value, dict):
            raise jsonargparse.ArgumentError(None, "no mapping")
        return value  # likewise for the texts in it
    nested: Any = value
    for part in reversed(option.name.split(".")):
        nested = {part: nested}
    return _pick(_parser(option.name, option.type).parse_object(nested), option.name)


def _pick(parsed: jsonargparse.Namespace, name: str) -> Any:
    value = parsed[name]
    return value.as_dict() if isinstance(value, jsonargparse.Namespace) else value


# ---------------------------------------------------------------- messages


def _words(kind: Any) -> str:
    """A type in words a user knows."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in args)
    if origin is list:
        return "a list"
    if origin is dict:
        return 'a mapping with text keys, e.g. {"dropout_rate": 0.0}'
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return {**plain, type(None): "null"}.get(kind, str(kind))


def _wrong_type(option: Option, value: Any, written: str | None = None) -> str:
    advice = _words(option.type)
    if isinstance(value, bool | int | float) and option.takes_text:
        advice += f", in quotes: {_quoted(value)}"
    elif isinstance(value, str) and typing.get_origin(option.type) is Literal:
        advice += _did_you_mean(difflib.get_close_matches(value, typing.get_args(option.type), 1))
    return f"{written or option.name} is {_show(value)}; give {advice}"


def _quoted(value: Any) -> str:
    return f'"{json.dumps(value)}"'


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _place(name: str, origins: Mapping[str, str]) -> str:
    return f" ({origins[name]})" if name in origins else ""


def _not_a_section(name: str, value: Any) -> str:
    example = next(option for option in _options() if option.startswith(f"{name}."))
    what = "empty" if value is None else _show(value)
    return f"section {name} is {what}; give its options indented below it, e.g. {example}"


def _unknown_section(name: str, values: Mapping[str, Any]) -> str:
    """Of a mapping in a file; sections with a similar name, else with these options."""
    near = difflib.get_close_matches(name.lower(), _sections(), 1)
    if not near and len(name) > 2:
        near = [section for section in _sections() if section.startswith(name.lower())]
    if not near and values:
        near = [
            section
            for section in _sections()
            if all(f"{section}.{option}" in _options() for option in values)
        ]
    advice = _did_you_mean(near[:3]) or f"; the sections are {', '.join(_sections())}"
    return f"unknown section {name}{advice}"


def _unknown(name: str, known: Mapping[str, Option], written: str | None = None) -> str:
    section, _, option = name.partition(".")
    message = f"unknown option {written or name}"
    parent = next((key for key in known if name.startswith(f"{key}.")), None)
    if name in _sections():
        example = next(key for key in known if key.startswith(f"{name}."))
        return f"{message}: {name} is a section; give its options, e.g. --{example} VALUE"
    if parent and known[parent].takes_mapping:
        entry = name[len(parent) + 1 :]
        return f"{message}; in a file write {entry} below {parent.partition('.')[2]}:"
    dashes = "--" if written else ""
    alike = [f"{dashes}{likely}" for likely in _alike(name, known)]
    if alike:
        return message + _did_you_mean(alike)
    if not option and (near := difflib.get_close_matches(name, _sections(), 1)):
        return message + _did_you_mean([f"section {near[0]}"])
    if option and section in _sections():
        names = [key.partition(".")[2] for key in known if key.startswith(f"{section}.")]
        return f"{message}; section {section} has {', '.join(names)}"
    return f"{message}; --help lists all options"


def _alike(name: str, known: Mapping[str, Any]) -> list[str]:
    """Known options that the user may have meant, at most three."""
    plain = name.replace("-", "_").lower()
    same_end = [key for key in known if key.rpartition(".")[2] == plain.rpartition(".")[2]]
    if plain in known:
        return [plain]
    section = plain.partition(".")[0]
    if same_end and ("." not in plain or section not in _sections()):
        return same_end[:3]
    close = difflib.get_close_matches(plain, known, 1, cutoff=0.8)
    if close:
        return close
    ends = {key.rpartition(".")[2]: key for key in known}
    near = difflib.get_close_matches(plain.rpartition(".")[2], ends, 1, cutoff=0.8)
    return [ends[end] for end in near] or same_end[:3]


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


# ---------------------------------------------------------------- printing


def _as_called(command: str) -> str:
    """How the user called it: by its own name, or as `t5-fsdp NAME`."""
    from t5_fsdp.cli.dispatch import PROGRAM, find

    program, *words = sys.argv
    through_dispatch = Path(program).name == PROGRAM or Path(program).match("t5_fsdp/__main__.py")
    return f"{PROGRAM} {words[0]}" if through_dispatch and words and find(words[0]) else command


def _help(
    command: str,
    description: str,
    own_options: Iterable[Option],
    positionals_help: str | None,
    config_required: bool,
) -> str:
    files = " [FILE ...]" if positionals_help else ""
    config = "--config FILE.yaml" if config_required else "[--config FILE.yaml]"
    parser = jsonargparse.ArgumentParser(
        prog=command,
        usage=f"{_as_called(command)} {config} [--section.option VALUE ...]{files}",
        # A positional argument would be listed as required.
        description=description + (f" FILE: {positionals_help}" if positionals_help else ""),
        default_env=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help=f"Options of the run, e.g. {_CONFIG_EXAMPLE}; of several files the later ones win.",
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        default=argparse.SUPPRESS,
        help="Print the whole configuration, checked, as YAML for --config, and stop.",
    )
    for option in own_options:
        _add_to_help(parser, option)
    for section in described_sections():
        title = f"{section.name or 'the run'}: {section.meaning}"
        group = parser.add_argument_group(title.rstrip(".").replace("%", "%%"))
        for option in section.options:
            _add_to_help(group, option)
    return parser.format_help()


def _add_to_help(target: Any, option: Option) -> None:
    action = target.add_argument(
        f"--{option.name}",
        type=option.type,
        default=option.default,
        help=option.help.replace("%", "%%"),
        **({"metavar": option.metavar} if option.metavar else {}),
    )
    # jsonargparse adds a `--name+` that appends to lists; our command line has no such form.
    action.option_strings = [text for text in action.option_strings if not text.endswith("+")]
