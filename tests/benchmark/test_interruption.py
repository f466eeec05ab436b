"""Nothing that the benchmark has started outlives it, and a signal is one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

_SECONDS = 60.0
# Two ranks that never answer, each with a helper in its process group.
_HANGING = """
import subprocess, sys, time
from t5_fsdp.benchmark.ranks import Ranks

def hang():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(300)

if __name__ == "__main__":
    ranks = Ranks(2, preload=())
    ranks.call(hang)
    ranks.results(300)
"""


def start(command: list[str], mark: str) -> subprocess.Popen:
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "BENCHMARK_TEST": mark}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def living(mark: str) -> list[int]:
    """Processes that inherited the mark, the dead ones that nobody has waited for aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = f"BENCHMARK_TEST={mark}".encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if is_marked:
            found.append(int(folder.name))
    return found


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def mark() -> str:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc")
    return uuid.uuid4().hex


def test_ranks_and_their_helpers_end_with_a_killed_caller(mark: str, tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(_HANGING, encoding="utf-8")
    process = start([str(script)], mark)
    # The caller, multiprocessing's tracker, two ranks with a helper each.
    wait_until(lambda: len(living(mark)) == 6, "the helpers did not start")
    process.kill()
    process.communicate()
    wait_until(lambda: not living(mark), "somebody is left")


TRAIN = ["--contestants", "bare", "--rounds", "1000", "--model_config",
         '{"d_model": 32, "d_ff": 64, "d_kv": 8, "vocab_size": 128}', "--source_tokens", "12",
         "--target_tokens", "6", "--global_batch_size", "4", "--warmup_steps", "0",
         "--steps", "1"]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "number", "begun"),
    [
        (TRAIN, signal.SIGINT, "round 2: bare"),
        pytest.param(["--mode", "startup"], signal.SIGINT, None, marks=pytest.mark.long),
        pytest.param(
            ["--suite", "gpu", "--tiny"], signal.SIGTERM, "unsharded: ", marks=pytest.mark.long
        ),
    ],
)
def test_ctrl_c_is_one_line_and_leaves_nobody(
    options: list[str], number: signal.Signals, begun: str | None, mark: str, tmp_path: Path
) -> None:
    """What was found before is in the files that were asked for."""
    files = [tmp_path / "found.json", tmp_path / "found.md"]
    process = start(
        ["scripts/benchmark.py", "--device", "cpu", "--json", str(files[0]),
         "--markdown", str(files[1]), *options],
        mark,
    )  # fmt: skip
    assert process.stdout is not None
    if begun is None:
        wait_until(lambda: len(living(mark)) >= 2, "no command was started")
    else:
        assert any(begun in line for line in process.stdout)
    # As a terminal does it: to all of the process group.
    os.killpg(process.pid, number)
    said, errors = process.communicate(timeout=_SECONDS)
    assert process.returncode == 128 + number
    assert errors == ""
    assert said.splitlines()[-1] == f"stopped by {number.name}"
    wait_until(lambda: not living(mark), "somebody is left")
    if begun is not None:
        results = json.loads(files[0].read_text(encoding="utf-8"))
        assert re.fullmatch(r"\d+ of (1000 rounds|16 rows)", results["unfinished"])
        done, of = results["unfinished"].split(" ", 1)
        # The signal may come between the two files, the JSON file being the first.
        told = {f"only {int(done) - behind} {of}" for behind in (0, 1)}
        text = files[1].read_text(encoding="utf-8")
        assert any(words in text for words in told)
    assert len(list(tmp_path.iterdir())) == (0 if begun is None else 2)
