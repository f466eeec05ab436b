"""Commands as their users start them: real processes under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.conftest import ROOT


def torchrun(script: str, argv: Sequence[Any], num_processes: int = 2) -> list[str]:
    """The command line of `scripts/<script>.py` on that many processes of this machine."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
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
