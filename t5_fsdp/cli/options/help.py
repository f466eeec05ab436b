"""What `--help` prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonargparse

from t5_fsdp.cli.options.table import CONFIG_EXAMPLE, Option, described_sections


def _as_called(command: str) -> str:
    """How the user called it: by its own name, or as `t5-fsdp NAME`."""
    from t5_fsdp.cli.dispatch import PROGRAM, find

    program, *words = sys.argv
    through_dispatch = Path(program).name == PROGRAM or Path(program).match("t5_fsdp/__main__.py")
    return f"{PROGRAM} {words[0]}" if through_dispatch and words and find(words[0]) else command


def help_text(
    command: str,
    description: str,
    own_options: Iterable[Option],
    positionals_help: str | None,
    config_required: bool,
) -> str:
    """All options of a command, those of a run by sections."""
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
        help=f"Options of the run, e.g. {CONFIG_EXAMPLE}; of several files the later ones win.",
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
