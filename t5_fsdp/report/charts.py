"""The middle of a page: curves, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from t5_fsdp.report.figures import TimeShare, panels, time_split
from t5_fsdp.report.markup import Markup, join, table, tag
from t5_fsdp.report.plots import NUM_COLORS, Panel, draw, swatch
from t5_fsdp.report.runs import Run
from t5_fsdp.report.wording import MISSING, duration, percent

_BAR_WIDTH = 1000


def curves_of(runs: Sequence[Run]) -> tuple[Markup, list[dict[str, Any]]]:
    """The panels that have data, and what the page's script needs to read values off them."""
    drawn = panels(runs)
    figures, data = [], []
    for number, panel in enumerate(drawn):
        svg, values = draw(panel)
        data.append(values)
        figures.append(_panel(panel, svg, number, several=len(runs) > 1))
    if not figures:
        return Markup(), []
    reading = "Point at a curve, or focus it and use the arrow keys, to read its values."
    hints = [tag("p", reading, class_="note hint needs-script")]
    if len(runs) > 1:
        hints.insert(0, legend(runs))
    if any(panel.smooths(line) for panel in drawn for line in panel.series):
        smoothing = "Curves of many points are faint, under their means over hundredths of the run."
        hints.append(tag("p", smoothing, class_="note"))
    return join([*hints, tag("div", *figures, class_="panels")]), data


def legend(runs: Sequence[Run]) -> Markup:
    """Which colour each run has."""
    items = (
        tag("li", swatch(color), tag("bdi", run.name), title=run.folder)
        for color, run in enumerate(runs)
    )
    return tag("ul", *items, class_="legend")


def _panel(panel: Panel, svg: Markup, number: int, several: bool) -> Markup:
    legend = None
    if not several and len(panel.series) > 1:
        items = (tag("li", swatch(line.color), line.name) for line in panel.series)
        legend = tag("ul", *items, class_="legend")
    caption = tag(
        "figcaption",
        tag("b", panel.title),
        tag("span", panel.unit, class_="unit") if panel.unit else None,
        legend,
        tag("output", class_="readout", aria_live="polite"),
    )
    return tag("figure", caption, svg, class_="panel", data_chart=number, tabindex=0)


def time_of(runs: Sequence[Run]) -> Markup:
    """A bar a run, as long as it took, and a table of the parts."""
    splits = [(run, time_split(run)) for run in runs]
    longest = max((_total(shares) for _, shares in splits), default=0.0)
    if not longest:
        return Markup()
    bars = [
        join(
            [
                tag("p", tag("bdi", run.name), f", {duration(_total(shares))}", class_="bar-name")
                if len(runs) > 1
                else None,
                _bar(shares, longest, run.name),
            ]
        )
        for run, shares in splits
        if shares
    ]
    note = tag(
        "p",
        "Steps that were done again after an interruption count once. Start-up, data preparation "
        "and evaluations after the training are not in it.",
        class_="note",
    )
    return join([*bars, _time_table(splits), note])


def _total(shares: Sequence[TimeShare]) -> float:
    return sum(share.seconds for share in shares)


def _bar(shares: Sequence[TimeShare], longest: float, name: str) -> Markup:
    pieces, left = [], 0.0
    for share in shares:
        width = _BAR_WIDTH * share.seconds / longest
        title = tag("title", f"{share.label}: {duration(share.seconds)}")
        pieces.append(
            tag(
                "rect",
                title,
                x=f"{left:.2f}",
                y=0,
                width=f"{width:.2f}",
                height=26,
                class_=f"fill s{share.color % NUM_COLORS}",
            )
        )
        left += width
    spoken = ", ".join(f"{s.label} {duration(s.seconds)}" for s in shares)
    return tag(
        "svg",
        *pieces,
        viewBox=f"0 0 {_BAR_WIDTH} 26",
        preserveAspectRatio="none",
        class_="bar",
        role="img",
        aria_label=f"Time of {name}: {spoken}",
    )


def _time_table(splits: Sequence[tuple[Run, list[TimeShare]]]) -> Markup:
    labels: dict[str, int] = {}
    for _, shares in splits:
        labels |= {share.label: share.color for share in shares}
    labels = dict(sorted(labels.items(), key=lambda item: _TIME_ORDER.index(item[1])))
    rows = []
    for label, color in labels.items():
        cells: list[Any] = [join([_square(color), label])]
        for _, shares in splits:
            found = next((s.seconds for s in shares if s.label == label), None)
            share = "" if found is None else percent(found / _total(shares), 1)
            cells += [MISSING if found is None else duration(found), share]
        rows.append(cells)
    rows.append(
        ["Total", *(c for _, s in splits for c in (duration(_total(s)) if s else MISSING, ""))]
    )
    names = [""] if len(splits) == 1 else [run.name for run, _ in splits]
    head = ["", *(cell for name in names for cell in (name or "time", "share"))]
    return table(head, rows, "Where the time went")


_TIME_ORDER = (0, 1, 2, 3, 4, 7, 5, 6)  # colours of the parts, as the bar has them


def _square(color: int) -> Markup:
    square = tag("rect", width=10, height=10, class_=f"fill s{color % NUM_COLORS}")
    return tag("svg", square, viewBox="0 0 10 10", class_="square", aria_hidden="true")
