"""Commands as their users start them: real processes under torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT


def torchrun(
    script: str, argv: Sequence[Any], num_processes: int = 2, flags: Sequence[str] = ()
) -> list[str]:
    """The command line of `scripts/<script>.py` on that many processes of this machine.

    Args:
        flags: of torchrun itself.
    """
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", *flags,
        "--nproc_per_node", str(num_processes), str(ROOT / f"scripts/{script}.py"),
        *map(str, argv),
    ]  # fmt: skip


def cpu_environment() -> dict[str, str]:
    """This process's environment without its GPUs."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def run(command: Sequence[str], timeout_seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with its output as text."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, env=cpu_environment()
    )


class Launched:
    """A torchrun command that runs beside the test, with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.launcher = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=cpu_environment()
            )
        self._seen: set[int] = set()

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def workers(self) -> list[int]:
        """Process ids of the ranks that run, in the order of their start."""
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        with contextlib.suppress(OSError):
            found = [int(pid) for pid in children.read_text().split()]
            self._seen.update(found)
            return found
        return []

    def wait_until(self, condition: Callable[[], Any], seconds: float = 90) -> bool:
        """Whether the condition held before the command ended by itself.

        Raises:
            TimeoutError: neither happened.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.has_ended:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} s; its output:\n{self.output}")
            time.sleep(0.005)
        return True

    def wait(self, seconds: float = 90) -> int:
        """The launcher's exit code, once all of its processes are gone.

        Raises:
            TimeoutError: some are still there.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.has_ended and not any(map(is_running, self._seen)):
                return self.launcher.wait()
            time.sleep(0.02)
        raise TimeoutError(f"still running after {seconds} s; its output:\n{self.output}")

    def end(self) -> None:
        """Kill what is left."""
        self.workers()
        for pid in (self.launcher.pid, *self._seen):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


@contextlib.contextmanager
def launched(command: Sequence[str], log: Path) -> Iterator[Launched]:
    """Run a torchrun command beside the test; nothing of it outlives the block."""
    process = Launched(command, log)
    try:
        yield process
    finally:
        process.end()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not merely waited for by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
