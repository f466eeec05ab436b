"""Intervals are seeded, as wide as theory says, and take little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from t5_fsdp.evaluation.bootstrap import bootstrap_percentiles, resampled_means


def interval(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    low, _, high = bootstrap_percentiles(values, seed)
    return low, high


def test_interval_is_seeded_and_has_the_width_of_theory():
    values = np.random.default_rng(1).random((2000, 4))
    low, high = interval(values, seed=1)
    np.testing.assert_array_equal(interval(values, seed=1), (low, high))
    assert (interval(values, seed=2)[0] != low).all()
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std(axis=0) / 2000**0.5, rtol=0.1)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 3, 97])
def test_interval_of_equal_scores_contains_their_mean(value, count):
    values = np.full((count, 4), value)
    low, high = interval(values, seed=1)
    mean = values.mean(axis=0)
    assert (low <= mean).all() and (mean <= high).all() and (high - low < 1e-12).all()


def test_bootstrap_of_many_examples_takes_little_memory():
    values = np.random.default_rng(0).random((40_000, 4))
    tracemalloc.start()
    try:
        interval(values, seed=1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # All counts at once would take 320 MB.
    assert peak_bytes < 60e6


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_intervals_hold_the_true_mean_as_often_as_they_say(seed):
    # Skewed, between 0 and 1 with many zeros, as ROUGE-2 is; a column is one draw of 150 examples.
    generator = np.random.default_rng(seed)
    scores = generator.beta(0.8, 3.0, (150, 1000)) * (generator.random((150, 1000)) < 0.8)
    true_mean = 0.8 * 0.8 / (0.8 + 3.0)
    low, high = interval(scores, seed)
    share = np.mean((low <= true_mean) & (true_mean <= high))
    assert 0.93 <= share <= 0.97


def test_resamples_of_two_systems_are_the_same():
    values = np.random.default_rng(0).random((50, 2))
    means = resampled_means(values, 1)
    np.testing.assert_allclose(resampled_means(values[:, 1:], 1)[:, 0], means[:, 1], atol=1e-12)
    differences = resampled_means(values[:, :1] - values[:, 1:], 1)[:, 0]
    np.testing.assert_allclose(differences, means[:, 0] - means[:, 1], atol=1e-12)
