"""Confidence intervals of mean scores, by resampling the examples (Efron 1979)."""

from __future__ import annotations

import numpy as np

from t5_fsdp.seeding import numpy_generator

RESAMPLES = 1000
CONFIDENCE = 0.95
# One block of resampling counts takes at most this much: 64 resamples of 40,000 examples.
_BLOCK_BYTES = 20 * 2**20


def resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Column means of 1,000 resamples, [resamples, columns].

    The same seed and number of examples give the same resamples, whatever the values: means of
    two systems on the same examples are paired.

    Args:
        values: [examples, columns], at least one example. Rows are drawn whole, with replacement.
    """
    num_examples = len(values)
    generator = numpy_generator(seed, "rouge bootstrap")
    block = max(1, _BLOCK_BYTES // (8 * num_examples))
    means = []
    for start in range(0, RESAMPLES, block):
        counts = np.empty((min(block, RESAMPLES - start), num_examples))
        for row in counts:
            drawn = generator.integers(num_examples, size=num_examples)
            row[:] = np.bincount(drawn, minlength=num_examples)
        means.append(counts @ values / num_examples)
    return np.concatenate(means)


def bootstrap_percentiles(
    values: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Low end, median and high end, [columns] each, of the resampled column means.

    Low and high bound the 95 % percentile interval of the mean.

    Args:
        values, seed: as of `resampled_means`.
    """
    return percentiles(resampled_means(values, seed), values.mean(axis=0))


def percentiles(means: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `bootstrap_percentiles`, where the resampled means are at hand.

    Args:
        means: [resamples, columns].
        mean: of all examples, [columns].
    """
    tail = (1 - CONFIDENCE) / 2
    low, middle, high = np.quantile(means, [tail, 0.5, 1 - tail], axis=0)
    # Rounding must not put the mean of equal scores outside of their interval.
    return np.minimum(low, mean), middle, np.maximum(high, mean)
