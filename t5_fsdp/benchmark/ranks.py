"""Processes that are kept alive: importing torch and finding each other is done once.

`Ranks(2)` starts two; `call(function, *args)` runs `function(*args)` on each of them in the
environment that torchrun would give it, and `results` collects what they return. Meanwhile a
function may `report` something and wait to be told to go on, see `reports` and `go_on`. Functions
and arguments travel by pickle, so functions are module-level ones.

Ranks are no part of the caller's process group: Ctrl-C reaches the caller alone, which ends them
with all that they have started; and they end by themselves when it is gone, however that came.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from t5_fsdp.errors import is_out_of_memory

_REPORT, _RESULT, _FAILURE = "report", "result", "failure"
_SECONDS_TO_LEAVE = 20.0
_SHOWN_CHARACTERS = 2000
# Of a rank itself; set before the function it runs is called.
_connection: Any = None


class RankFailed(Exception):
    """A rank raised an exception, died, or did not answer in time.

    Attributes:
        out_of_memory: a GPU's memory, or the machine's, was too small.
        reason: one line.
    """

    def __init__(self, reason: str, details: str = "", out_of_memory: bool = False) -> None:
        super().__init__(details or reason)
        self.reason, self.details, self.out_of_memory = reason, details, out_of_memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.details, self.out_of_memory)


def report(value: Any) -> None:
    """On a rank: hand `value` to who called, and wait until it says `go_on`."""
    _connection.send((_REPORT, value))
    _connection.recv()


class Ranks:
    """`world_size` processes; use as a context manager, or `close` them.

    Args:
        world_size: how many.
        environment: variables that are set before anything is imported.
        threads: of each process for torch; None: as torch chooses.
        preload: modules that are imported before the first call.
        quiet: what libraries print goes to a file; its end is shown when a rank dies.
        grace_seconds: for the other ranks, when one has failed.
    """

    def __init__(
        self,
        world_size: int,
        *,
        environment: Mapping[str, str] | None = None,
        threads: int | None = None,
        preload: Sequence[str] = ("torch", "transformers"),
        quiet: bool = False,
        grace_seconds: float = 1.0,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._grace_seconds = grace_seconds
        self._output: Any = None
        if quiet:
            self._output = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115
        self.world_size = world_size
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        output = None if self._output is None else self._output.name
        setup = (dict(environment or {}), threads, tuple(preload), output)
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, world_size, theirs, *setup), daemon=False
                )
                with _ctrl_c_ignored():  # until it has left the caller's process group
                    process.start()
                theirs.close()  # so that a rank that dies is heard of at once
                self._connections.append(ours)
                self._processes.append(process)
        except BaseException:
            self.close(force=True)
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(force=error[0] is not None)

    @property
    def is_closed(self) -> bool:
        """After `close`, also by what has failed."""
        return not self._connections

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin to run `function(*args)` on every rank.

        Raises:
            RankFailed: one has ended since it last answered; all are stopped.
        """
        port = _free_port()
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((function, args, port))
            except ConnectionError:
                failure = RankFailed(f"rank {rank} died ({self._exit_code(rank)})", self._said())
                self.close(force=True)
                raise failure from None

    def go_on(self) -> None:
        """After a round of `reports`."""
        for connection in self._connections:
            connection.send(None)

    def reports(self, timeout_seconds: float) -> list[Any]:
        """What every rank reports next, in the order of ranks.

        Raises:
            RankFailed: one has failed or ended instead; if one does not answer, all are stopped.
        """
        return self._receive(_REPORT, timeout_seconds)

    def results(self, timeout_seconds: float) -> list[Any]:
        """What the function returned on every rank, in the order of ranks.

        Raises:
            RankFailed: as `reports`.
        """
        return self._receive(_RESULT, timeout_seconds)

    def run(self, timeout_seconds: float, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`call` and `results`; raises what they do."""
        self.call(function, *args)
        return self.results(timeout_seconds)

    def _receive(self, kind: str, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        values: list[Any] = []
        failures: list[RankFailed] = []
        all_answered = True
        for rank, connection in enumerate(self._connections):
            left = deadline - time.monotonic()
            if failures:  # the others may wait for the one that failed
                left = min(left, self._grace_seconds)
            try:
                if not connection.poll(max(0.0, left)):
                    raise RankFailed(f"rank {rank} did not answer within {timeout_seconds:.0f} s")
                found, value = connection.recv()
            except (EOFError, ConnectionError):
                code = self._exit_code(rank)
                value = RankFailed(f"rank {rank} died ({code})", self._said(), code == "signal 9")
                found, all_answered = _FAILURE, False
            except RankFailed as failure:
                found, value, all_answered = _FAILURE, failure, False
            if found not in (kind, _FAILURE):
                raise AssertionError(f"rank {rank} gave a {found} where a {kind} was due")
            (failures if found == _FAILURE else values).append(value)
        if failures and not all_answered:
            self.close(force=True)
        if failures:
            # A rank that ran out of memory is why the others failed.
            raise next((f for f in failures if f.out_of_memory), failures[0])
        return values

    def _exit_code(self, rank: int) -> str:
        self._processes[rank].join(_SECONDS_TO_LEAVE)
        code = self._processes[rank].exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _said(self) -> str:
        """The end of what the ranks have printed."""
        if self._output is None:
            return ""
        self._output.seek(0)
        return self._output.read().decode("utf-8", "replace")[-_SHOWN_CHARACTERS:]

    def close(self, force: bool = False) -> None:
        """End the processes; `force` does not wait for them."""
        for connection in self._connections:
            if not force:
                with contextlib.suppress(OSError):
                    connection.send(None)
        if force:
            self._kill(self._processes)
        for process in self._processes:
            process.join(_SECONDS_TO_LEAVE)
        self._kill([process for process in self._processes if process.is_alive()])
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        if self._output is not None:
            self._output.close()

    @staticmethod
    def _kill(processes: Sequence[Any]) -> None:
        """With their helpers, e.g. those that compile."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have had a group of its own yet


class Turns:
    """A function on ranks that reports when it is ready, and then once for each turn it gets.

    Args:
        ranks: that have nothing else to do.
        timeout_seconds: to get ready, for a turn, and to end.
        function: see `report`.
        deadline: of `time.monotonic()`, behind which nothing is waited for.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_seconds: float,
        function: Callable[..., Any],
        *args: Any,
        deadline: float = math.inf,
    ) -> None:
        self.ranks = ranks
        self._timeout_seconds, self._deadline = timeout_seconds, deadline
        self._is_ready = False
        ranks.call(function, *args)

    def _seconds(self) -> float:
        return max(0.0, min(self._timeout_seconds, self._deadline - time.monotonic()))

    def take(self) -> list[Any]:
        """Let it do the next part; what each rank reports of it.

        Raises:
            RankFailed: as `Ranks.reports`.
        """
        if not self._is_ready:
            self.ranks.reports(self._seconds())
            self._is_ready = True
        self.ranks.go_on()
        return self.ranks.reports(self._seconds())

    def end(self) -> list[Any]:
        """After the last turn: what it returned on each rank.

        Raises:
            RankFailed: as `Ranks.reports`.
        """
        self.ranks.go_on()
        return self.ranks.results(self._seconds())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(
    rank: int,
    world_size: int,
    connection: Any,
    environment: dict[str, str],
    threads: int | None,
    preload: Sequence[str],
    output: str | None,
) -> None:
    """The life of a rank: imports, then one call after the other."""
    global _connection
    _connection = connection
    _leave_process_group_of_caller()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    if output is not None:
        with open(output, "ab") as file:
            for stream in (1, 2):  # also of what is not Python
                os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    for name in preload:
        importlib.import_module(name)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while (message := connection.recv()) is not None:
            function, args, port = message
            os.environ.update(launch_variables(rank, world_size, port))
            connection.send(_outcome(function, args))
            _leave_process_group()
    # Without the interpreter's own teardown, see `distributed.leave`.
    os._exit(0)


def launch_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process on a machine of its own, without being torchrun's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _outcome(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, Any]:
    try:
        return _RESULT, function(*args)
    except BaseException as error:
        text = traceback.format_exc()
        lines = str(error).strip().split("\n")
        reason = f"{type(error).__name__}: {lines[0][:200]}"
        return _FAILURE, RankFailed(reason, text, is_out_of_memory(error))


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """A process that is started meanwhile ignores it from its first instruction on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_process_group_of_caller() -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os.killpg(0, signal.SIGKILL)


def _leave_process_group() -> None:
    """Of a function that failed, or of a library that leaves its group up."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
