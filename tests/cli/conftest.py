"""What the tests of several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_options


@pytest.fixture(scope="session")
def trained(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run; its tests only read it."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    code, _, err = pools(2).command("train", tiny_options(corpus, run_dir))
    assert code == 0, err
    return run_dir
