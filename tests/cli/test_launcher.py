"""Our torchrun: its processes have the last word, and the exit code is theirs."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from t5_fsdp.cli.launcher import main
from tests.launch import launched


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Ends with the code that it is given; with "wait", as a run does that is interrupted."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    print('preempted: saved', flush=True)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "if sys.argv[1] == '2' and os.environ['RANK'] == '1':\n"
        "    time.sleep(60)\n"  # has to be stopped
        "if sys.argv[1] == '2':\n"
        "    print('error: mend it', file=sys.stderr)\n"
        "if sys.argv[1] != 'wait':\n"
        "    sys.exit(int(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    return path


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_exit_code_is_that_of_the_processes(
    script: Path,
    code: int,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Set first, so that what torchrun sets is undone.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert main(["--standalone", "--nproc_per_node", "2", str(script), str(code)]) == code
    assert capfd.readouterr().err == ("error: mend it\n" if code == 2 else "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_end_without_a_word_is_told_of(script: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--standalone", "--nproc_per_node", "2", str(script), "9"]) == 1
    assert "failed (exitcode: 9)" in caplog.text


def test_an_interrupted_run_has_the_last_word(script: Path, tmp_path: Path) -> None:
    flags = ["--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, "-m", "t5_fsdp.cli.launcher", *flags, str(script), "wait"]
    with launched(command, tmp_path / "log") as process:
        assert process.wait_until(lambda: process.output.count("ready") == 2)
        os.kill(process.launcher.pid, signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert process.output.splitlines()[-1] == "preempted: saved"
