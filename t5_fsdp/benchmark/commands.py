"""Commands that are measured from outside, as a shell would run them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from t5_fsdp.errors import UserError

_SHOWN_CHARACTERS = 2000
_OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Finished:
    """What a command took.

    Attributes:
        seconds: from its start to its end.
        peak_memory_bytes: largest resident memory of its process.
    """

    seconds: float
    peak_memory_bytes: int


@contextlib.contextmanager
def started(
    command: Sequence[str], output: int | IO[bytes], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Python with these arguments; whatever it has left running is ended behind it.

    Args:
        command: what follows `python`.
        output: gets what it writes to standard error; its standard output goes nowhere.
        environment: beside this process's own.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **_OFFLINE, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches the benchmark alone
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Finished:
    """Run Python with these arguments to its end.

    Raises:
        UserError: it refused what it was given, with its own words.
        RuntimeError: it failed; with what it said.
    """
    began = time.perf_counter()
    with started(command, subprocess.PIPE, environment) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode("utf-8", "replace")
        # Of this process alone: `subprocess` tells nothing of memory.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise failure(os.path.basename(command[0]), process.returncode, said)
    unit = 1 if sys.platform == "darwin" else 1024
    return Finished(seconds, usage.ru_maxrss * unit)


def failure(name: str, code: int | None, said: str) -> Exception:
    """What a command's end comes to: the user's error where it says one."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    # torchrun ends with its own code, whatever its processes end with.
    if errors:
        return UserError(f"{errors[0].removeprefix('error: ')} (so {name} says)")
    return RuntimeError(f"{name} failed (code {code}):\n{said[-_SHOWN_CHARACTERS:]}")
