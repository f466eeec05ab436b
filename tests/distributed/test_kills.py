"""Processes that are killed, and launches that follow; `tests.kill_harness` is the long form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kill_harness import Campaign


def test_killed_runs_go_on_and_end_as_unbroken_ones(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    campaign = Campaign(corpus, tmp_path, seed=3)
    code, _, err = pools(2).command("train", campaign.options("unbroken"))
    assert code == 0, err
    campaign.run(2, tmp_path / "unbroken", print)
    assert len(campaign.kills) == 2 and campaign.num_finished == 1
