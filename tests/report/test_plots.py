"""Axes, thinning and curves."""

from __future__ import annotations

import itertools
import random
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5_fsdp.report.plots import Panel, Series, draw, labels_of, means, round_ticks, thin


def panel(*points: list, **how) -> Panel:
    return Panel("Loss", "nats", [Series(f"run {n}", p, n) for n, p in enumerate(points)], **how)


def paths(svg: str) -> list[str]:
    return re.findall(r'<path d="([^"]*)"', svg)


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_round_and_enclose(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-6 * abs(low):
        return  # too close together for round numbers
    ticks = round_ticks(low, high, 5)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert 2 <= len(ticks) <= 8
    assert all(b > a for a, b in itertools.pairwise(ticks))


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 0.1, 0.2, 0.3], ["0", "0.1", "0.2", "0.3"]),
        ([0, 2.5, 5], ["0", "2.5", "5.0"]),
        ([0, 500, 1000], ["0", "500", "1,000"]),
        ([0, 10000, 20000], ["0", "10k", "20k"]),
        ([0, 500000, 1000000], ["0", "0.5M", "1.0M"]),
        ([0, 1e-4, 2e-4], ["0", "1e-4", "2e-4"]),
        ([0, 5e-6, 1e-5], ["0", "0.5e-5", "1.0e-5"]),
        ([-1, 0, 1], ["-1", "0", "1"]),
    ],
)
def test_labels_are_short_and_alike(ticks: list[float], labels: list[str]) -> None:
    assert labels_of(ticks) == labels


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    rng = random.Random(0)
    points = [(step, rng.random()) for step in range(1, 100_001)]
    points[54_321] = (54_322, 9.0)
    points[12_345] = (12_346, -9.0)
    points[70_000] = (70_001, None)
    thinned = thin(points, 300)
    assert len(thinned) <= 5 * 300
    assert thinned[0] == points[0] and thinned[-1] == points[-1]
    assert {(54_322, 9.0), (12_346, -9.0), (70_001, None)} <= set(thinned)
    assert thinned == sorted(thinned, key=lambda point: point[0])


def test_in_each_bucket_the_extremes_stay() -> None:
    rng = random.Random(1)
    points = [(step, rng.random()) for step in range(3001)]
    thinned = dict(thin(points, 30))
    for first in range(0, 2900, 100):
        bucket = [value for _, value in points[first : first + 100]]
        kept = [value for step, value in thinned.items() if first <= step < first + 100]
        assert (min(bucket), max(bucket)) == (min(kept), max(kept))
        assert len(kept) <= 4


def test_short_curves_are_not_thinned() -> None:
    points = [(step, 1.0 * step) for step in range(500)]
    assert thin(points, 300) == points


def test_means_are_of_equal_stretches() -> None:
    points = [(step, float(step)) for step in range(1000)]
    assert means(points, 2) == [(249, 249.5), (749, 749.5)]
    assert means([(0, None), (1, 2.0), (2, 4.0)], 1) == [(1, 3.0)]


@pytest.mark.parametrize(("same", "num_dots"), [(True, 0), (False, 30)])
def test_dots_are_decided_once_a_panel(same: bool, num_dots: int) -> None:
    curves = [[(step, 1.0 * step) for step in range(number)] for number in (30, 50)]
    svg, _ = draw(panel(*curves, same_marks=same))
    assert svg.count("<circle") == num_dots
    svg, _ = draw(panel(curves[0], curves[1][:40], same_marks=same))
    assert svg.count("<circle") == 70


def test_the_spoken_title_sets_the_unit_apart() -> None:
    svg, _ = draw(Panel("Gradient norm", "before clipping", [Series("a", [(1, 2.0)])]))
    assert 'aria-label="Gradient norm (before clipping), by step. a: 2 at step 1' in svg


def test_a_gap_breaks_the_curve() -> None:
    svg, data = draw(panel([(1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, 3.0), (6, None)]))
    (path,) = paths(svg)
    assert path.count("M") == 2 and path.count("L") == 2
    assert data["series"][0]["values"] == [1.0, 2.0, None, 1.0, 3.0, None]


@pytest.mark.parametrize("points", [[(7, 0.5)], [(0, 0.0)], [(5, -3.0)], [(5, None), (6, 1e300)]])
def test_one_point_is_a_dot(points: list) -> None:
    svg, _ = draw(panel(points, from_zero=True))
    assert paths(svg) == [] and svg.count("<circle") == 1
    assert "nan" not in svg and "inf" not in svg


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0, 1e-12, 1e15])
def test_a_constant_has_axes(value: float) -> None:
    svg, data = draw(panel([(step, value) for step in range(1, 9)]))
    low, high = data["y"][:2]
    assert low < high and low <= value <= high
    assert svg.count('class="grid"') >= 2


@pytest.mark.parametrize("from_zero", [False, True])
def test_no_dot_lies_on_the_upper_border(from_zero: bool) -> None:
    _, data = draw(panel([(1, 20.0), (2, 100.0)], from_zero=from_zero))
    low, high = data["y"][:2]
    assert 102 < high < 104
    assert low == 0 if from_zero else 17 < low < 18
    _, data = draw(panel([(1, 50.0), (2, 100.0)], from_zero=True, top=100.0))
    assert data["y"][:2] == [0, 100]


def test_orders_of_magnitude_get_a_logarithmic_axis() -> None:
    points = [(step, 1.0) for step in range(1, 100)] + [(100, 5000.0)]
    _, plain = draw(panel(points))
    svg, data = draw(panel(points, may_be_logarithmic=True))
    assert not plain["log"] and data["log"]
    assert data["y"][:2] == [1.0, 10000.0]
    assert ">1,000<" in svg


def test_the_drawing_is_sound_xml_inside_its_frame() -> None:
    rng = random.Random(2)
    long = [(step, 100 * rng.random()) for step in range(1, 2000)]
    svg, _ = draw(panel(long, [(1000, 40.0)], scale=0.5))
    root = ElementTree.fromstring(str(svg))
    assert root.get("role") == "img" and "run 1: 20 at step 1,000" in root.get("aria-label", "")
    numbers = [float(n) for d in paths(svg) for n in re.findall(r"[\d.]+", d)]
    assert all(0 <= number <= 380 for number in numbers)
    assert 'faint"' in svg  # under its means


def test_without_values_there_is_no_panel() -> None:
    empty = panel([(1, None)])
    assert not empty.has_data()
    with pytest.raises(ValueError, match="no data"):
        draw(empty)
