"""What the tests of the report share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from t5_fsdp.config import Config, to_dict
from tests.run_folders import METRICS, audit, prediction, usual_rows, write_evaluation

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run's folder.

    Its arguments: the folder's name, rows of metrics.jsonl, state, options by dotted name, and
    whether it was evaluated.
    """

    def make(
        name: str = "run",
        rows: Iterable[dict[str, Any]] | None = None,
        state: str = "finished",
        evaluated: bool = True,
        **options: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = to_dict(Config())
        config["run_dir"] = str(folder)
        for option, value in options.items():
            section, _, key = option.partition(".")
            config[section][key] = value
        found = usual_rows() if rows is None else list(rows)
        last = max((row["step"] for row in found), default=0)
        write = {
            "config.yaml": yaml.safe_dump(config, sort_keys=False),
            "metrics.jsonl": "".join(f"{json.dumps(row)}\n" for row in found),
            "status.json": json.dumps({"state": state, "step": last, "message": ""}),
            "environment.json": json.dumps({"device": "NVIDIA A100", "world_size": 8}),
            "data_audit.json": json.dumps(audit()),
        }
        for file, text in write.items():
            (folder / file).write_text(text)
        if evaluated:
            lead = {name: {"fmeasure": 0.2} for name in METRICS}
            write_evaluation(folder, "test", 500, map(prediction, range(45)), lead_baseline=lead)
        return folder

    return make
