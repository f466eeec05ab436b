"""The micro-batches of a rank, step by step and collated one step ahead, and of an evaluation.

Which examples form a step is `epoch_plan`'s business, how a step is divided over ranks and
micro-batches `batch_division`'s, and what tensors are made of them `collation`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from t5_fsdp.data.batch_division import divide_batch, padded_tokens, round_up
from t5_fsdp.data.collation import MicroBatch, SpecialIds, TokenSource, collate_rows
from t5_fsdp.data.epoch_plan import EpochPlan, MixturePart, draw_mixture, plan_epoch
from t5_fsdp.data.token_sums import TokenSums
from t5_fsdp.errors import UserError


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step, and what the step is as a whole.

    Attributes:
        micro_batches: this rank's, as many as every other rank's.
        micro_batch_names: looks up what the examples in each of them are called.
        num_examples: in the whole global batch.
        examples_seen: since the start of the run, this step included.
        tokens: real ones of the whole global batch, prefix and end marks included.
        padded_tokens: rows x (longest source + longest target), summed over all ranks.
        place: what a stream needs to go on behind this step.
    """

    step: int
    epoch: float
    micro_batches: list[MicroBatch]
    micro_batch_names: Callable[[], list[list[str]]]
    num_examples: int
    examples_seen: int
    tokens: TokenSums
    padded_tokens: int
    place: dict[str, int] = field(default_factory=dict)

    @property
    def source_tokens(self) -> int:
        return int(self.tokens.source)

    @property
    def target_tokens(self) -> int:
        return int(self.tokens.target)


class Batches(Protocol):
    """What a training loop needs of its data.

    Attributes:
        num_examples, steps_per_epoch: None where a stream does not know.
        longest_example: tokens of an example, source and target as they are padded, that none
            exceeds.
    """

    @property
    def num_examples(self) -> int | None: ...
    @property
    def steps_per_epoch(self) -> int | None: ...
    @property
    def longest_example(self) -> int: ...
    def iterate(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Batches of the steps `first_step` to `last_step` (from 1)."""


class StepBatches:
    """The batches of one rank, by step number.

    Args:
        split: token ids and their lengths.
        special: ids for padding and for the decoder's start.
        rank, world_size: whose share to collate.
        width_multiple: the widths of micro-batches are multiples of it.
        mixture: the split's sources with their weights; none: each example once an epoch.
        name_of: what to call an example of the split by its index, in messages.

    Raises:
        UserError: an example alone exceeds `micro_batch_tokens`, or the split is empty.
    """

    def __init__(
        self,
        split: TokenSource,
        special: SpecialIds,
        *,
        rank: int,
        world_size: int,
        global_batch_size: int,
        micro_batch_tokens: int,
        batching: str,
        seed: int,
        width_multiple: int = 1,
        mixture: Sequence[MixturePart] = (),
        name_of: Callable[[int], str] = str,
    ) -> None:
        if len(split) == 0:
            raise UserError("the training split is empty; check the data files and their columns")
        self._split = split
        self._special = special
        self._rank, self._world_size = rank, world_size
        self._global_batch_size = global_batch_size
        self._micro_batch_tokens = micro_batch_tokens
        self._batching, self._seed = batching, seed
        self._width_multiple = width_multiple
        self._mixture = mixture
        self._name_of = name_of
        self._plan: tuple[int, EpochPlan] | None = None
        check_longest(split, micro_batch_tokens, width_multiple)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self._split) / self._global_batch_size)

    @property
    def num_examples(self) -> int:
        return len(self._split)

    @property
    def longest_example(self) -> int:
        return int(_example_tokens(self._split, self._width_multiple).max())

    def iterate(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Batches of the steps `first_step` to `last_step` (from 1), collated one step ahead."""
        if first_step > last_step:
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
            ahead: Future[StepBatch] = pool.submit(self.step, first_step)
            for step in range(first_step, last_step + 1):
                batch = ahead.result()
                if step < last_step:
                    ahead = pool.submit(self.step, step + 1)
                yield batch

    def step(self, step: int) -> StepBatch:
        """The batch of one step; the first step is 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        indices = self._epoch_plan(epoch).batch(place)
        source = self._split.source_lengths[indices]
        target = self._split.target_lengths[indices]
        widths = [round_up(lengths, self._width_multiple).tolist() for lengths in (source, target)]
        shares = divide_batch(
            *widths,
            world_size=self._world_size,
            micro_batch_tokens=self._micro_batch_tokens,
            rotation=step,
        )
        mine = [indices[group] for group in shares[self._rank]]
        return StepBatch(
            step=step,
            epoch=step / self.steps_per_epoch,
            micro_batches=[self._collate(group) for group in mine],
            micro_batch_names=lambda: [[self._name_of(int(i)) for i in group] for group in mine],
            num_examples=len(indices),
            examples_seen=epoch * len(self._split)
            + min(len(self._split), (place + 1) * self._global_batch_size),
            tokens=TokenSums.of(source, target),
            padded_tokens=sum(padded_tokens(group, *widths) for share in shares for group in share),
        )

    def _epoch_plan(self, epoch: int) -> EpochPlan:
        if self._plan is None or self._plan[0] != epoch:
            drawn = np.arange(len(self._split))
            if self._mixture:
                drawn = draw_mixture(self._mixture, seed=self._seed, epoch=epoch)
            plan = plan_epoch(
                self._split.source_lengths[drawn],
                self._split.target_lengths[drawn],
                global_batch_size=self._global_batch_size,
                batching=self._batching,
                seed=self._seed,
                epoch=epoch,
            )
            self._plan = (epoch, EpochPlan(order=drawn[plan.order], starts=plan.starts))
        return self._plan[1]

    def _collate(self, indices: np.ndarray) -> MicroBatch:
        return collate_rows(self._split, indices, self._special, self._width_multiple)


def check_longest(
    split: TokenSource, micro_batch_tokens: int, width_multiple: int = 1, name: str = "train"
) -> None:
    """Refuse, before the first step, a split with an example above `micro_batch_tokens`.

    Args:
        split: lengths of its sources and targets.
        micro_batch_tokens: the limit.
        width_multiple: lengths count as the next multiple of it.
        name: of the split, for the message.

    Raises:
        UserError: naming the row, its length and the options to change.
    """
    totals = _example_tokens(split, width_multiple)
    worst = int(totals.argmax()) if len(totals) else 0
    if len(totals) and totals[worst] > micro_batch_tokens:
        rounded = f", in multiples of {width_multiple}" if width_multiple > 1 else ""
        raise UserError(
            f"row {worst} of the {name} split has {int(totals[worst])} tokens (source + "
            f"target{rounded}), more than train.micro_batch_tokens ({micro_batch_tokens}); raise "
            f"it to at least {int(totals[worst])}, or lower data.max_source_tokens or "
            "data.max_target_tokens"
        )


def _example_tokens(split: TokenSource, width_multiple: int) -> np.ndarray:
    """int64 [examples]: source and target of each, as they are padded where it is the longest."""
    source = round_up(split.source_lengths.astype(np.int64), width_multiple)
    return source + round_up(split.target_lengths, width_multiple)


def evaluation_batches(
    split: TokenSource,
    indices: np.ndarray,
    special: SpecialIds,
    *,
    rank: int,
    world_size: int,
    micro_batch_tokens: int,
    width_multiple: int = 1,
) -> list[MicroBatch]:
    """One rank's share of a pass over `indices`; every rank gets the same number of batches."""
    shares = evaluation_shares(
        split,
        indices,
        world_size=world_size,
        micro_batch_tokens=micro_batch_tokens,
        width_multiple=width_multiple,
    )
    return [collate_rows(split, rows, special, width_multiple) for rows in shares[rank]]


def evaluation_shares(
    split: TokenSource,
    indices: np.ndarray,
    *,
    world_size: int,
    micro_batch_tokens: int,
    width_multiple: int = 1,
) -> list[list[np.ndarray]]:
    """For each rank the same number of batches, of which some may be empty: a part of `indices`."""
    shares = divide_batch(
        round_up(split.source_lengths[indices], width_multiple).tolist(),
        round_up(split.target_lengths[indices], width_multiple).tolist(),
        world_size=world_size,
        micro_batch_tokens=micro_batch_tokens,
    )
    return [[indices[group] for group in share] for share in shares]
