"""What is round the small commands: closed pipes, signals, a closed standard error."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from t5_fsdp.cli import dispatch
from t5_fsdp.errors import UserError
from t5_fsdp.small_command import print_error, run_small
from tests.conftest import ROOT

PROGRAM = [sys.executable, "-m", "t5_fsdp"]


@pytest.mark.parametrize(
    "words",
    ["--help", "--version", "train --help", "report --help", "benchmark --help",
     "completion bash", "checkpoints --help", "train --config configs/demo.yaml --print_config",
     "doctor --peers false"],
)  # fmt: skip
def test_a_reader_that_has_gone_ends_a_command_quietly(words: str) -> None:
    command = subprocess.Popen(
        [*PROGRAM, *words.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(60) == 0
    command.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_doctor_quietly(number: int, code: int) -> None:
    command = subprocess.Popen(
        [*PROGRAM, "doctor", "--peers", "false"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert command.stdout is not None
    assert command.stdout.readline().startswith(b"ok       Python")
    command.send_signal(number)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (code, b"")


def test_a_key_pressed_while_modules_are_imported_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "leave", sys.exit)
    monkeypatch.setattr(sys, "argv", ["t5-fsdp", "train"])
    monkeypatch.setattr(dispatch, "importlib", SimpleNamespace(import_module=interrupted))
    for end in (dispatch.entry, lambda: dispatch.script("eval_rouge")):
        with pytest.raises(SystemExit) as caught:
            end()
        assert caught.value.code == 130


def test_a_terminated_command_takes_back_the_file_that_it_writes(tmp_path: Path) -> None:
    program = (
        "import time, sys\nfrom pathlib import Path\n"
        "from t5_fsdp.files import write_atomically\n"
        "from t5_fsdp.small_command import run_small\n"
        "def texts():\n    yield 'a'\n    print('now', flush=True)\n    time.sleep(60)\n"
        "def work():\n    write_atomically(Path(sys.argv[1]), texts())\n    return ''\n"
        "sys.exit(run_small(work))\n"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "page.html"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert command.stdout is not None and command.stdout.readline() == b"now\n"
    assert list(tmp_path.iterdir())
    command.terminate()
    assert command.wait(20) == 143
    command.stdout.close()
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_texts_come_one_by_one_until_an_error(capsys: Any) -> None:
    def work() -> Any:
        yield "first"
        assert capsys.readouterr().out == "first\n"
        yield "second"
        raise UserError("third")

    assert run_small(work) == 2
    assert capsys.readouterr() == ("second\n", "error: third\n")


def test_what_a_user_can_mend_about_a_file_is_a_line(tmp_path: Path, capsys: Any) -> None:
    assert run_small(lambda: (tmp_path / ("x" * 300)).read_text()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "File name too long" in err and err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        run_small(lambda: str(1 / 0))


def test_an_error_without_a_standard_error_is_no_result(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    print_error("error: a")
    assert capsys.readouterr().out == ""


def test_an_output_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    import resource

    def allow_no_file_to_grow() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    for words in ("--version", "completion bash", "train --help"):
        with (tmp_path / "output").open("w") as output:
            done = subprocess.run(
                [*PROGRAM, *words.split()],
                cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True,
                preexec_fn=allow_no_file_to_grow,
            )  # fmt: skip
        told = "error: standard output can't be written (File too large)\n"
        assert (done.returncode, done.stderr) == (2, told)
