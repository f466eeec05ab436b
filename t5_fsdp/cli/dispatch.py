"""`t5-fsdp COMMAND`: all commands under one name; `python -m t5_fsdp COMMAND` is the same."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from t5_fsdp.distributed import leave, print_once, read_launch
from t5_fsdp.errors import EXIT_DONE, EXIT_USER_ERROR, UserError

PROGRAM = "t5-fsdp"


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        module: whose `main` takes the arguments and gives the exit code; imported when called.
        help: one line.
        script: what its script in scripts/ is called; accepted here as well.
    """

    module: str
    help: str
    script: str | None = None


COMMANDS = {
    "train": Command("t5_fsdp.cli.train", "fine-tune a T5; also under torchrun"),
    "prepare-data": Command(
        "t5_fsdp.cli.prepare_data", "read, audit and tokenize the data once", "prepare_data"
    ),
    "evaluate": Command(
        "t5_fsdp.cli.eval_rouge", "ROUGE of a checkpoint, or of a predictions file", "eval_rouge"
    ),
    "summarize": Command("t5_fsdp.cli.summarize", "a summary of each text"),
    "export": Command(
        "t5_fsdp.cli.export_hf", "a checkpoint as a Hugging Face folder", "export_hf"
    ),
    "report": Command("t5_fsdp.cli.report", "one HTML page about a run, or about several"),
    "plan": Command("t5_fsdp.cli.plan", "memory and time of a run, before anyone pays for it"),
    "benchmark": Command("t5_fsdp.cli.benchmark", "this program and its peers on the same work"),
    "doctor": Command("t5_fsdp.cli.doctor", "what this machine lacks for a run"),
    "checkpoints": Command("t5_fsdp.checkpoint.__main__", "list and check a run's checkpoints"),
    "completion": Command("t5_fsdp.cli.completion", "completion for bash, zsh or fish"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command that is named first; its exit code.

    Its options are its own: `t5-fsdp train --help`.
    """
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print_once(overview())
        return EXIT_DONE
    if name == "--version":
        print_once(f"{PROGRAM} {_version()}")
        return EXIT_DONE
    command = find(name)
    if command is None:
        _print_error_once(UserError(_unknown(name)).render())
        return EXIT_USER_ERROR
    return importlib.import_module(command.module).main(list(rest))


def entry() -> NoReturn:
    """The console script; the process ends here."""
    _end(lambda: main(sys.argv[1:]))


def script(name: str) -> NoReturn:
    """The program of scripts/<name>.py; the process ends here."""
    command = find(name)
    assert command is not None
    module = command.module
    _end(lambda: importlib.import_module(module).main(sys.argv[1:]))


def _end(work: Callable[[], int]) -> NoReturn:
    try:
        code = work()
    except SystemExit as done:  # after a command's --help
        code = done.code if isinstance(done.code, int) else EXIT_USER_ERROR
    except KeyboardInterrupt:  # while modules are imported
        code = 128 + signal.SIGINT
    except UserError as error:  # e.g. a full disk behind `--help >`
        _print_error_once(error.render())
        code = EXIT_USER_ERROR
    leave(code)


def find(name: str) -> Command | None:
    """The command of that name, or whose script has it."""
    if name in COMMANDS:
        return COMMANDS[name]
    return next((command for command in COMMANDS.values() if command.script == name), None)


def overview() -> str:
    """What `--help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"usage: {PROGRAM} COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    lines += [
        "",
        f"`{PROGRAM} COMMAND --help` lists its options. On several processes:",
        f"  torchrun --standalone --nproc_per_node 2 -m {__name__.partition('.')[0]} train --config"
        " FILE.yaml",
    ]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(COMMANDS)}"
    return f"{PROGRAM} has no command {name!r}; {hint}"


def _version() -> str:
    # The package itself imports nothing, so it is there whatever was imported.
    return sys.modules[__name__.partition(".")[0]].__version__


def _print_error_once(text: str) -> None:
    from t5_fsdp.small_command import print_error

    if read_launch().rank == 0:
        print_error(text)
