"""Which examples form a step: the global batches of an epoch, the same for any number of ranks.

`plan_epoch` is a pure function of lengths, seed and epoch: each example once; the smaller last
batch is kept. A mixture's epoch is drawn before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from t5_fsdp.seeding import numpy_generator


@dataclass(frozen=True)
class EpochPlan:
    """The global batches of one epoch.

    Attributes:
        order: example indices, int64 [examples].
        starts: where each batch begins in `order`, int64 [batches + 1].
    """

    order: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, index: int) -> np.ndarray:
        """Example indices of one global batch, int64 [examples of the batch]."""
        return self.order[self.starts[index] : self.starts[index + 1]]


def plan_epoch(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    global_batch_size: int,
    batching: str,
    seed: int,
    epoch: int,
) -> EpochPlan:
    """The order of an epoch: ceil(n / global_batch_size) batches, the last one smaller.

    Args:
        source_lengths: tokens of each source, [examples].
        target_lengths: tokens of each target, [examples].
        batching: "shuffled", or "length_grouped" (examples of like source and target length share
            a batch; the batches come in random order, and who shares one differs by epoch).
        epoch: 0 for the first.
    """
    count = len(source_lengths)
    rng = numpy_generator(seed, "data order", epoch)
    order = rng.permutation(count)
    if batching == "length_grouped":
        order = _group_by_length(order, source_lengths, target_lengths, global_batch_size, rng)
    starts = np.append(np.arange(0, count, global_batch_size), count).astype(np.int64)
    return EpochPlan(order=order, starts=starts)


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture: its rows, from start up to stop, and its weight."""

    start: int
    stop: int
    weight: float


def draw_mixture(parts: Sequence[MixturePart], *, seed: int, epoch: int) -> np.ndarray:
    """The examples of an epoch of a mixture, int64 [examples of all parts together].

    Each part gets its weight's share of them. It is gone through in one random order after the
    other, over the epochs, so that none of its examples is ahead of another by more than one turn.
    """
    total = sum(part.stop - part.start for part in parts)
    weights = np.array([part.weight for part in parts])
    shares = total * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    # The largest remainders get what rounding down left over.
    counts[np.argsort(counts - shares, kind="stable")[: total - counts.sum()]] += 1
    drawn = []
    for number, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
        size = part.stop - part.start
        first, last = epoch * count, (epoch + 1) * count
        turns = [
            numpy_generator(seed, f"mixture {number}", turn).permutation(size)
            for turn in range(first // size, math.ceil(last / size))
        ]
        offset = first // size * size
        if turns:
            drawn.append(part.start + np.concatenate(turns)[first - offset : last - offset])
    return np.concatenate(drawn)


def _group_by_length(
    order: np.ndarray,
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    batch_size: int,
    rng: np.random.Generator,
) -> np.ndarray:
    # The small last batch is a random choice, not the leftover of the sorting, which would always
    # be the longest or shortest examples.
    num_batches = len(order) // batch_size
    grouped, rest = order[: num_batches * batch_size], order[num_batches * batch_size :]
    if num_batches < 2:
        return order
    source = source_lengths[grouped]
    # Up to 5 % of jitter changes the company an example keeps from epoch to epoch.
    target = target_lengths[grouped] * rng.uniform(0.95, 1.05, size=len(grouped))
    bucket = _source_buckets(source, target, num_batches, rng)
    # Targets run up in one bucket and down in the next, so that a batch across a border is even.
    snake = np.where(bucket % 2 == 0, target, -target)
    # One key for both: half the time of sorting by two.
    key = bucket * (2.0 * float(target.max()) + 1.0) + snake
    grouped = grouped[np.argsort(key, kind="stable")]
    batches = grouped.reshape(num_batches, batch_size)[rng.permutation(num_batches)]
    return np.concatenate([batches.reshape(-1), rest])


def _source_buckets(
    source: np.ndarray, target: np.ndarray, num_batches: int, rng: np.random.Generator
) -> np.ndarray:
    """Bucket of each example by source length; within a bucket the target decides.

    K buckets leave a source spread of about std(source) / K in a batch and a target spread of
    std(target) * K / batches; their sum is least at K = sqrt(batches * std(source) / std(target)).
    Equal sources (those cut at the limit) always fall into one bucket.
    """
    ratio = (np.std(source) + 1.0) / (np.std(target) + 1.0)
    count = int(np.clip(round(math.sqrt(num_batches * ratio)), 1, num_batches))
    # Borders move from epoch to epoch, which again changes who meets whom.
    quantiles = (np.arange(count) + rng.uniform()) / count
    borders = np.unique(np.quantile(source, quantiles, method="lower"))
    return np.searchsorted(borders, source, side="left")
