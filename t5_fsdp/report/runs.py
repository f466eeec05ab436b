"""A run's folder, read into memory; needs no torch."""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from t5_fsdp.checkpoint.format import is_checkpoint, step_of
from t5_fsdp.checkpoint.listing import Listed, list_checkpoints
from t5_fsdp.checkpoint.retention import best_steps
from t5_fsdp.config import EvaluationConfig
from t5_fsdp.errors import UserError

# Well beyond float32, in which a run computes.
_LARGEST, _SMALLEST = 1e60, 1e-60
Row = Mapping[str, Any]
Curve = list[tuple[int, float | None]]  # (step, value); None where it is not known or not finite

_TEXT_TAG = "tag:yaml.org,2002:str"
METRICS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}


@dataclass
class Evaluated:
    """One evaluation of a split.

    Attributes:
        label: of what was evaluated, e.g. step-00000500.
        step: of that checkpoint, if it has one.
        rouge: rouge.json.
        comparison: comparison.json, if there is one.
        written_seconds: when, since 1970.
    """

    split: str
    label: str
    step: int | None
    folder: Path
    rouge: dict[str, Any]
    comparison: dict[str, Any] | None
    written_seconds: float

    @property
    def predictions(self) -> Path:
        """Its predictions.jsonl, which may be missing."""
        return self.folder / "predictions.jsonl"

    @property
    def where(self) -> str:
        """In words, e.g. "test, step 500"."""
        return f"{self.split}, {self.label if self.step is None else f'step {self.step:,}'}"

    def fmeasure(self, metric: str, bound: str = "") -> float | None:
        """Of a metric, 0 to 1; bound "_low" or "_high": of its interval. None where not known."""
        scores = as_mapping(as_mapping(self.rouge.get("scores")).get(metric))
        return as_number(scores.get(f"fmeasure{bound}"))


@dataclass
class Run:
    """What a run's folder says.

    Attributes:
        name: unlike those of the other runs on the page.
        config, status, environment, audit: its files; empty where there is none.
        train, validation, saves: rows of metrics.jsonl by kind, in the order of steps; of a step
            logged twice the last one.
        evaluations: the oldest first.
        checkpoints: what is left of them in the folder.
        notices: what is odd about its files, a line each.
    """

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    saves: list[Row] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    checkpoints: list[Listed] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def best_metric(self) -> str:
        """By which a checkpoint of the run is the best."""
        metric = as_mapping(self.config.get("evaluation")).get("best_metric")
        return metric if metric in (*METRICS, "loss") else EvaluationConfig.best_metric

    @property
    def best_validation(self) -> Row | None:
        """The validation row that is best by `best_metric`."""
        rows = {str(row["step"]): row for row in self.validation}
        scores = {
            step: {self.best_metric: math.nan if value is None else value}
            for step, row in rows.items()
            for value in [as_number(row.get(self.best_metric))]
        }
        best = best_steps(scores, self.best_metric, None)
        return rows[str(best[0])] if best else None

    def option(self, name: str) -> Any:
        """An option of its configuration by its dotted name; None where that lacks it."""
        section, _, option = name.partition(".")
        value = self.config.get(section)
        return as_mapping(value).get(option) if option else value

    def newest(self, split: str) -> Evaluated | None:
        """The evaluation of a split that was written last."""
        return next((e for e in reversed(self.evaluations) if e.split == split), None)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders, with names that differ; one that is given twice comes once.

    Raises:
        UserError: one is no run's folder, or a file in it can't be read.
    """
    different = list({_real(folder): folder for folder in folders}.values())
    names = _names([_real(folder) for folder in different])
    return [read_run(folder, name) for folder, name in zip(different, names, strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    """The run of a folder.

    Raises:
        UserError: there is none, or a file in it can't be read.
    """
    _check_run(folder)
    notices: list[str] = []
    rows = _read_metrics(folder / "metrics.jsonl", notices)
    return Run(
        folder,
        _real(folder).name if name is None else name,
        config=_read_config(folder / "config.yaml", notices),
        status=_read_object(folder / "status.json", notices),
        environment=_read_object(folder / "environment.json", notices),
        audit=_read_object(folder / "data_audit.json", notices),
        train=_of_kind(rows, "train"),
        validation=_of_kind(rows, "validation"),
        saves=_of_kind(rows, "checkpoint"),
        evaluations=_read_evaluations(folder / "evaluation", notices),
        checkpoints=_list_checkpoints(folder),
        notices=notices,
    )


def _real(folder: Path) -> Path:
    """As Path.resolve, which raises on links that go round in a circle."""
    return Path(os.path.realpath(folder))


def curve(rows: Iterable[Row], name: str) -> Curve:
    """A figure by step; empty where no row has it."""
    points = [(row["step"], as_number(row.get(name))) for row in rows]
    return points if any(value is not None for _, value in points) else []


def as_number(value: Any) -> float | None:
    """The value if it is a number that a run may have; None for NaN and for what is beyond.

    Products and sums of such numbers stay finite; what is smaller than any of them is 0.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be larger than any float.
    if not is_number or not abs(value) <= _LARGEST:
        return None
    return value if abs(value) >= _SMALLEST else 0.0


def as_mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def is_run(folder: Path) -> bool:
    """Whether a run has written into the folder."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "status.json"))


def _check_run(folder: Path) -> None:
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UserError(f"--run {folder} {what}; give the folder of a run (its run_dir)")
    if is_run(folder):
        return
    if is_checkpoint(folder):
        raise UserError(
            f"--run {folder} is a checkpoint; give the folder of its run"
            + (f", {folder.parent.parent}" if folder.parent.name == "checkpoints" else "")
        )
    raise UserError(
        f"--run {folder} holds no run: there is neither metrics.jsonl nor status.json; give the "
        "run_dir of a run"
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Of each folder the shortest end of its path that no other one has."""
    names = []
    for folder in folders:
        parts = folder.parts
        others = [other.parts for other in folders if other != folder]
        length = next(
            (n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)),
            len(parts),
        )
        names.append("/".join(parts[-length:]))
    return names


# ---------------------------------------------------------------- files


def _read_text(path: Path, notices: list[str]) -> str | None:
    """Of a regular file, without a mark of byte order; None where there is none.

    Args:
        notices: told of bytes that are no UTF-8, which become U+FFFD.

    Raises:
        UserError: it can't be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would keep its reader waiting
            raise UserError(f"{path} is no regular file; move it away")
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"{path} can't be read ({error.strerror})"
        raise UserError(f"{reason}; mend that, or move it away") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        notices.append(f"{path.name} has bytes that are no UTF-8; they are shown as \ufffd")
        return content.decode("utf-8", errors="replace")


def _read_object(path: Path, notices: list[str]) -> dict[str, Any]:
    """A JSON object; an empty one where there is no file.

    Raises:
        UserError: it can't be read.
    """
    text = _read_text(path, notices)
    if text is None:
        return {}
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); mend it, or move it away") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is no JSON object; mend it, or move it away")
    return value


class _PlainLoader(yaml.SafeLoader):
    """Refuses what a run never writes, and what takes a page apart: loops, and keys but text."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag != _TEXT_TAG:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} has a name that is no text")
        return super().construct_mapping(node, deep)


def _read_config(path: Path, notices: list[str]) -> dict[str, Any]:
    text = _read_text(path, notices)
    if text is None:
        return {}
    try:
        value = yaml.load(text, Loader=_PlainLoader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML ({error}); mend it, or move it away") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no options; mend it, or move it away")
    return value


def _read_metrics(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    """All rows in the order of the file.

    Raises:
        UserError: a line is no row, unless it is a last one that a killed process left behind.
    """
    lines = (_read_text(path, notices) or "").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            problem = _row_problem(row)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem is None:
            rows.append(row)
        elif number < len(lines):  # else the line's end is missing
            raise UserError(
                f"{path}, line {number} is no row of figures ({problem}); delete the line"
            )
    return rows


def _row_problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "no JSON object"
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        return "no step"
    return None


def _of_kind(rows: Iterable[dict[str, Any]], kind: str) -> list[Row]:
    by_step = {row["step"]: row for row in rows if row.get("kind") == kind}
    return [by_step[step] for step in sorted(by_step)]


def _read_evaluations(folder: Path, notices: list[str]) -> list[Evaluated]:
    found = []
    for path in folder.glob("*/*/rouge.json"):
        inner = path.parent
        try:
            written_seconds = path.stat().st_mtime
        except OSError:
            continue
        rouge = _read_object(path, notices)
        if not rouge:
            continue  # deleted meanwhile, to be written anew
        found.append(
            Evaluated(
                split=inner.name,
                label=inner.parent.name,
                step=step_of(inner.parent),
                folder=inner,
                rouge=rouge,
                comparison=_read_object(inner / "comparison.json", notices) or None,
                written_seconds=written_seconds,
            )
        )
    return sorted(found, key=lambda item: (item.written_seconds, item.label, item.split))


def _list_checkpoints(folder: Path) -> list[Listed]:
    if not (folder / "checkpoints").is_dir():
        return []
    try:
        return list_checkpoints(folder).checkpoints
    except UserError:  # there is none
        return []
    except OSError as error:
        what = error.filename or folder / "checkpoints"
        raise UserError(f"{what} can't be read ({error.strerror}); mend that") from error
