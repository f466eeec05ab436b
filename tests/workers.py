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
from collections.abc import Iterator
from typing import Any

from t5_fsdp.benchmark.ranks import RankFailed, Ranks

COLLECTIVE_TIMEOUT_SECONDS = 20.0
CALL_TIMEOUT_SECONDS = 240.0  # compiling takes its time on busy cores
COMMANDS = ("train", "eval_rouge", "summarize", "export_hf")


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


def _run(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    finally:
        if gc.get_freeze_count() == 0:
            # Each command collects garbage at its end: a second less without what is imported.
            gc.collect()
            gc.freeze()


class Pool:
    """`world_size` worker processes, on the CPU also beside GPUs, with one thread each."""

    def __init__(self, world_size: int) -> None:
        self._ranks = Ranks(
            world_size,
            environment={"CUDA_VISIBLE_DEVICES": ""},
            threads=1,
            preload=("torch", "transformers", *(f"t5_fsdp.cli.{name}" for name in COMMANDS)),
            grace_seconds=2 * COLLECTIVE_TIMEOUT_SECONDS,
        )

    @property
    def is_closed(self) -> bool:
        """Also after a call that a rank did not answer."""
        return self._ranks.is_closed

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank."""
        try:
            return self._ranks.run(CALL_TIMEOUT_SECONDS, _run, function, *args)
        except RankFailed as failure:
            raise AssertionError(f"{function.__name__}: {failure}") from None

    def command(self, name: str, argv: list[str]) -> tuple[int, str, str]:
        """A command on every rank; their exit code, the same on all, and their output joined."""
        results = self.run(run_command, name, [str(word) for word in argv])
        assert len({code for code, _, _ in results}) == 1, results
        return results[0][0], "".join(r[1] for r in results), "".join(r[2] for r in results)

    def close(self) -> None:
        """End the workers."""
        self._ranks.close()
