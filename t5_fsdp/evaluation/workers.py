"""Work on many texts, spread over processes; the results don't depend on their number."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from t5_fsdp.console import Console
from t5_fsdp.spawning import without_main

# A worker needs about half a second to start; below this many items one process is done earlier.
MIN_ITEMS_FOR_WORKERS = 300
MAX_CHUNK_ITEMS = 256

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_workers(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    processes: int,
    console: Console | None = None,
    what: str = "",
) -> list[_Result]:
    """`function` of each item, in their order.

    Args:
        function: of a module's top level; it travels by pickle, as do items and results.
        processes: how many work at the same time. Few items are worked on in this process anyway.
        console: tells how far it is.
        what: the items' name there.

    Raises:
        ValueError: processes is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; give at least 1")
    # Daemonic processes may not have children.
    alone = processes == 1 or multiprocessing.current_process().daemon
    if len(items) < MIN_ITEMS_FOR_WORKERS or alone:
        results: Iterator[_Result] = map(function, items)
    else:
        results = _in_workers(function, items, processes)
    found = []
    with (console or Console(enabled=False)).progress(len(items), what) as progress:
        for result in results:
            found.append(result)
            progress.advance()
    return found


def _in_workers(
    function: Callable[[_Item], _Result], items: Sequence[_Item], processes: int
) -> Iterator[_Result]:
    num_done = 0
    chunk_size = min(MAX_CHUNK_ITEMS, math.ceil(len(items) / (8 * processes)))
    # The caller has CUDA, gloo or NCCL threads alive, which a fork would copy half-way.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool:
            with without_main(function):  # `map` hands out all work, for which it starts them
                results = pool.map(function, items, chunksize=chunk_size)
            for result in results:
                num_done += 1
                yield result
    except BrokenProcessPool as error:
        # Predictions may have cost hours of generation: losing a helper must not lose them.
        warnings.warn(f"work goes on in one process: {error}", RuntimeWarning, stacklevel=2)
        yield from map(function, items[num_done:])


def _start_worker() -> None:
    # Ctrl-C reaches the whole terminal group; the caller alone answers it and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    """A pool's worker outlives a killed caller for ever, and holds its output pipes open."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)
