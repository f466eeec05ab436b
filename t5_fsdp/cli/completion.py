"""`completion`: a script that has a shell complete commands, options and values."""

from __future__ import annotations

import argparse
import functools
import importlib
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from t5_fsdp.cli import dispatch
from t5_fsdp.cli.options import Extra, run_options
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import run_small

_USAGE = f"""usage: {dispatch.PROGRAM} completion bash|zsh|fish

Prints a script by which the shell completes commands, options and values:
  bash   eval "$({dispatch.PROGRAM} completion bash)"       in ~/.bashrc
  zsh    eval "$({dispatch.PROGRAM} completion zsh)"        in ~/.zshrc
  fish   {dispatch.PROGRAM} completion fish | source        in ~/.config/fish/config.fish"""


# The values that an option may have, where there are few; None: it takes none.
Choices = dict[str, list[str] | None]


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    return run_small(functools.partial(_script, argv))


def _script(argv: Sequence[str]) -> str:
    makers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if len(argv) == 1 and argv[0] in ("-h", "--help"):
        return _USAGE
    if len(argv) != 1 or argv[0] not in makers:
        given = " ".join(argv) or "nothing"
        raise UserError(f"completion got {given!r}; give one of {', '.join(makers)}")
    return makers[argv[0]]()


def _choices(kind: Any) -> list[str]:
    """The values that an option of this type may have, where there are few."""
    if kind is bool:
        return ["true", "false"]
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in typing.get_args(kind)]
    if typing.get_origin(kind) is list:
        return []
    found = [_choices(part) for part in typing.get_args(kind) if part is not type(None)]
    has_null = type(None) in typing.get_args(kind)
    return [value for part in found for value in part] + ["null"] * (has_null and any(found))


def _run_choices() -> Choices:
    """The options of a run, with their values where there are few."""
    return {f"--{name}": _choices(kind) for name, kind in run_options().items()}


def _own_choices() -> dict[str, Choices]:
    """Likewise by command, of those options that it alone has."""
    # By convention a command gives the list _EXTRA to parse_layers, or argparse its _parser().
    own: dict[str, Choices] = {}
    for name, command in dispatch.COMMANDS.items():
        module = importlib.import_module(command.module)
        extra: Sequence[Extra] = getattr(module, "_EXTRA", ())
        own[name] = {f"--{item.name}": _choices(item.type) for item in extra}
        if hasattr(module, "_parser"):
            own[name] |= _of_parser(module._parser())
        own[name] |= {"--help": None}
        if extra or command.module == "t5_fsdp.cli.prepare_data":
            own[name] |= {"--config": [], "--print_config": None}
    return own


def _of_parser(parser: argparse.ArgumentParser) -> Choices:
    # argparse tells its options in no other way than by the text of --help.
    return {
        option: None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _with_run_options(own: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The commands that take the options of a run."""
    return [name for name, options in own.items() if "--config" in options]


def _bash() -> str:
    run, own = _run_choices(), _own_choices()
    values = {**run, **{name: v for options in own.values() for name, v in options.items()}}
    cases = "".join(
        f"    {name}) words={shlex.quote(' '.join(choices))};;\n"
        for name, choices in values.items()
        if choices
    )
    commands = "".join(
        f"      {name}) words={shlex.quote(' '.join(options))};;\n" for name, options in own.items()
    )
    return f"""# {dispatch.PROGRAM} completion bash
_t5_fsdp() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={shlex.quote(" ".join([*dispatch.COMMANDS, "--help", "--version"]))}
  elif [ "${{COMP_WORDS[1]}}" = completion ]; then
    words='bash zsh fish'
  elif [ "${{current#-}}" != "$current" ]; then
    case "${{COMP_WORDS[1]}}" in
{commands}    esac
    case "${{COMP_WORDS[1]}}" in
      {"|".join(_with_run_options(own))}) words="$words "{shlex.quote(" ".join(run))};;
    esac
  else
    case "$before" in
{cases}    esac
  fi
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}}
complete -o default -F _t5_fsdp {dispatch.PROGRAM}"""


def _zsh() -> str:
    return "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + _bash()


def _fish() -> str:
    run, own = _run_choices(), _own_choices()
    start = f"complete -c {dispatch.PROGRAM}"
    lines = [
        f"{start} -n __fish_use_subcommand -f -a {name} -d {shlex.quote(command.help)}"
        for name, command in dispatch.COMMANDS.items()
    ]
    of_run = f"{start} -n '__fish_seen_subcommand_from {' '.join(_with_run_options(own))}'"
    lines += [_fish_option(of_run, name, choices) for name, choices in run.items()]
    for command, options in own.items():
        of_command = f"{start} -n '__fish_seen_subcommand_from {command}'"
        lines += [_fish_option(of_command, name, choices) for name, choices in options.items()]
    lines.append(f"{start} -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'")
    return "\n".join([f"# {dispatch.PROGRAM} completion fish", *lines])


def _fish_option(start: str, name: str, choices: Sequence[str] | None) -> str:
    if choices is None:
        return f"{start} -l {name[2:]}"
    values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else " -r"
    return f"{start} -l {name[2:]}{values}"
