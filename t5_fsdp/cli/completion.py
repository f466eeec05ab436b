"""`completion`: a script that has a shell complete commands, options and values."""

from __future__ import annotations

import importlib
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from t5_fsdp.cli import dispatch
from t5_fsdp.cli.options import Extra, run_options
from t5_fsdp.cli.process import print_error
from t5_fsdp.errors import EXIT_DONE, EXIT_USER_ERROR, UserError

_USAGE = f"""usage: {dispatch.PROGRAM} completion bash|zsh|fish

Prints a script by which the shell completes commands, options and values:
  bash   eval "$({dispatch.PROGRAM} completion bash)"       in ~/.bashrc
  zsh    eval "$({dispatch.PROGRAM} completion zsh)"        in ~/.zshrc
  fish   {dispatch.PROGRAM} completion fish | source        in ~/.config/fish/config.fish"""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    makers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if len(argv) == 1 and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return EXIT_DONE
    if len(argv) != 1 or argv[0] not in makers:
        given = " ".join(argv) or "nothing"
        problem = f"completion got {given!r}; give one of {', '.join(makers)}"
        print_error(UserError(problem).render())
        return EXIT_USER_ERROR
    print(makers[argv[0]](), end="")
    return EXIT_DONE


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


def _run_choices() -> dict[str, list[str]]:
    """The options of a run, with their values where there are few."""
    return {f"--{name}": _choices(kind) for name, kind in run_options().items()}


def _own_choices() -> dict[str, dict[str, list[str]]]:
    """Likewise by command, of those options that it alone has."""
    own: dict[str, dict[str, list[str]]] = {}
    for name, command in dispatch.COMMANDS.items():
        # By convention the list that a command gives to parse_layers.
        extra: Sequence[Extra] = getattr(importlib.import_module(command.module), "_EXTRA", ())
        own[name] = {f"--{item.name}": _choices(item.type) for item in extra}
        own[name] |= {"--help": []}
        if extra or command.module == "t5_fsdp.cli.prepare_data":
            own[name] |= {"--config": [], "--print_config": []}
    return own


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
complete -o default -F _t5_fsdp {dispatch.PROGRAM}
"""


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
    return "\n".join([f"# {dispatch.PROGRAM} completion fish", *lines]) + "\n"


def _fish_option(start: str, name: str, choices: Sequence[str]) -> str:
    if name in ("--help", "--print_config"):
        return f"{start} -l {name[2:]}"
    values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else " -r"
    return f"{start} -l {name[2:]}{values}"
