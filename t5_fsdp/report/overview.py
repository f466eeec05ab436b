"""The top of a page: the figures of the runs, and their ROUGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from t5_fsdp.report.figures import Figure, headline, interval, lead_scores
from t5_fsdp.report.markup import Markup, join, table, tag
from t5_fsdp.report.plots import swatch
from t5_fsdp.report.runs import METRICS, Evaluated, Run, as_mapping, as_number
from t5_fsdp.report.wording import MISSING, points


def figures_of(runs: Sequence[Run]) -> Markup:
    """Of one run as cards, of several as a table."""
    if len(runs) == 1:
        cards = (
            tag(
                "div",
                tag("dt", figure.label),
                tag("dd", figure.value, class_=_value_class(figure)),
                tag("dd", figure.note, class_="note") if figure.note else None,
                class_="wide" if len(figure.note) > _LONGEST_NARROW_NOTE else None,
            )
            for figure in headline(runs[0])
        )
        return tag("dl", *cards, class_="cards")
    by_run = [{figure.label: figure for figure in headline(run)} for run in runs]
    labels = dict.fromkeys(label for figures in by_run for label in figures)
    rows = [[label, *(_figure_cell(figures.get(label)) for figures in by_run)] for label in labels]
    heads = (join([swatch(color), tag("bdi", run.name)]) for color, run in enumerate(runs))
    return table(["", *heads], rows, "Figures of the runs", texts=len(runs) + 1)


_LONGEST_NARROW_NOTE = 120  # characters; a longer one, the message of a failure, has its own row
_STATES = ("running", "finished", "preempted", "failed")


def _value_class(figure: Figure) -> str:
    is_state = figure.label == "State" and figure.value in _STATES
    return f"value state-{figure.value}" if is_state else "value"


def _figure_cell(figure: Figure | None) -> Markup | str:
    if figure is None:
        return MISSING
    note = tag("div", figure.note, class_="note") if figure.note else None
    return join([tag("div", figure.value, class_=_value_class(figure)), note])


def scores_of(runs: Sequence[Run]) -> Markup:
    """ROUGE by split with intervals, the lead baseline, comparisons and what is unusual."""
    rows = []
    for run in runs:
        several = f"{run.name}: " if len(runs) > 1 else ""
        evaluations = _listed_evaluations(run)
        for evaluated in evaluations:
            rows.append(_score_row(f"{several}{evaluated.where}", evaluated))
        for split in dict.fromkeys(["test", "validation", *(e.split for e in evaluations)]):
            lead = lead_scores(run, split)
            if lead is not None:
                values = (points(lead.fmeasures[name]) for name in METRICS)
                examples = "" if lead.num_examples is None else f"{lead.num_examples:,}"
                rows.append([f"{several}{split}, lead baseline", examples, *values])
    if not rows:
        return Markup()
    head = ["split", "examples", *METRICS.values()]
    note = (
        "F-measure from 0 to 100, mean over the examples; below it the 95 % interval, by bootstrap "
        "over examples."
    )
    if any("lead baseline" in row[0] for row in rows):
        note += " The lead baseline is the beginning of the document, as long as the reference."
    return join(
        [
            table(head, rows, "ROUGE by split"),
            tag("p", note, class_="note"),
            *(_comparison(e) for run in runs for e in _listed_evaluations(run) if e.comparison),
            *(_hints(run, len(runs) > 1) for run in runs),
        ]
    )


def _listed_evaluations(run: Run) -> list[Evaluated]:
    """Those of other splits than validation, and of the validations the best and the last."""
    best = run.best_validation
    last = run.newest("validation")
    return [
        evaluated
        for evaluated in run.evaluations
        if evaluated.split != "validation"
        or evaluated is last
        or (best is not None and evaluated.step == best["step"])
    ]


def _score_row(label: str, evaluated: Evaluated) -> list[Any]:
    examples = as_number(evaluated.rouge.get("examples"))
    cells: list[Any] = [label, "" if examples is None else f"{examples:,.0f}"]
    for metric in METRICS:
        bounds = interval(evaluated, metric)
        note = tag("div", bounds, class_="note") if bounds else None
        cells.append(join([points(evaluated.fmeasure(metric)), note]))
    return cells


def _comparison(evaluated: Evaluated) -> Markup | None:
    comparison = as_mapping(evaluated.comparison)
    metrics = as_mapping(comparison.get("metrics"))
    rows = []
    for name, title in METRICS.items():
        values = as_mapping(metrics.get(name))
        found = [as_number(values.get(f"difference{bound}")) for bound in ("", "_low", "_high")]
        counts = [as_number(values.get(key)) for key in ("wins", "ties", "losses")]
        if None in found or None in counts:
            return None
        difference, low, high = (f"{100 * value:+.1f}" for value in found)  # type: ignore[operator]
        rows.append([title, difference, f"{low} to {high}", *(f"{n:,.0f}" for n in counts)])
    baseline = comparison.get("baseline", "a baseline")
    caption = f"{evaluated.where}: difference to {baseline}"
    head = ["", "difference", "95 % interval", "better", "same", "worse"]
    return join([tag("h3", caption), table(head, rows, caption)])


def _hints(run: Run, several: bool) -> Markup | None:
    shown = run.newest("test") or run.newest("validation")
    hints = shown.rouge.get("hints") if shown is not None else None
    if shown is None or not isinstance(hints, list) or not hints:
        return None
    name = f"{run.name}: " if several else ""
    return tag("ul", *(tag("li", f"{name}{shown.where}: {hint}") for hint in hints), class_="hints")
