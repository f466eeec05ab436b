"""Measurements that are taken in turn, A B C A B C, and their medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from t5_fsdp.console import Console

Figures = dict[str, float]


def measure_in_turn(
    contestants: Mapping[str, Callable[[], Figures]],
    rounds: int,
    console: Console,
    after_round: Callable[[int, dict[str, list[Figures]]], None] = lambda number, found: None,
) -> dict[str, list[Figures]]:
    """Call each of them once a round.

    Args:
        contestants: by title; what they return has the same names each time.
        after_round: gets the number of the round and what was found so far.
    """
    found: dict[str, list[Figures]] = {title: [] for title in contestants}
    for number in range(1, rounds + 1):
        for title, measure in contestants.items():
            figures = measure()
            found[title].append(figures)
            said = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
            console.say(f"round {number}: {title}: {said}")
        after_round(number, found)
    return found


def medians(rounds: list[Figures]) -> Figures:
    """Of each figure over the rounds."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def ratio(these: list[Figures], others: list[Figures], name: str) -> float:
    """Median over the rounds of one figure over the other's in the same round."""
    return statistics.median(
        a[name] / max(1e-12, b[name]) for a, b in zip(these, others, strict=True)
    )
