"""The end of a page: data, checkpoints and environment of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t5_fsdp.checkpoint.listing import format_size
from t5_fsdp.report.markup import Markup, join, table, tag
from t5_fsdp.report.runs import METRICS, Run, as_mapping, as_number
from t5_fsdp.report.wording import MISSING, duration, percent, points


def audit_of(run: Run) -> Markup:
    """The data audit: examples and tokens by split, warnings first."""
    splits = {
        name: as_mapping(split) for name, split in as_mapping(run.audit.get("splits")).items()
    }
    if not splits:
        return Markup()
    rows = [[name, *_rows_of(split)] for name, split in splits.items()]
    tokens = [
        [f"{name}, {side}", *_tokens_of(split, side)]
        for name, split in splits.items()
        for side in ("source", "target")
        if isinstance(split.get(f"{side}_tokens"), dict)
    ]
    lines = [*_dropped(splits), *_texts(run.audit.get("notes"))]
    warnings = _texts(run.audit.get("warnings"))
    overlaps = as_mapping(run.audit.get("duplicates_across"))
    lines += [f"documents of {pair}: {_count(count)}" for pair, count in overlaps.items()]
    head = ["tokens", "mean", "median", "90 %", "longest", "cut", "unknown"]
    return join(
        [
            tag("ul", *(tag("li", text) for text in warnings), class_="warnings")
            if warnings
            else None,
            table(["split", "read", "kept", "left out", "duplicates"], rows, "Examples by split"),
            table(head, tokens, "Tokens by split") if tokens else None,
            tag("ul", *(tag("li", line) for line in lines), class_="hints") if lines else None,
        ]
    )


def _texts(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


def _count(value: Any) -> str:
    number = as_number(value)
    return MISSING if number is None else f"{number:,.0f}"


def _rows_of(split: Mapping[str, Any]) -> list[str]:
    dropped = [as_number(count) for count in as_mapping(split.get("dropped")).values()]
    left_out = sum(count for count in dropped if count is not None)
    found = [_count(split.get(name)) for name in ("read", "kept")]
    return [*found, f"{left_out:,.0f}", _count(split.get("duplicates"))]


def _tokens_of(split: Mapping[str, Any], side: str) -> list[str]:
    tokens = as_mapping(split.get(f"{side}_tokens"))
    numbers = [as_number(tokens.get(name)) for name in ("mean", "median", "p90", "max")]
    cells = [
        MISSING if n is None else f"{n:,.1f}" if p == 0 else f"{n:,.0f}"
        for p, n in enumerate(numbers)
    ]
    cut = as_number(split.get(f"{side}_truncated"))
    unknown = as_number(split.get("unknown_tokens")) if side == "source" else None
    cells.append(MISSING if cut is None else percent(cut, 1))
    return [*cells, "" if unknown is None else percent(unknown, 2)]


def _dropped(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}: {_count(count)} rows left out, {reason}"
        for name, split in splits.items()
        for reason, count in as_mapping(split.get("dropped")).items()
    ]


def checkpoints_of(run: Run) -> Markup:
    """Those that were written, and what the folder still has."""
    best, metric = run.best_validation, run.best_metric
    saves = {row["step"]: row for row in run.saves}
    on_disk = {item.step: item for item in run.checkpoints if item.status != "moved aside"}
    gone = "pruned" if (run.folder / "checkpoints").is_dir() else "not in this folder"
    scores = {row["step"]: row for row in run.validation}
    steps = sorted({*saves, *(step for step in on_disk if step is not None)})
    rows = []
    for step in steps:
        save, item = as_mapping(saves.get(step)), on_disk.get(step)
        written = as_number(save.get("bytes")) or (item.num_bytes if item else None)
        times = [as_number(save.get(name)) for name in ("total_seconds", "blocked_seconds")]
        score = as_number(as_mapping(scores.get(step)).get(metric))
        status = gone if item is None else "kept" if item.status == "complete" else item.status
        is_best = item.is_best if item else False
        of_best = best is not None and best["step"] == step
        marks = ["best"] if is_best else ["best validation"] if of_best else []
        marks += ["the next to resume from"] if item is not None and item.is_next else []
        rows.append(
            [
                f"{step:,}",
                _with_note(", ".join([status, *marks]), item.problem if item else None),
                MISSING if written is None else format_size(written),
                *(MISSING if seconds is None else duration(seconds) for seconds in times),
                MISSING if score is None else f"{score:.3f}" if metric == "loss" else points(score),
            ]
        )
    if not rows:
        return Markup()
    title = "validation loss" if metric == "loss" else METRICS[metric]
    head = ["step", "state", "size", "written in", "training waited", title]
    return table(head, rows, "Checkpoints", texts=2)


def _with_note(text: str, note: str | None) -> Markup:
    return join([text, tag("div", note, class_="note") if note else None])


def environment_of(run: Run) -> Markup:
    """Versions, devices and the command."""
    environment = run.environment
    if not environment:
        return Markup()
    rows = []
    for name, value in environment.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items())
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        rows.append([name.replace("_", " "), MISSING if value is None else str(value)])
    rows.append(["run folder", str(run.folder)])
    return table(["", ""], rows, "Environment", texts=2)
