"""What the terminal can't show ends nothing; colours and quiet."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.console import Console, is_terminal, print_out
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import print_error


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "caf\u00e9 \\ud83d\n"), ("ascii", "caf\\xe9 \\ud83d\n")]
)
def test_other_characters_are_written_as_escapes(tmp_path: Path, encoding: str, shown: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(stream=stream)
    console.open_log(tmp_path / "log.txt")
    console.say("caf\u00e9 \ud83d")
    console.close()
    assert stream.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert log.endswith("caf\u00e9 \\ud83d\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(tmp_path: Path, monkeypatch: Any) -> None:
    for stream, colours, painted in (
        (Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False),
    ):  # fmt: skip
        console = Console(stream=stream, colours=colours)
        console.open_log(tmp_path / "log.txt")
        console.warn("two: colons")
        console.say("step 1: warning: nothing to colour")
        shown = stream.getvalue()
        plain = "warning: two: colons\nstep 1: warning: nothing to colour\n"
        assert shown.replace("\x1b[1;33m", "").replace("\x1b[0m", "") == plain
        assert shown.count("\x1b") == (2 if painted else 0)
        console.close()
    assert "\x1b" not in (tmp_path / "log.txt").read_text()
    for environment, painted in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with monkeypatch.context() as patch:
            for name in ("NO_COLOR", "TERM"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr("sys.stderr", Terminal())
            print_error("error: a; b\n  c")
            text = sys.stderr.getvalue()  # type: ignore[attr-defined]
            assert text == ("\x1b[1;31merror:\x1b[0m" if painted else "error:") + " a; b\n  c\n"


class Gone(Terminal):
    """A stream that can't be written any more."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_run_whose_output_can_not_be_written_goes_on(
    tmp_path: Path, monkeypatch: Any, number: int
) -> None:
    stream = Gone(OSError(number, "gone"))
    monkeypatch.setattr("sys.stderr", stream)
    console = Console(stream=stream)
    if number == errno.ENOSPC:  # lines that stand nowhere else are not lost silently
        with pytest.raises(OSError, match="gone"):
            console.say("a line")
    console.open_log(tmp_path / "log.txt")
    with console.progress(2, "training") as progress:
        progress.advance()
        console.say("a line")
    console.close()
    assert "a line" in (tmp_path / "log.txt").read_text()


def test_a_closed_output_is_no_terminal_and_ends_nothing(monkeypatch: Any) -> None:
    stream = Terminal()
    stream.close()
    assert not is_terminal(stream) and not is_terminal(None) and is_terminal(Terminal())
    for closed in (stream, None):
        monkeypatch.setattr("sys.stdout", closed)
        monkeypatch.setattr("sys.stderr", closed)
        console = Console()
        console.warn("a line")
        with console.progress(1, "training") as progress:
            progress.advance()
    monkeypatch.setattr("sys.stdout", stream)
    with pytest.raises(UserError, match="standard output can't be written"):
        print_out("a result")


def test_a_quiet_console_still_logs(tmp_path: Path, capsys: Any) -> None:
    console = Console(quiet=True)
    console.open_log(tmp_path / "log.txt")
    console.say("a line")
    with console.progress(2, "work") as progress:
        progress.advance(2)
    assert capsys.readouterr().out == "" and "a line" in (tmp_path / "log.txt").read_text()


def test_a_bar_says_little_and_lines_say_all(capsys: Any, monkeypatch: Any) -> None:
    console = Console()
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        with console.progress(2, "training") as progress:
            progress.note("(to step 1: loss 2.5, peak 1 GiB)", "loss 2.5")
            progress.SECONDS_BETWEEN_LINES = 0.0
            progress.advance()
        assert ("1/2" in stream.getvalue() and "loss 2.5]" in stream.getvalue()) == stream.isatty()
    assert capsys.readouterr().out == "training 1/2  (to step 1: loss 2.5, peak 1 GiB)\n"


_WITH_CLOSED_STREAMS = """
import os, subprocess, sys
from t5_fsdp.console import occupy_closed_streams
for number in (0, 1):
    os.close(number)
occupy_closed_streams()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    os.write(1, b"what a library prints")
look = "import os; assert all(os.path.samestat(os.fstat(n), os.stat(os.devnull)) for n in (0, 1))"
subprocess.run([sys.executable, "-c", look], check=True)
"""


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    file = tmp_path / "file"
    subprocess.run([sys.executable, "-c", _WITH_CLOSED_STREAMS, str(file)], check=True)
    assert file.read_bytes() == b""
