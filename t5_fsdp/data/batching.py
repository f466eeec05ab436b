"""Which examples form a step, and how a step is divided over ranks and micro-batches.

Two pure functions and what feeds a rank from them:

* `plan_epoch`: (lengths, seed, epoch) -> the epoch's global batches, the same for any number of
  ranks; each example once; the smaller last batch is kept.
* `divide_batch`: one global batch -> for each rank the same number of micro-batches, of about
  equal padded tokens, none above the limit.
* `StepBatches`: the micro-batches of one rank, step by step, collated one step ahead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from t5_fsdp.errors import UserError
from t5_fsdp.seeding import numpy_generator

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100  # torch's cross-entropy leaves these positions out


class TokenSource(Protocol):
    """What batching needs of a tokenized split; `tokenized.TokenizedSplit` is one."""

    source_lengths: np.ndarray
    target_lengths: np.ndarray

    def __len__(self) -> int: ...
    def source(self, index: int) -> np.ndarray: ...
    def target(self, index: int) -> np.ndarray: ...


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


def divide_batch(
    source_lengths: Sequence[int],
    target_lengths: Sequence[int],
    *,
    world_size: int,
    micro_batch_tokens: int,
    rotation: int = 0,
) -> list[list[list[int]]]:
    """Divide one batch: for each rank the same number of micro-batches of positions in the batch.

    A micro-batch costs rows x (longest source + longest target) padded tokens, at most
    `micro_batch_tokens`. The number of micro-batches is the least that fits; their costs are as
    even as a division of the length-sorted batch allows; a rank with too little to do gets empty
    micro-batches. `rotation` (the step) moves the heavier share from rank to rank.

    Raises:
        UserError: one example alone exceeds `micro_batch_tokens`.
    """
    source, target = list(map(int, source_lengths)), list(map(int, target_lengths))
    _check_fits(source, target, micro_batch_tokens)
    candidates = []
    for first, second in ((source, target), (target, source)):
        order = sorted(range(len(source)), key=lambda i: (first[i], second[i]), reverse=True)
        groups = _even_groups(order, source, target, world_size, micro_batch_tokens)
        costs = [_padded(group, source, target) for group in groups]
        candidates.append(((len(groups), max(costs, default=0), sum(costs)), groups))
    groups = min(candidates, key=lambda candidate: candidate[0])[1]
    return _deal(groups, source, target, world_size, rotation)


def _check_fits(source: list[int], target: list[int], limit: int) -> None:
    longest = max((s + t for s, t in zip(source, target, strict=True)), default=0)
    if longest > limit:
        raise UserError(
            f"an example of {longest} tokens (source + target) exceeds train.micro_batch_tokens "
            f"({limit}); raise it to at least {longest}, or lower data.max_source_tokens"
        )


def round_up(lengths: Any, multiple: int) -> Any:
    """Lengths (a number or an array of them), each the next multiple of `multiple`."""
    return -(-lengths // multiple) * multiple


def _padded(group: Sequence[int], source: list[int], target: list[int]) -> int:
    if not group:
        return 0
    return len(group) * (max(source[i] for i in group) + max(target[i] for i in group))


def _even_groups(
    order: list[int], source: list[int], target: list[int], world_size: int, limit: int
) -> list[list[int]]:
    """Cut `order` into k * world_size runs (some may be empty) with the smallest largest cost."""
    fewest = len(_greedy_groups(order, source, target, limit))
    wanted = world_size * max(1, math.ceil(fewest / world_size))
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        groups = _greedy_groups(order, source, target, middle, at_most=wanted)
        low, high = (low, middle) if groups else (middle + 1, high)
    groups = _greedy_groups(order, source, target, low, at_most=wanted) or []
    return _fill_up(groups, source, target, wanted)


def _greedy_groups(
    order: list[int],
    source: list[int],
    target: list[int],
    limit: int,
    at_most: int | None = None,
) -> list[list[int]]:
    """Longest runs under `limit`; empty when that takes more than `at_most` or one row is over."""
    groups: list[list[int]] = []
    rows = longest_source = longest_target = 0
    for index in order:
        new_source = max(longest_source, source[index])
        new_target = max(longest_target, target[index])
        if rows and (rows + 1) * (new_source + new_target) <= limit:
            groups[-1].append(index)
            rows, longest_source, longest_target = rows + 1, new_source, new_target
            continue
        if source[index] + target[index] > limit or len(groups) == at_most:
            return []
        groups.append([index])
        rows, longest_source, longest_target = 1, source[index], target[index]
    return groups


def _fill_up(
    groups: list[list[int]], source: list[int], target: list[int], wanted: int
) -> list[list[int]]:
    """Split the heaviest groups until there are `wanted`; then add empty ones."""
    heap = [(-_padded(group, source, target), number, group) for number, group in enumerate(groups)]
    heapq.heapify(heap)
    done: list[list[int]] = []
    number = len(groups)
    while heap and len(heap) + len(done) < wanted:
        _, _, group = heapq.heappop(heap)
        if len(group) == 1:
            done.append(group)
            continue
        half = len(group) // 2
        for part in (group[:half], group[half:]):
            heapq.heappush(heap, (-_padded(part, source, target), number, part))
            number += 1
    filled = done + [group for _, _, group in heap]
    return filled + [[] for _ in range(wanted - len(filled))]


def _deal(
    groups: list[list[int]],
    source: list[int],
    target: list[int],
    world_size: int,
    rotation: int,
) -> list[list[list[int]]]:
    """Heaviest group first to the lightest rank that still has room; each gets equally many."""
    share = len(groups) // world_size
    hands: list[list[list[int]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for group in sorted(groups, key=lambda group: -_padded(group, source, target)):
        open_ranks = [rank for rank in range(world_size) if len(hands[rank]) < share]
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        hands[rank].append(group)
        loads[rank] += _padded(group, source, target)
    shift = rotation % world_size
    return hands[shift:] + hands[:shift]


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank.

    Attributes:
        input_ids: int64 [batch, source].
        attention_mask: int64 [batch, source], 1 at real tokens.
        decoder_input_ids: int64 [batch, target], the labels shifted right.
        labels: int64 [batch, target], -100 at padding.
        target_rows: int64 [targets], where the real ones stand in the flattened labels. Found on
            the CPU: on a GPU the host would have to wait for their number.
        target_ids: int64 [targets], the labels there.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    decoder_input_ids: torch.Tensor
    labels: torch.Tensor
    target_rows: torch.Tensor
    target_ids: torch.Tensor

    def inputs(self) -> dict[str, Any]:
        """What the model's forward takes to give logits."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "decoder_input_ids": self.decoder_input_ids,
            "use_cache": False,  # recomputation under activation checkpointing fails with a cache
        }

    def loss_inputs(self) -> dict[str, Any]:
        """What it takes to give the loss, see `model.forward`."""
        targets = {"target_rows": self.target_rows, "target_ids": self.target_ids}
        return {**self.inputs(), **targets}

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`; the copy overlaps with computing where memory is pinned."""
        pin = device.type == "cuda"
        return MicroBatch(
            **{
                name: (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)
                for name, tensor in vars(self).items()
            }
        )


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that collation needs."""

    pad: int
    decoder_start: int


def collate(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    special: SpecialIds,
    width_multiple: int = 1,
) -> MicroBatch:
    """Pad token ids to the longest source and the longest target of the micro-batch.

    Without examples it is one row of padding without a real target: every rank has to take part
    in the collectives of a forward and backward, and this one adds exactly zero to them.

    Args:
        width_multiple: both widths are rounded up to a multiple of it.
    """
    import torch

    if not sources:
        sources, targets = [np.array([special.pad])], [np.array([IGNORED_LABEL])]
    input_ids = _pad(sources, special.pad, width_multiple)
    labels = _pad(targets, IGNORED_LABEL, width_multiple)
    decoder_input_ids = np.full_like(labels, special.decoder_start)
    decoder_input_ids[:, 1:] = np.where(labels == IGNORED_LABEL, special.pad, labels)[:, :-1]
    lengths = np.array([len(source) for source in sources])
    mask = (np.arange(input_ids.shape[1])[None, :] < lengths[:, None]).astype(np.int64)
    real = np.flatnonzero(labels != IGNORED_LABEL)
    arrays = (input_ids, mask, decoder_input_ids, labels, real, labels.reshape(-1)[real])
    return MicroBatch(*map(torch.from_numpy, arrays))


def collate_rows(
    split: TokenSource, rows: np.ndarray, special: SpecialIds, width_multiple: int = 1
) -> MicroBatch:
    """`collate` of examples of a split, by their indices."""
    sources = [split.source(int(row)) for row in rows]
    targets = [split.target(int(row)) for row in rows]
    return collate(sources, targets, special, width_multiple)


def _pad(rows: Sequence[np.ndarray], value: int, width_multiple: int) -> np.ndarray:
    width = int(round_up(max(map(len, rows)), width_multiple))
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step, and what the step is as a whole.

    Attributes:
        micro_batches: this rank's, as many as every other rank's.
        micro_batch_names: looks up what the examples in each of them are called.
        num_examples: in the whole global batch.
        examples_seen: since the start of the run, this step included.
        source_tokens, target_tokens: real ones of the whole global batch, end marks included.
        padded_tokens: rows x (longest source + longest target), summed over all ranks.
        place: what a stream needs to go on behind this step.
    """

    step: int
    epoch: float
    micro_batches: list[MicroBatch]
    micro_batch_names: Callable[[], list[list[str]]]
    num_examples: int
    examples_seen: int
    source_tokens: int
    target_tokens: int
    padded_tokens: int
    place: dict[str, int] = field(default_factory=dict)


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
        return int(_padded_tokens(self._split, self._width_multiple).max())

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
            source_tokens=int(source.sum()),
            target_tokens=int(target.sum()),
            padded_tokens=sum(_padded(group, *widths) for share in shares for group in share),
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
    totals = _padded_tokens(split, width_multiple)
    worst = int(totals.argmax()) if len(totals) else 0
    if len(totals) and totals[worst] > micro_batch_tokens:
        rounded = f", in multiples of {width_multiple}" if width_multiple > 1 else ""
        raise UserError(
            f"row {worst} of the {name} split has {int(totals[worst])} tokens (source + "
            f"target{rounded}), more than train.micro_batch_tokens ({micro_batch_tokens}); raise "
            f"it to at least {int(totals[worst])}, or lower data.max_source_tokens or "
            "data.max_target_tokens"
        )


def _padded_tokens(split: TokenSource, width_multiple: int) -> np.ndarray:
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
