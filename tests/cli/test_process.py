"""How a command ends: one rank tells why, all end with the same code."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from typing import Any

import torch

from t5_fsdp.cli.process import Session, run
from t5_fsdp.errors import UserError

_SECONDS_UNTIL_A_HANG = 30.0


def _end(kind: str, faulty_rank: int) -> tuple[int, list[tuple[str, str]], str]:
    """On a rank of the pool: a command in which one rank ends early while the others wait."""
    ended: list[tuple[str, str]] = []

    def command(session: Session) -> None:
        world = session.enter_world()
        session.on_early_end = lambda state, message: ended.append((state, message))
        if world.rank == faulty_rank:
            if kind == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(_SECONDS_UNTIL_A_HANG)
            if kind == "memory":
                torch.empty(2**50, dtype=torch.uint8)
            raise UserError("the value is wrong") if kind == "user" else RuntimeError("a defect")
        world.wait_for("never set")

    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = run(command)
    return code, ended, err.getvalue()


def test_signal_to_one_rank_before_training_ends_all_as_preempted(pools: Any) -> None:
    for faulty_rank in (0, 1):
        began = time.monotonic()
        first, second = pools(2).run(_end, "signal", faulty_rank)
        assert (first[0], second[0]) == (75, 75)
        assert [state for state, _ in first[1]] == ["preempted"] and second[1] == []
        assert first[2] + second[2] == ""
        assert time.monotonic() - began < _SECONDS_UNTIL_A_HANG


def test_one_rank_reports_a_user_error_of_any_rank(pools: Any) -> None:
    for faulty_rank in (0, 1):
        results = pools(2).run(_end, "user", faulty_rank)
        assert [code for code, _, _ in results] == [2, 2]
        assert [ended for _, ended, _ in results if ended] == [[("failed", "the value is wrong")]]
        assert "".join(err for _, _, err in results) == "error: the value is wrong\n"


def test_memory_that_runs_out_anywhere_is_one_line_of_advice(pools: Any) -> None:
    results = pools(2).run(_end, "memory", 1)
    assert [code for code, _, _ in results] == [2, 2]
    (line,) = "".join(err for _, _, err in results).splitlines()
    assert line.startswith("error: out of memory on rank 1, outside of training steps, asking for ")
    assert "asking for 1125899906842624 bytes; " in line and "evaluation.batch_tokens" in line


def test_a_defect_has_code_one_and_names_the_last_checkpoint(pools: Any) -> None:
    results = pools(2).run(_end, "defect", 1)
    assert [code for code, _, _ in results] == [1, 1]
    text = results[1][2]
    assert results[0][2] == ""
    assert "RuntimeError: a defect" in text and "last good checkpoint: none" in text
