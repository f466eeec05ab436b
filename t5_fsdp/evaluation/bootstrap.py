"""Confidence intervals of mean scores, by resampling the examples."""

from __future__ import annotations

import numpy as np

from t5_fsdp.seeding import numpy_generator

RESAMPLES = 1000
CONFIDENCE = 0.95
# One block of resampling counts takes at most this much: 64 resamples of 40,000 examples.
_BLOCK_BYTES = 20 * 2**20


def bootstrap_interval(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end, [columns] each, of the 95 % percentile bootstrap interval of column means.

    Args:
        values: [examples, columns], at least one example. Rows are drawn whole, with replacement.
        seed: of the 1,000 resamples.
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
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    # Rounding must not put the mean of equal scores outside of their interval.
    mean = values.mean(axis=0)
    return np.minimum(low, mean), np.maximum(high, mean)
