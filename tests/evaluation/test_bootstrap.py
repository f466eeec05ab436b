"""Intervals are seeded, as wide as theory says, and take little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from t5_fsdp.evaluation.bootstrap import bootstrap_interval


def test_interval_is_seeded_and_has_the_width_of_theory():
    values = np.random.default_rng(1).random((2000, 4))
    low, high = bootstrap_interval(values, seed=1)
    np.testing.assert_array_equal(bootstrap_interval(values, seed=1), (low, high))
    assert (bootstrap_interval(values, seed=2)[0] != low).all()
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std(axis=0) / 2000**0.5, rtol=0.1)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 3, 97])
def test_interval_of_equal_scores_contains_their_mean(value, count):
    values = np.full((count, 4), value)
    low, high = bootstrap_interval(values, seed=1)
    mean = values.mean(axis=0)
    assert (low <= mean).all() and (mean <= high).all() and (high - low < 1e-12).all()


def test_bootstrap_of_many_examples_takes_little_memory():
    values = np.random.default_rng(0).random((40_000, 4))
    tracemalloc.start()
    try:
        bootstrap_interval(values, seed=1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # All counts at once would take 320 MB.
    assert peak_bytes < 60e6
