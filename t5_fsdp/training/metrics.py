"""metrics.jsonl, trackers, status.json, and the sums over the steps since the last row."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from t5_fsdp.files import write_json
from t5_fsdp.training.trackers.tracker import Ending
from t5_fsdp.training.trackers.trackers import Trackers


@dataclass
class Window:
    """Sums over the steps since the last `train` row; saved with a checkpoint and resumed.

    Attributes:
        loss_sum: nats over the target tokens of the window, except `lost_tokens`.
        lost_tokens: target tokens of steps whose loss was not finite.
        skipped_steps: steps that changed no weight, their loss or gradient not being finite.
        seconds: with waiting for data, without evaluation and checkpoints.
    """

    steps: int = 0
    loss_sum: float = 0.0
    source_tokens: int = 0
    target_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    lost_tokens: int = 0
    skipped_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def real_tokens(self) -> int:
        return self.source_tokens + self.target_tokens

    def row(self) -> dict[str, Any]:
        """The window's part of a `train` row; its loss is null when no step's was finite."""
        counted = self.target_tokens - self.lost_tokens
        return {
            "loss": self.loss_sum / counted if counted else None,
            "source_tokens": self.source_tokens,
            "target_tokens": self.target_tokens,
            "padding_share": 1.0 - self.real_tokens / max(1, self.padded_tokens),
            "tokens_per_second": self.real_tokens / max(1e-9, self.seconds),
            "step_seconds": self.seconds / max(1, self.steps),
        }


class MetricsFile:
    """Appends rows to metrics.jsonl, one write a row; on None (other ranks) nothing happens."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One row; not finite numbers become null, since JSON has none."""
        if self._path is None:
            return
        row = {"kind": kind, "step": step}
        row.update({name: _json_number(value) for name, value in values.items()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _json_number(value: Any) -> Any:
    is_number = isinstance(value, float)
    return None if is_number and (value != value or abs(value) == float("inf")) else value


def _cut_torn_line(path: Path) -> None:
    # A killed process may leave half a line; appending to it would spoil two rows.
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))


class MetricsLog:
    """metrics.jsonl and the trackers of a run.

    Args:
        run_dir: None on the ranks that write nothing.
    """

    def __init__(self, run_dir: Path | None, trackers: Trackers) -> None:
        self._file = MetricsFile(None if run_dir is None else run_dir / "metrics.jsonl")
        self._trackers = trackers

    def write(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl, and its numbers as scalars."""
        self._file.write(kind, step, **row)
        self._trackers.log(step, {scalar_name(kind, name): row[name] for name in row})

    def add_text(self, name: str, step: int, markdown: str) -> None:
        """For the trackers alone."""
        self._trackers.log_text(step, name, markdown)

    def close(self, ending: Ending) -> None:
        """Hand over what trackers still keep back; the first call counts."""
        self._trackers.finish(ending)


def scalar_name(kind: str, name: str) -> str:
    """Under which trackers show a figure: by kind, a training's time and memory apart."""
    group = kind
    if kind == "train" and name.endswith("_seconds"):
        group = "time"
    elif kind == "train" and (name.endswith("_bytes") or name == "allocator_retries"):
        group = "memory"
    return f"{group}/{name}"


def write_status(
    run_dir: Path, state: str, step: int, checkpoint: str | None, message: str
) -> None:
    """status.json: state is running, finished, preempted or failed."""
    write_json(
        run_dir / "status.json",
        {"state": state, "step": step, "checkpoint": checkpoint, "message": message},
    )
