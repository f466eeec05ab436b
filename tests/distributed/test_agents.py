"""Two launchers that meet by c10d rendezvous, as on two machines."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from tests.conftest import tiny_options
from tests.distributed.test_training import DROPOUT, losses
from tests.launch import launched, run, torchrun


def agent(port: int, argv: list[str]) -> list[str]:
    """The command line of one of two nodes, with one process."""
    flags = [
        "--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_id", "agents",
        "--rdzv_endpoint", f"127.0.0.1:{port}",
    ]  # fmt: skip
    command = torchrun("train", argv, 1, flags)
    command.remove("--standalone")
    return command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.long
def test_two_agents_train_as_one_with_two_processes(corpus: Path, tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    done = run(torchrun("train", tiny_options(corpus, together, **DROPOUT)))
    assert done.returncode == 0, done.stderr
    argv = tiny_options(corpus, apart, **DROPOUT)
    port = free_port()
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(launched(agent(port, argv), tmp_path / f"agent-{number}.log"))
            for number in range(2)
        ]
        for one in agents:
            assert one.wait() == 0, one.output
    assert losses(apart) == losses(together) and len(losses(apart)) == 12
    # One of them has rank 0, and speaks.
    assert sorted("done: trained 12 steps" in one.output for one in agents) == [False, True]
