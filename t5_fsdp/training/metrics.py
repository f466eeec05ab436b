"""What a run writes about itself: metrics.jsonl, trackers, status.json, a line of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from t5_fsdp.files import json_number, write_json
from t5_fsdp.quantities import memory_size
from t5_fsdp.training.trackers.tracker import Ending
from t5_fsdp.training.trackers.trackers import Trackers


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
        row.update({name: _as_json(value) for name, value in values.items()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _as_json(value: Any) -> Any:
    return json_number(value) if isinstance(value, float) else value


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


_WAITING = 0.1  # of a step for its data: said when it is more
_SLOW = 1.2  # times as long as the median: the rank is named when it is more


def describe(row: dict[str, Any]) -> str:
    """The figures of a `train` row that a user wants to see at once, and what is odd about them."""
    more = [f"peak {memory_size(row['peak_memory_bytes'])} a rank"]
    if row["mfu"] is not None:
        more.append(f"MFU {row['mfu']:.0%}")
    return ", ".join([*_loss_and_speed(row), *more, *_oddities(row)])


def describe_briefly(row: dict[str, Any]) -> str:
    """Of these what fits beside a progress bar."""
    return ", ".join([*_loss_and_speed(row), *_oddities(row)])


def _loss_and_speed(row: dict[str, Any]) -> list[str]:
    loss = "loss not finite" if row["loss"] is None else f"loss {row['loss']:.3f}"
    return [loss, f"{row['tokens_per_second']:,.0f} tokens/s"]


def _oddities(row: dict[str, Any]) -> list[str]:
    parts = []
    if row["data_seconds"] > _WAITING * row["step_seconds"]:
        parts.append(f"{row['data_seconds'] / row['step_seconds']:.0%} waiting for data")
    if row["allocator_retries"]:
        parts.append(f"{row['allocator_retries']} allocator retries")
    if (row["slowest_rank_ratio"] or 0.0) > _SLOW:
        parts.append(f"rank {row['slowest_rank']} takes {row['slowest_rank_ratio']:.1f} x as long")
    return parts


def write_status(
    run_dir: Path, state: str, step: int, checkpoint: str | None, message: str
) -> None:
    """status.json: state is running, finished, preempted or failed."""
    write_json(
        run_dir / "status.json",
        {"state": state, "step": step, "checkpoint": checkpoint, "message": message},
    )
