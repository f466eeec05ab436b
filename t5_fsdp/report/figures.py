"""The figures of a run: what stands at the top of its page, its curves, where its time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5_fsdp.report.plots import Panel, Series
from t5_fsdp.report.runs import METRICS, Evaluated, Row, Run, as_mapping, as_number, curve
from t5_fsdp.report.wording import duration, format_value, percent, points

# Of a train row's `<phase>_seconds`, in the order in which a step does them.
PHASES = {
    "data": "Waiting for data",
    "forward": "Forward",
    "backward": "Backward",
    "communication": "Communication",
    "optimizer": "Optimizer",
}


@dataclass(frozen=True)
class Figure:
    """One number of a run, in words.

    Attributes:
        note: what belongs to it, e.g. at which step; may be empty.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class TimeShare:
    """A part of a run's time.

    Attributes:
        color: number of its colour.
    """

    label: str
    seconds: float
    color: int


@dataclass(frozen=True)
class LeadScores:
    """ROUGE of the lead baseline, F-measures from 0 to 1 by metric."""

    num_examples: int | None
    fmeasures: dict[str, float]


def headline(run: Run) -> list[Figure]:
    """The figures that a reader looks for first; without those that the run has not got."""
    shares = time_split(run)
    found = [
        _state(run),
        _steps(run),
        _best(run),
        _test(run),
        _loss(run),
        _validation_loss(run),
        _speed(run),
        _mfu(run),
        _time(shares),
        _evaluation_cost(shares, len(run.validation)),
        _memory(run),
    ]
    return [figure for figure in found if figure is not None]


def lead_scores(run: Run, split: str) -> LeadScores | None:
    """Of the lead baseline on a split, from its evaluation or the data audit.

    None where they are of other examples than the run's scores of the split.
    """
    newest = run.newest(split)
    if newest is not None:
        scores = as_mapping(newest.rouge.get("lead_baseline"))
        found = {name: as_number(as_mapping(scores.get(name)).get("fmeasure")) for name in METRICS}
        if all(value is not None for value in found.values()):
            return LeadScores(_num_examples(newest.rouge), found)  # type: ignore[arg-type]
    audited = as_mapping(as_mapping(run.audit.get("lead_baseline")).get(split))
    found = {name: as_number(audited.get(name)) for name in METRICS}
    if any(value is None for value in found.values()):
        return None
    # The audit takes the whole split, a validation in training often a part of it.
    if newest is not None and _num_examples(audited) != _num_examples(newest.rouge):
        return None
    return LeadScores(_num_examples(audited), found)  # type: ignore[arg-type]


def _num_examples(scores: Mapping[str, Any]) -> int | None:
    number = as_number(scores.get("examples"))
    return None if number is None else int(number)


def interval(evaluated: Evaluated, metric: str) -> str:
    """The 95 % interval of a score, in points; "" where there is none."""
    low, high = (evaluated.fmeasure(metric, bound) for bound in ("_low", "_high"))
    return "" if low is None or high is None else f"{points(low)} to {points(high)}"


# ---------------------------------------------------------------- one by one


def _state(run: Run) -> Figure:
    state = str(run.status.get("state") or "unknown")
    notes = {"running": "or killed: no process was there to say so"}
    message = str(run.status.get("message") or "")
    return Figure("State", state, message or notes.get(state, ""))


def _last_step(run: Run) -> int | None:
    steps = [as_number(run.status.get("step")), *(row["step"] for row in run.train[-1:])]
    known = [int(step) for step in steps if step is not None]
    return max(known) if known else None


def _steps(run: Run) -> Figure | None:
    last = _last_step(run)
    if last is None:
        return None
    epoch, epochs = (
        as_number(run.train[-1].get("epoch")) if run.train else None,
        run.option("train.epochs"),
    )
    notes = []
    if epoch is not None:
        of = f" of {epochs:g}" if as_number(epochs) is not None else ""
        notes.append(f"epoch {epoch:.3g}{of}")
    most = as_number(run.option("train.max_steps"))
    if most is not None:
        notes.append(f"at most {most:,.0f} steps")
    return Figure("Steps", f"{last:,}", ", ".join(notes))


def _best(run: Run) -> Figure | None:
    best, metric = run.best_validation, run.best_metric
    if best is None:
        return None
    value = as_number(best.get(metric))
    assert value is not None
    step = f"step {best['step']:,}"
    if metric == "loss":
        return Figure("Best validation loss", f"{value:.3f}", step)
    examples = as_number(best.get("examples"))
    note = step if examples is None else f"{step}, {examples:,.0f} examples"
    return Figure(f"Best validation {METRICS[metric]}", points(value), note)


def _test(run: Run) -> Figure | None:
    newest = run.newest("test")
    metric = run.best_metric if run.best_metric in METRICS else "rougeLsum"
    if newest is None or newest.fmeasure(metric) is None:
        return None
    bounds = interval(newest, metric)
    notes = [f"95 % interval {bounds}"] if bounds else []
    lead = lead_scores(run, "test")
    if lead is not None:
        notes.append(f"lead baseline {points(lead.fmeasures[metric])}")
    return Figure(f"Test {METRICS[metric]}", points(newest.fmeasure(metric)), ", ".join(notes))


def _loss(run: Run) -> Figure | None:
    known = [(step, value) for step, value in curve(run.train, "loss") if value is not None]
    if not known:
        return None
    (_, first), (step, last) = known[0], known[-1]
    note = f"step {step:,}, nats a token" + (f"; began at {first:.3f}" if len(known) > 1 else "")
    return Figure("Training loss", f"{last:.3f}", note)


def _validation_loss(run: Run) -> Figure | None:
    known = [(value, step) for step, value in curve(run.validation, "loss") if value is not None]
    if not known:
        return None
    value, step = known[-1]
    lowest, at = min(known)
    note = ", the lowest" if at == step else f"; lowest {lowest:.3f} at step {at:,}"
    return Figure(
        "Validation loss", f"{value:.3f}", f"step {step:,}{note if len(known) > 1 else ''}"
    )


def window_seconds(row: Row) -> float | None:
    """Of the steps that a train row covers, without evaluation and checkpoints."""
    speed, tokens = as_number(row.get("tokens_per_second")), _tokens(row)
    return tokens / speed if speed and tokens is not None else None


def _tokens(row: Row) -> float | None:
    source, target = as_number(row.get("source_tokens")), as_number(row.get("target_tokens"))
    return None if source is None or target is None else source + target


def _training_seconds(run: Run) -> float:
    return math.fsum(window_seconds(row) or 0.0 for row in run.train)


def _speed(run: Run) -> Figure | None:
    seconds = _training_seconds(run)
    if not seconds:
        return None
    tokens = math.fsum(_tokens(row) or 0.0 for row in run.train if window_seconds(row))
    # Of windows of about equal length.
    each = sorted(value for _, value in curve(run.train, "step_seconds") if value is not None)
    note = f"; {each[len(each) // 2]:.3g} s a step" if each else ""
    return Figure("Tokens a second", format_value(tokens / seconds), f"mean, all devices{note}")


def _mfu(run: Run) -> Figure | None:
    weighted = [
        (mfu, seconds)
        for row in run.train
        for mfu, seconds in [(as_number(row.get("mfu")), window_seconds(row))]
        if mfu is not None and seconds
    ]
    if not weighted:
        return None
    mean = sum(mfu * seconds for mfu, seconds in weighted) / sum(s for _, s in weighted)
    return Figure("MFU", percent(mean, 1), "mean of the run, of the devices' peak")


def _time(shares: Sequence[TimeShare]) -> Figure | None:
    if not shares:
        return None
    total = sum(share.seconds for share in shares)
    return Figure("Time", duration(total), "training, validation, checkpoints; no start-up")


def _evaluation_cost(shares: Sequence[TimeShare], num_validations: int) -> Figure | None:
    seconds = sum(share.seconds for share in shares if share.label == "Validation")
    if not seconds:
        return None
    total = sum(share.seconds for share in shares)
    each = f"{num_validations:,} validations" if num_validations > 1 else "1 validation"
    return Figure("Cost of validation", percent(seconds / total), f"{each}, {duration(seconds)}")


def _memory(run: Run) -> Figure | None:
    known = [v for _, v in curve(run.train, "peak_memory_bytes") if v is not None]
    if not known:
        return None
    on_cpu = run.environment.get("device") == "CPU"
    what = "resident, of the largest process" if on_cpu else "allocated, of the largest rank"
    return Figure("Peak memory", f"{max(known) / 2**30:.2f} GiB", what)


# ---------------------------------------------------------------- where the time went


def time_split(run: Run) -> list[TimeShare]:
    """Seconds of all steps by phase, where they are measured, of validations and of checkpoints.

    Steps that were done again after an interruption count once.
    """
    seconds = dict.fromkeys(PHASES, 0.0)
    rest = 0.0
    for row in run.train:
        window, step = window_seconds(row), as_number(row.get("step_seconds"))
        if window is None:
            continue
        steps = window / step if step else 0.0
        found = {name: steps * (as_number(row.get(f"{name}_seconds")) or 0.0) for name in PHASES}
        rest += max(0.0, window - sum(found.values()))
        for name, value in found.items():
            seconds[name] += value
    has_phases = any(seconds.values())
    shares = [TimeShare(PHASES[name], value, n) for n, (name, value) in enumerate(seconds.items())]
    shares.append(TimeShare("Other parts of steps" if has_phases else "Training steps", rest, 7))
    validation = sum(as_number(row.get("seconds")) or 0.0 for row in run.validation)
    checkpoints = sum(as_number(row.get("blocked_seconds")) or 0.0 for row in run.saves)
    shares.append(TimeShare("Validation", validation, 5))
    shares.append(TimeShare("Waiting for checkpoints", checkpoints, 6))
    return [share for share in shares if share.seconds > 0]


# ---------------------------------------------------------------- the curves

# name of the field, title, unit, and how it is drawn
_TRAIN_PANELS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("learning_rate", "Learning rate", "", {"from_zero": True, "smooth": False}),
    ("grad_norm", "Gradient norm", "before clipping", {"from_zero": True,
     "may_be_logarithmic": True}),
    ("tokens_per_second", "Throughput", "tokens/s, all devices", {"from_zero": True}),
    ("sequences_per_second", "Throughput", "sequences/s, all devices", {"from_zero": True}),
    ("mfu", "MFU", "% of peak", {"from_zero": True, "scale": 100.0}),
    ("step_seconds", "Time of a step", "s", {"from_zero": True}),
    ("padding_share", "Padding", "% of tokens", {"from_zero": True, "scale": 100.0,
     "top": 100.0}),
    ("loss_scale", "Loss scale", "fp16", {"from_zero": True, "may_be_logarithmic": True}),
)  # fmt: skip
_MEMORY = {
    "peak_memory_bytes": "peak",
    "reserved_memory_bytes": "reserved",
    "allocated_memory_bytes": "allocated",
    "resident_memory_bytes": "host, resident",
}
_ONLY_IF_ANY = {"skipped_steps": "Skipped steps", "allocator_retries": "Allocator retries"}


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The curves of one run, or of several over each other; those without data are left out."""
    made = [*(_single(runs[0]) if len(runs) == 1 else _compared(runs)), *_of_training(runs)]
    return [panel for panel in made if panel.has_data()]


def _single(run: Run) -> list[Panel]:
    losses = [
        Series("training", curve(run.train, "loss"), 0),
        Series("validation", curve(run.validation, "loss"), 1),
    ]
    rouge = [
        Series(title, curve(run.validation, name), color)
        for color, (name, title) in enumerate(METRICS.items())
    ]
    return [
        Panel("Loss", "nats/token", _present(losses), may_be_logarithmic=True,
              same_marks=False),
        Panel("Validation ROUGE", "0 to 100", _present(rouge), scale=100.0, top=100.0),
    ]  # fmt: skip


def _compared(runs: Sequence[Run]) -> list[Panel]:
    return [
        Panel("Training loss", "nats/token", _of_runs(runs, "train", "loss"),
              may_be_logarithmic=True),
        Panel("Validation loss", "nats/token", _of_runs(runs, "validation", "loss"),
              may_be_logarithmic=True),
        *(
            Panel(f"Validation {title}", "0 to 100", _of_runs(runs, "validation", name),
                  scale=100.0, top=100.0)
            for name, title in METRICS.items()
        ),
    ]  # fmt: skip


def _of_training(runs: Sequence[Run]) -> list[Panel]:
    made = [
        Panel(title, unit, _of_runs(runs, "train", name), **how)
        for name, title, unit, how in _TRAIN_PANELS
    ]
    made.append(_slowest_rank_panel(runs))
    made.append(_memory_panel(runs))
    for name, title in _ONLY_IF_ANY.items():
        series = _of_runs(runs, "train", name)
        if any(value for line in series for _, value in line.points):
            made.append(Panel(title, "a row", series, from_zero=True))
    return made


def _slowest_rank_panel(runs: Sequence[Run]) -> Panel:
    """Of runs of several ranks; of a single one the ratio is 1 at every step."""
    series = [
        line
        for line in _of_runs(runs, "train", "slowest_rank_ratio")
        if as_number(runs[line.color].environment.get("world_size")) != 1
    ]
    return Panel("Slowest rank", "its time / median", series)


def _memory_panel(runs: Sequence[Run]) -> Panel:
    if len(runs) > 1:
        series = _of_runs(runs, "train", "peak_memory_bytes")
        return Panel("Peak memory", "GiB, largest rank", series, 2.0**-30, from_zero=True)
    series = _present(
        [
            Series(label, curve(runs[0].train, name), color)
            for color, (name, label) in enumerate(_MEMORY.items())
        ]
    )
    return Panel("Memory", "GiB, largest rank", series, 2.0**-30, from_zero=True)


def _of_runs(runs: Sequence[Run], kind: str, name: str) -> list[Series]:
    series = [
        Series(run.name, curve(getattr(run, kind), name), color) for color, run in enumerate(runs)
    ]
    return _present(series)


def _present(series: Sequence[Series]) -> list[Series]:
    return [line for line in series if line.points]
