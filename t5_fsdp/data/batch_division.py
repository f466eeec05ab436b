"""How a global batch is divided: for each rank the same number of micro-batches, of about equal
padded tokens, none above the limit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

from t5_fsdp.errors import UserError


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
        costs = [padded_tokens(group, source, target) for group in groups]
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


def padded_tokens(group: Sequence[int], source: list[int], target: list[int]) -> int:
    """What a micro-batch costs: rows x (longest source + longest target), in tokens."""
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
    heap = [
        (-padded_tokens(group, source, target), number, group)
        for number, group in enumerate(groups)
    ]
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
            heapq.heappush(heap, (-padded_tokens(part, source, target), number, part))
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
    for group in sorted(groups, key=lambda group: -padded_tokens(group, source, target)):
        open_ranks = [rank for rank in range(world_size) if len(hands[rank]) < share]
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        hands[rank].append(group)
        loads[rank] += padded_tokens(group, source, target)
    shift = rotation % world_size
    return hands[shift:] + hands[:shift]
