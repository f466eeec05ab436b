"""Work spread over processes: the same results, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from t5_fsdp.evaluation import workers
from t5_fsdp.evaluation.rouge import score_pairs
from t5_fsdp.evaluation.workers import MIN_ITEMS_FOR_WORKERS, map_in_workers
from tests.odd_texts import some_pairs

REPOSITORY = Path(__file__).parents[2]


def with_process(item: int) -> tuple[int, int]:
    return item, os.getpid()


def doubled(item: int) -> int:
    return 2 * item


def test_processes_below_one_are_refused():
    with pytest.raises(ValueError, match="processes is 0"):
        map_in_workers(doubled, [1], processes=0)


def test_several_processes_give_the_same_in_the_same_order():
    items = list(range(MIN_ITEMS_FOR_WORKERS + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = map_in_workers(with_process, items, processes=2)
    assert [item for item, _ in found] == items
    assert os.getpid() not in {process for _, process in found}


def test_scores_of_several_processes_are_the_same():
    predictions, references = some_pairs(MIN_ITEMS_FOR_WORKERS)
    single = score_pairs(predictions, references)
    several = score_pairs(predictions, references, processes=2)
    np.testing.assert_array_equal(single.fmeasure, several.fmeasure)
    np.testing.assert_array_equal(single.precision, several.precision)


def test_few_items_start_no_process(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("a pool"))
    assert map_in_workers(doubled, range(20), processes=4) == list(range(0, 40, 2))
    assert map_in_workers(doubled, [], processes=4) == []


def test_lost_workers_lose_no_result(monkeypatch):
    class DyingPool:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def map(self, function, items, chunksize):
            yield from map(function, items[:chunksize])
            raise BrokenProcessPool("a worker died")

    items = list(range(MIN_ITEMS_FOR_WORKERS))
    monkeypatch.setattr(workers, "ProcessPoolExecutor", DyingPool)
    with pytest.warns(RuntimeWarning, match="a worker died"):
        found = map_in_workers(doubled, items, processes=2)
    assert found == [2 * item for item in items]


PROGRAM = """
print("main", __name__, flush=True)
from t5_fsdp.evaluation.workers import map_in_workers
assert map_in_workers(len, ["ab"] * 300, processes=2) == [2] * 300
print("done", __spec__, globals().get("__file__"), flush=True)
"""


@pytest.mark.parametrize("by_name", [True, False])
def test_a_program_without_a_guard_runs_once(tmp_path, by_name):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "error", program if by_name else "-"],
        input=None if by_name else PROGRAM,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    name = program if by_name else "<stdin>"
    assert (done.stdout, done.stderr) == (f"main __main__\ndone None {name}\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_workers_end_when_the_caller_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import multiprocessing, time
            from concurrent.futures import ProcessPoolExecutor
            from t5_fsdp.evaluation.workers import _start_worker
            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start_worker)
                pool.submit(int).result()
                print("ready", flush=True)
                time.sleep(60)
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    caller = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert caller.stdout.readline() == "ready\n"
        started = time.monotonic()
        caller.send_signal(signal.SIGKILL)
        # The worker holds the other end of the pipe: it closes when the worker is gone.
        caller.communicate(timeout=10)
        assert time.monotonic() - started < 10
    finally:
        caller.kill()
