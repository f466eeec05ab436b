"""A pool of ranks kept alive over the test session: importing torch once is enough.

`Pool.run(function, *args)` calls `function(*args)` on each rank, in the environment that torchrun
would give it, and returns the results in the order of ranks. Functions and arguments travel by
pickle, so functions are module-level ones. A rank that hangs is a failure: collectives and the
pool itself have a timeout.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator
from typing import Any

COLLECTIVE_TIMEOUT_SECONDS = 20.0
CALL_TIMEOUT_SECONDS = 240.0  # compiling takes its time on busy cores


def _serve(rank: int, world_size: int, connection: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo on the CPU, also beside GPUs

    import torch
    import torch.distributed as dist
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    for command in ("train", "eval_rouge", "summarize", "export_hf"):
        importlib.import_module(f"t5_fsdp.cli.{command}")
    while (message := connection.recv()) is not None:
        function, args, port = message
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        if dist.is_initialized():  # a command that failed leaves its group up
            dist.destroy_process_group()
        if gc.get_freeze_count() == 0:
            # Each command collects garbage at its end: a second less without what is imported.
            gc.collect()
            gc.freeze()


@contextlib.contextmanager
def joined_world() -> Iterator[Any]:
    """On a rank of the pool: the world, with its process group up."""
    from t5_fsdp.distributed import enter_world, read_launch

    world = enter_world(read_launch())
    world.connect(COLLECTIVE_TIMEOUT_SECONDS)
    yield world
    world.disconnect()


def run_command(name: str, argv: list[str]) -> tuple[int, str, str]:
    """On a rank of the pool: a command's main(); (exit code, standard output, standard error)."""
    main = importlib.import_module(f"t5_fsdp.cli.{name}").main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pool:
    """`world_size` worker processes."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank."""
        port = _free_port()
        for connection in self._connections:
            connection.send((function, args, port))
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(CALL_TIMEOUT_SECONDS):
                self.close(force=True)
                raise TimeoutError(f"rank {rank} did not answer {function.__name__}")
            results.append(connection.recv())
        failures = [text for good, text in results if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def command(self, name: str, argv: list[str]) -> tuple[int, str, str]:
        """A command on every rank; their exit code, the same on all, and their output joined."""
        results = self.run(run_command, name, [str(word) for word in argv])
        assert len({code for code, _, _ in results}) == 1, results
        return results[0][0], "".join(r[1] for r in results), "".join(r[2] for r in results)

    def close(self, force: bool = False) -> None:
        """End the workers."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            if not force and process.is_alive():
                connection.send(None)
        for process in self._processes:
            process.join(0 if force else 20)
            if process.is_alive():
                process.kill()
