"""The command line and the files it names, read into layers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonargparse

from t5_fsdp.cli.options.checking import check_layers
from t5_fsdp.cli.options.help import help_text
from t5_fsdp.cli.options.layers import Entries, Layers, merge, merged_value, read_files
from t5_fsdp.cli.options.messages import wrong_type
from t5_fsdp.cli.options.scanning import Scan, scan_words
from t5_fsdp.cli.options.table import CONFIG_EXAMPLE, Option, options_by_name
from t5_fsdp.cli.options.values import from_text
from t5_fsdp.cli.yaml_files import scalar
from t5_fsdp.distributed import print_once
from t5_fsdp.errors import EXIT_DONE, UserError


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
    scan = scan_words(argv, own_options, takes_files=positionals_help is not None)
    if scan.help:
        text = help_text(
            command, description, own_options.values(), positionals_help, config_required
        )
        print_once(text)
        raise SystemExit(EXIT_DONE)

    layers = Layers(positionals=scan.positionals, print_config=scan.print_config)
    file_problems = read_files(scan.config_files, layers)
    if config_required and not scan.config_files and not scan.config_without_value:
        file_problems = [f"{command} needs --config FILE.yaml, e.g. --config {CONFIG_EXAMPLE}"]
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
        merged = merge(layers.files, layers.flags)
        more = check_layers(merged, layers.origins, check_values=complete)
        raise UserError(*problems, *more.problems)
    return layers


def _read_own(
    scan: Scan, extra: Sequence[Extra], own_options: Mapping[str, Option], layers: Layers
) -> list[str]:
    problems = []
    for item in extra:
        layers.own[item.name] = item.default
        if item.name in scan.own:
            text = scan.own[item.name]
            try:
                layers.own[item.name] = from_text(own_options[item.name], text)
            except jsonargparse.ArgumentError:
                problems.append(wrong_type(own_options[item.name], text, written=f"--{item.name}"))
        elif item.required and not any(f"--{item.name} " in text for text in scan.problems):
            problems.append(f"--{item.name} {item.metavar or 'VALUE'} is required: {item.help}")
    return problems


def _read_flag(name: str, text: str, layers: Layers) -> None:
    value: Any = text
    # What has the wrong type stays as it was written; `check_layers` reports it with the others.
    with contextlib.suppress(jsonargparse.ArgumentError):
        value = from_text(options_by_name()[name], text)
    section, dot, option = name.partition(".")
    if dot:
        layers.flags.setdefault(section, {})[option] = value
    else:
        layers.flags[name] = value


def _read_entries(name: str, texts: Mapping[str, str], layers: Layers) -> None:
    values = Entries({key: scalar(text) for key, text in texts.items()})
    section, _, option = name.partition(".")
    flags = layers.flags.setdefault(section, {})
    flags[option] = merged_value(flags[option], values) if option in flags else values
