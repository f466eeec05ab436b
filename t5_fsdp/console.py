"""What a run tells its user: plain lines, warnings and progress bars, from rank 0 alone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from t5_fsdp.errors import UserError

_COLOURS = {"error": 31, "warning": 33, "done": 32}  # of ECMA-48


def paint(text: str, stream: TextIO) -> str:
    """The text with what it begins with, `error:` and the like, coloured where that is shown."""
    label, colon, rest = text.partition(":")
    if label not in _COLOURS or not colon or not is_terminal(stream):
        return text
    return f"\x1b[1;{_COLOURS[label]}m{label}:\x1b[0m{rest}"


def occupy_closed_streams() -> None:
    """Put /dev/null where a shell has closed standard input, output or error (`>&-`).

    Else the next file or pipe that is opened, here or in a process that is started, gets that
    number, and with it whatever a library prints.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def print_out(text: str) -> None:
    """A command's result on standard output.

    Raises:
        BrokenPipeError: nobody reads it any more (`| head`); what follows goes nowhere.
        UserError: it can't be written, e.g. onto a full disk behind `>`, or is closed.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer must not fail again at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"standard output can't be written ({reason})") from error


class Console:
    """Lines on the terminal and, once a run has a folder, in its log.txt.

    Args:
        enabled: only rank 0 speaks.
        stream: where lines go; standard error where standard output carries results.
        quiet: lines go to the log alone, and there are no bars.
        colours: on a terminal, see `paint`; the log has none.
    """

    def __init__(
        self,
        enabled: bool = True,
        stream: TextIO | None = None,
        quiet: bool = False,
        colours: bool = False,
    ) -> None:
        self.enabled, self.quiet, self._colours = enabled, quiet, colours
        self._stream = stream
        self._log: TextIO | None = None
        # Lines of before there was a log; a run that is refused never has one.
        self._early: list[str] = []

    def open_log(self, path: Path) -> None:
        """Repeat everything in `path`, also what was said before; a resumed run appends."""
        if self.enabled and self._log is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("a", encoding="utf-8", errors="backslashreplace")
            self._log.writelines(self._early)
            self._log.flush()
            self._early.clear()

    def close(self) -> None:
        """Close the log; lines still go to the terminal afterwards."""
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk shows up here again
                self._log.close()
            self._log = None

    def say(self, text: str = "") -> None:
        """One line, or several."""
        if self.enabled:
            if not self.quiet:
                self._print(text)
            self.record(text)

    def record(self, text: str) -> None:
        """Lines for the log alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = [f"{stamp} {line}\n" for line in text.split("\n")]
        if self._log is None:
            self._early += lines
            return
        with contextlib.suppress(OSError):  # a full disk must not end a run that can go on
            self._log.writelines(lines)
            self._log.flush()

    def warn(self, text: str) -> None:
        """Something that may surprise the user later but stops nothing."""
        self.say(f"warning: {text}")

    def _print(self, text: str) -> None:
        # Whoever read the output is gone (a closed terminal, `| head`): the run goes on.
        try:
            self._print_line(text)
        except (BrokenPipeError, ValueError):  # the latter of a closed file
            pass
        except OSError as error:
            # On a full disk behind `>` lines would be lost that stand nowhere else.
            if error.errno != errno.EIO and self._log is None:
                raise

    def _print_line(self, text: str) -> None:
        stream = self._stream or sys.stdout
        # An example in another script must not end a run on a terminal that can't show it.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        if self._colours:
            text = paint(text, stream)
        if is_terminal(stream):
            # tqdm moves a live bar out of the way of the line.
            from tqdm import tqdm

            tqdm.write(text, file=stream)
            return
        print(text, file=stream, flush=True)

    @contextmanager
    def progress(self, total: int, what: str, initial: int = 0) -> Iterator[Progress]:
        """A tqdm bar on a terminal; elsewhere a plain line every ten seconds or so."""
        progress = Progress(self, total, what, initial)
        try:
            yield progress
        finally:
            progress.close()


class Progress:
    """How far a loop has come; see `Console.progress`."""

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, console: Console, total: int, what: str, initial: int) -> None:
        self._console, self._total, self._what = console, total, what
        self._done = initial
        self._note = self._brief_note = ""
        self._last_line = time.monotonic()
        self._bar = None
        if console.enabled and not console.quiet and is_terminal(sys.stderr):
            from tqdm import tqdm

            with contextlib.suppress(OSError):
                self._bar = tqdm(total=total, desc=what, initial=initial, dynamic_ncols=True)

    def note(self, text: str, brief: str) -> None:
        """What stands behind the count from now on, e.g. loss and speed; beside a bar `brief`."""
        self._note, self._brief_note = text, brief

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more."""
        self._done = min(self._total, self._done + amount)
        if self._bar is not None:
            self._bar.set_postfix_str(self._brief_note, refresh=False)
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
                self._bar.update(amount)
        elif time.monotonic() - self._last_line >= self.SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            note_part = f"  {self._note}" if self._note else ""
            self._console.say(f"{self._what} {self._done}/{self._total}{note_part}")

    def close(self) -> None:
        """End the bar, also after an error."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads it; None, as Python has for a stream that was closed, is none."""
    if stream is None or not hasattr(stream, "isatty"):  # what a notebook may have in its place
        return False
    return not getattr(stream, "closed", False) and stream.isatty()
