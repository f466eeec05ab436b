"""Curves as SVG: axes with round numbers, gaps where a value is missing, long ones thinned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from t5_fsdp.report.markup import Markup, join, tag
from t5_fsdp.report.runs import Curve
from t5_fsdp.report.wording import format_value

NUM_COLORS = 8
_WIDTH, _HEIGHT = 380, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 36
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_MOST_MARKED = 40  # points of a curve that get a dot each
# A curve of more points is drawn faint, under its means over so many parts of the run.
_SMOOTHED_FROM = 300
_MEANS = 100
_ROOM = 0.03  # of the axis of values, between a curve and the upper or lower border
_TICK_SHARE = 0.14  # of the axis of steps, which a label needs
# Values that differ so many times are drawn on a logarithmic axis, where a panel allows it.
_LOGARITHMIC_FROM = 30.0


@dataclass(frozen=True)
class Series:
    """One curve of a panel.

    Attributes:
        color: number of its colour and dash, from 0.
    """

    name: str
    points: Curve
    color: int = 0


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        unit: of the values as they are drawn, e.g. "tokens/s"; "" for a plain number.
        scale: by which values are multiplied before they are drawn.
        from_zero: the axis of values begins at 0.
        may_be_logarithmic: where values differ by orders of magnitude.
        smooth: a long curve is drawn faint, under its means.
        top: the largest value that is possible; the axis does not go beyond it.
        same_marks: all curves have dots, or none; else only those of few points.
    """

    title: str
    unit: str
    series: Sequence[Series]
    scale: float = 1.0
    from_zero: bool = False
    may_be_logarithmic: bool = False
    smooth: bool = True
    top: float | None = None
    same_marks: bool = True

    def has_data(self) -> bool:
        """Whether there is a value to draw."""
        return any(value is not None for line in self.series for _, value in line.points)

    def smooths(self, line: Series) -> bool:
        """Whether means are drawn over this curve."""
        return self.smooth and len(line.points) > _SMOOTHED_FROM


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: list[float]
    labels: list[str]
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 to 1 from the low to the high end."""
        if self.is_logarithmic:
            low, high, value = math.log(self.low), math.log(self.high), math.log(value)
            return (value - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def thin(points: Curve, num_buckets: int = _PLOT_WIDTH) -> Curve:
    """At most about five points a bucket of steps: ends, smallest, largest, and one for a gap.

    What is drawn looks the same as with all of them, if a bucket is no wider than a pixel.
    """
    if len(points) <= 2 * num_buckets:
        return points
    first, last = points[0][0], points[-1][0]
    width = max(1e-9, (last - first) / num_buckets)
    groups: dict[int, list[int]] = {}
    for index, (step, _) in enumerate(points):
        groups.setdefault(min(num_buckets - 1, int((step - first) / width)), []).append(index)
    kept: list[int] = []
    for indices in groups.values():
        known = [index for index in indices if points[index][1] is not None]
        chosen = set(next(([i] for i in indices if points[i][1] is None), []))
        if known:
            by_value = sorted(known, key=lambda index: points[index][1] or 0.0)
            chosen |= {known[0], known[-1], by_value[0], by_value[-1]}
        kept += sorted(chosen)
    return [points[index] for index in kept]


def means(points: Curve, num_means: int = _MEANS) -> Curve:
    """The mean of each of `num_means` equally long stretches of steps that has a value."""
    first, last = points[0][0], points[-1][0]
    width = max(1e-9, (last - first) / num_means)
    groups: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        if value is not None:
            groups.setdefault(min(num_means - 1, int((step - first) / width)), []).append(
                (step, value)
            )
    return [
        (sum(step for step, _ in group) // len(group), math.fsum(v for _, v in group) / len(group))
        for group in groups.values()
    ]


def draw(panel: Panel) -> tuple[Markup, dict[str, Any]]:
    """The panel as an SVG element, and what a page needs to read values off it.

    Raises:
        ValueError: there is nothing to draw.
    """
    lines = [
        (line, [(s, None if v is None else v * panel.scale) for s, v in thin(line.points)])
        for line in panel.series
    ]
    values = [value for _, points in lines for _, value in points if value is not None]
    if not values:
        raise ValueError(f"panel {panel.title} has no data")
    steps = [step for _, points in lines for step, _ in points]
    x, y = _step_axis(max(steps)), _value_axis(panel, values)
    drawn = [_axes(x, y)]
    most_points = max(_num_known(points) for _, points in lines)
    for line, points in lines:
        num_points = most_points if panel.same_marks else _num_known(points)
        is_marked, is_faint = num_points <= _MOST_MARKED, panel.smooths(line)
        drawn.append(_curve(points, line.color, x, y, marked=is_marked, faint=is_faint))
        if panel.smooths(line):
            smooth: Curve = [(s, panel.scale * (value or 0.0)) for s, value in means(line.points)]
            drawn.append(_curve(smooth, line.color, x, y))
    drawn.append(tag("g", class_="cursor", aria_hidden="true"))
    svg = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=_describe(panel, lines),
    )
    data = {
        "x": [x.low, x.high, _LEFT, _LEFT + _PLOT_WIDTH],
        "y": [y.low, y.high, _HEIGHT - _BOTTOM, _TOP],
        "log": y.is_logarithmic,
        "unit": panel.unit,
        "series": [
            {
                "name": line.name,
                "color": line.color,
                "steps": [step for step, _ in points],
                "values": [None if value is None else float(f"{value:.5g}") for _, value in points],
            }
            for line, points in lines
        ],
    }
    return svg, data


def _num_known(points: Curve) -> int:
    return sum(value is not None for _, value in points)


def swatch(color: int) -> Markup:
    """A short piece of a curve, for a legend."""
    line = tag("line", x1=1, x2=19, y1=5, y2=5, class_=f"curve {_style(color)}")
    return tag("svg", line, viewBox="0 0 20 10", class_="swatch", aria_hidden="true")


def _style(color: int) -> str:
    return f"s{color % NUM_COLORS} d{color // NUM_COLORS % 3}"


def _describe(panel: Panel, lines: Sequence[tuple[Series, Curve]]) -> str:
    parts = []
    for line, points in lines:
        known = [(step, value) for step, value in points if value is not None]
        if known:
            (first, begin), (last, end) = known[0], known[-1]
            parts.append(
                f"{line.name}: {format_value(begin)} at step {first:,}, {format_value(end)} at "
                f"step {last:,}"
            )
    unit = f" ({panel.unit})" if panel.unit else ""
    return f"{panel.title}{unit}, by step. {'; '.join(parts)}"


# ---------------------------------------------------------------- axes


def _step_axis(last: int) -> _Axis:
    high = max(1, last)
    ticks = [tick for tick in round_ticks(0, high, 5) if tick == int(tick)]
    # The last step has a label of its own, and room for it.
    ticks = [*(tick for tick in ticks if tick <= (1 - _TICK_SHARE) * high), high]
    return _Axis(0, high, ticks, [_step_label(tick) for tick in ticks])


def _step_label(step: float) -> str:
    if step >= 1e6:
        return f"{step / 1e6:.4g}M"
    return f"{step:,.0f}" if step < 1e4 else f"{step / 1e3:.5g}k"


def _value_axis(panel: Panel, values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    middle = sorted(values)[len(values) // 2]
    if panel.may_be_logarithmic and low > 0 and high > _LOGARITHMIC_FROM * middle:
        return _logarithmic_axis(low, high)
    if panel.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.1 * abs(high) or 1.0
        low, high = (low, high + room) if panel.from_zero else (low - room, high + room)
    ticks = round_ticks(low, high, 5)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    room = _ROOM * (high - low)
    high = max(high, max(values) + room)
    if not (panel.from_zero and min(values) >= 0):
        low = min(low, min(values) - room)
    if panel.top is not None and high > panel.top:
        ticks = [tick for tick in ticks if tick <= panel.top]
        high = max(panel.top, max(values))
    return _Axis(low, high, ticks, labels_of(ticks))


def round_ticks(low: float, high: float, num_ticks: int) -> list[float]:
    """About `num_ticks` multiples of 1, 2 or 5 times a power of ten that enclose an interval."""
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Through the shortest decimal: 3 x 0.1 is not 0.3 in binary.
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def labels_of(ticks: Sequence[float]) -> list[str]:
    """All with the same number of decimals, and short."""
    largest = max(map(abs, ticks))
    for power, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(1e4, power) <= largest < 1e15:
            texts = labels_of([tick / power for tick in ticks])
            return [text if text == "0" else f"{text}{unit}" for text in texts]
    if 0 < largest < 1e-2 or largest >= 1e15:
        exponent = math.floor(math.log10(largest))
        scaled = labels_of([float(f"{tick / 10.0**exponent:.9g}") for tick in ticks])
        return [text if text == "0" else f"{text}e{exponent}" for text in scaled]
    shortest = next(
        (n for n in range(7) if all(abs(round(t, n) - t) < 1e-9 * max(1, largest) for t in ticks)),
        6,
    )
    return ["0" if tick == 0 else f"{tick:,.{shortest}f}" for tick in ticks]


def _logarithmic_axis(low: float, high: float) -> _Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    exponents = range(first, last + 1, every)
    labels = [format_value(10.0**e) if -3 <= e <= 5 else f"1e{e}" for e in exponents]
    return _Axis(10.0**first, 10.0**last, [10.0**e for e in exponents], labels, is_logarithmic=True)


def _axes(x: _Axis, y: _Axis) -> Markup:
    bottom, right = _HEIGHT - _BOTTOM, _LEFT + _PLOT_WIDTH
    drawn = []
    for value, label in zip(y.ticks, y.labels, strict=True):
        height = _pixel_y(value, y)
        drawn.append(tag("line", x1=_LEFT, x2=right, y1=height, y2=height, class_="grid"))
        drawn.append(tag("text", label, x=_LEFT - 6, y=_short(height + 3.5), class_="tick end"))
    for value, label in zip(x.ticks, x.labels, strict=True):
        place = _pixel_x(value, x)
        drawn.append(tag("line", x1=place, x2=place, y1=bottom, y2=bottom + 4, class_="axis"))
        drawn.append(tag("text", label, x=place, y=bottom + 16, class_="tick middle"))
    drawn.append(tag("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    drawn.append(tag("text", "step", x=right, y=_HEIGHT - 4, class_="tick end"))
    return join(drawn)


def _pixel_x(step: float, x: _Axis) -> float:
    return _short(_LEFT + _PLOT_WIDTH * x.place(step))


def _pixel_y(value: float, y: _Axis) -> float:
    bottom = _HEIGHT - _BOTTOM
    return _short(bottom - (bottom - _TOP) * y.place(value))


def _short(number: float) -> float:
    return float(f"{number:.1f}")


def _curve(
    points: Curve, color: int, x: _Axis, y: _Axis, marked: bool = False, faint: bool = False
) -> Markup:
    """A line, with a dot at each point if `marked`, else only where a point has no line."""
    pieces: list[list[str]] = [[]]
    dots = []
    for step, value in points:
        if value is None:
            pieces.append([])
            continue
        place, height = _pixel_x(step, x), _pixel_y(value, y)
        pieces[-1].append(f"{place:g} {height:g}")
        if marked:
            dots.append((place, height))
    for piece in pieces:
        # A point between two gaps has no line.
        if not marked and len(piece) == 1:
            place, height = map(float, piece[0].split())
            dots.append((place, height))
    style = _style(color) + (" faint" if faint else "")
    path = "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)
    return join(
        [
            tag("path", d=path, class_=f"curve {style}") if path else None,
            *(tag("circle", cx=cx, cy=cy, r=2.2, class_=f"dot {style}") for cx, cy in dots),
        ]
    )
