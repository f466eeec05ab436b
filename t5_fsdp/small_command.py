"""What is round a command that needs no ranks: its output, its errors, and signals."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

from t5_fsdp.console import occupy_closed_streams, paint, print_out
from t5_fsdp.distributed import wants_colours
from t5_fsdp.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from t5_fsdp.files import as_user_error


class OneLineParser(argparse.ArgumentParser):
    """Refuses a wrong command line by a UserError, without a usage dump."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows the options")

    def print_help(self, file: object = None) -> None:
        """On standard output, whoever reads it."""
        with contextlib.suppress(BrokenPipeError):
            print_out(self.format_help().rstrip("\n"))


class _Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt no `Exception`, so that only `finally` meets it."""


def run_small(work: Callable[[], str | Iterable[str]]) -> int:
    """Print what `work` returns, or what it gives bit by bit.

    Returns:
        the exit code: 0 done, 2 user error, 128 + its number for a signal.
    """
    occupy_closed_streams()
    # A path, or a message about it, may hold what the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _terminated_by_an_exception():
            made = work()
            for text in [made] if isinstance(made, str) else made:
                print_out(text)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # `| head` has seen enough
        return EXIT_DONE
    except Exception as error:
        told = as_user_error(error)
        if not isinstance(told, UserError):
            raise
        print_error(told.render())
        return EXIT_USER_ERROR
    return EXIT_DONE


@contextlib.contextmanager
def _terminated_by_an_exception() -> Iterator[None]:
    """SIGTERM lets what is half done be taken back: a file being written, other processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_error(text: str) -> None:
    """What `UserError.render` gives, or a traceback, on standard error if there is one."""
    if sys.stderr is None:  # closed; print would take standard output instead
        return
    with contextlib.suppress(OSError):
        print(paint(text, sys.stderr) if wants_colours() else text, file=sys.stderr, flush=True)
