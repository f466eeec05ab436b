"""What is round a command that only reads files and prints: no ranks, no torch."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from t5_fsdp.errors import EXIT_DONE, EXIT_USER_ERROR, UserError


class OneLineParser(argparse.ArgumentParser):
    """Refuses a wrong command line by a UserError, without a usage dump."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows the options")


def run_small(work: Callable[[], str]) -> int:
    """Print what `work` returns; the exit code (0 done, 2 user error)."""
    # A path, or a message about it, may hold what the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _print(work())
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has seen enough; nor must the interpreter's end try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk behind `>`
        raise UserError(f"standard output can't be written ({error.strerror})") from error
