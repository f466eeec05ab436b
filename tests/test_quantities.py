"""Counts, sizes and times as a sentence has them."""

from __future__ import annotations

import pytest

from t5_fsdp.quantities import counted, duration, memory_size, traffic_size


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (5000, "training example", "5,000 training examples"),
        (2, "summary", "2 summaries"),
        (2, "day", "2 days"),
        (2, "micro-batch", "2 micro-batches"),
    ],
)
def test_counts(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words


def test_no_size_or_time_is_shown_as_zero() -> None:
    assert [memory_size(n) for n in (2**30, 2**30 - 2**20, 2**19)] == [
        "1.0 GiB", "1023.0 MiB", "0.5 MiB",
    ]  # fmt: skip
    assert [traffic_size(n) for n in (2e9, 3e6, 4e3, 5)] == ["2.00 GB", "3.00 MB", "4.00 kB", "5 B"]
    assert [duration(s) for s in (7200, 90, 1.5, 0.0042)] == [
        "2.00 h",
        "1.5 min",
        "1.5 s",
        "4.2 ms",
    ]
