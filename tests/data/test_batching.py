"""The batch plan and its division: properties that hold for any lengths, seeds and ranks."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5_fsdp.data.batch_division import divide_batch
from t5_fsdp.data.batching import StepBatches, check_longest
from t5_fsdp.data.collation import IGNORED_LABEL, SpecialIds, collate
from t5_fsdp.data.epoch_plan import plan_epoch
from t5_fsdp.data.tokenized import TokenizedSplit
from t5_fsdp.errors import UserError

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=60)


@settings(deadline=None)
@given(
    LENGTHS, st.integers(1, 20), st.integers(0, 3), st.sampled_from(["shuffled", "length_grouped"])
)
def test_each_example_once_an_epoch(
    lengths: list[tuple[int, int]], batch_size: int, epoch: int, batching: str
) -> None:
    source, target = np.array(lengths).T
    plan = plan_epoch(
        source, target, global_batch_size=batch_size, batching=batching, seed=3, epoch=epoch
    )
    batches = [plan.batch(index).tolist() for index in range(len(plan))]
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= batch_size


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(90, 400), st.integers(0, 9))
def test_division_is_complete_even_and_within_the_limit(
    lengths: list[tuple[int, int]], world_size: int, limit: int, rotation: int
) -> None:
    source, target = map(list, zip(*lengths, strict=True))
    shares = divide_batch(
        source, target, world_size=world_size, micro_batch_tokens=limit, rotation=rotation
    )
    assert len({len(share) for share in shares}) == 1 and len(shares) == world_size
    groups = [group for share in shares for group in share]
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in filter(None, groups):
        assert len(group) * (max(source[i] for i in group) + max(target[i] for i in group)) <= limit
    if len(lengths) >= len(groups):
        assert all(groups), "a rank idles though there are examples enough"


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 20), st.integers(90, 300), st.integers(0, 99), st.booleans())
def test_an_epoch_on_any_number_of_ranks(
    lengths: list[tuple[int, int]], batch_size: int, limit: int, seed: int, grouped: bool
) -> None:
    # The first token of a source tells which example it is.
    sources = [[number + 2] + [1] * (length - 1) for number, (length, _) in enumerate(lengths)]
    split = TokenizedSplit.from_ids(sources, [[1] * length for _, length in lengths])
    plans = []
    for world_size in (1, 2, 3, 8):
        ranks = [
            StepBatches(
                split,
                SpecialIds(0, 0),
                rank=rank,
                world_size=world_size,
                global_batch_size=batch_size,
                micro_batch_tokens=limit,
                batching="length_grouped" if grouped else "shuffled",
                seed=seed,
            )
            for rank in range(world_size)
        ]
        seen: list[list[int]] = []
        for step in range(1, ranks[0].steps_per_epoch + 1):
            shares = [batches.step(step) for batches in ranks]
            assert len({len(share.micro_batches) for share in shares}) == 1
            micro_batches = [micro for share in shares for micro in share.micro_batches]
            assert all(m.input_ids.numel() + m.labels.numel() <= limit for m in micro_batches)
            rows = [first - 2 for m in micro_batches for first in m.input_ids[:, 0].tolist()]
            rows = sorted(row for row in rows if row >= 0)  # without the rows of padding
            groups = [names for share in shares for names in share.micro_batch_names()]
            assert rows == sorted(map(int, itertools.chain(*groups)))
            assert len(rows) == shares[0].num_examples
            seen.append(rows)
        assert sorted(itertools.chain(*seen)) == list(range(len(lengths)))
        plans.append(seen)
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.long
def test_the_plan_of_ten_million_examples_is_quick_and_small() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(10, 512, 10_000_000).astype(np.int32)
    target = rng.integers(4, 150, 10_000_000).astype(np.int32)
    tracemalloc.start()  # numpy reports what it allocates
    began = time.process_time()
    plan_epoch(source, target, global_batch_size=128, batching="length_grouped", seed=1, epoch=0)
    assert time.process_time() - began < 10
    assert tracemalloc.get_traced_memory()[1] < 1e9
    tracemalloc.stop()


def test_order_differs_by_epoch_and_seed_but_not_by_call() -> None:
    lengths = np.arange(1, 200)
    plans = [
        plan_epoch(
            lengths, lengths, global_batch_size=8, batching="length_grouped", seed=seed, epoch=epoch
        ).order.tolist()
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2] and plans[0] != plans[3]


def test_grouping_by_length_saves_padding_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    source = np.minimum(512, rng.lognormal(6.4, 0.8, 20_000).astype(int) + 10)
    target = np.clip(rng.lognormal(4.2, 0.5, 20_000).astype(int), 4, 150)
    shares, loads = {}, np.zeros(8)
    for batching in ("length_grouped", "shuffled"):
        plan = plan_epoch(source, target, global_batch_size=128, batching=batching, seed=1, epoch=0)
        padded = 0
        for index in range(len(plan)):
            rows = plan.batch(index)
            for rank, share in enumerate(
                divide_batch(
                    source[rows].tolist(),
                    target[rows].tolist(),
                    world_size=8,
                    micro_batch_tokens=16384,
                    rotation=index,
                )
            ):
                cost = sum(
                    len(g) * int(source[rows[g]].max() + target[rows[g]].max()) for g in share if g
                )
                padded += cost
                loads[rank] += cost if batching == "length_grouped" else 0
        shares[batching] = 1 - int(source.sum() + target.sum()) / padded
    assert shares["length_grouped"] < 0.025 < shares["shuffled"]
    assert loads.max() / loads.min() < 1.03


def test_collation_pads_and_shifts() -> None:
    batch = collate(
        [np.array([5, 6, 1]), np.array([7, 1])], [np.array([8, 1]), np.array([9, 8, 1])],
        SpecialIds(pad=0, decoder_start=0),
    )  # fmt: skip
    assert batch.input_ids.tolist() == [[5, 6, 1], [7, 1, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.labels.tolist() == [[8, 1, IGNORED_LABEL], [9, 8, 1]]
    assert batch.decoder_input_ids.tolist() == [[0, 8, 1], [0, 9, 8]]


def test_without_examples_there_is_a_forward_but_no_target() -> None:
    batch = collate([], [], SpecialIds(pad=0, decoder_start=0))
    assert batch.input_ids.shape == (1, 1)
    assert batch.labels.tolist() == [[IGNORED_LABEL]]


def test_an_example_above_the_limit_is_named() -> None:
    split = TokenizedSplit.from_ids([[5, 1], [5] * 40 + [1]], [[6, 1], [6, 1]])
    with pytest.raises(UserError, match=r"row 1 of the train split has 43 tokens.*micro_batch"):
        StepBatches(
            split,
            SpecialIds(0, 0),
            rank=0,
            world_size=1,
            global_batch_size=2,
            micro_batch_tokens=42,
            batching="shuffled",
            seed=1,
        )


def test_what_a_library_hands_over_is_checked_as_well() -> None:
    with pytest.raises(UserError, match=r"43 tokens .* exceeds train.micro_batch_tokens \(42\)"):
        divide_batch([2, 41], [2, 2], world_size=2, micro_batch_tokens=42)
    options = {
        "rank": 0, "world_size": 1, "global_batch_size": 2, "micro_batch_tokens": 42,
        "batching": "shuffled", "seed": 1,
    }  # fmt: skip
    with pytest.raises(UserError, match="training split is empty"):
        StepBatches(TokenizedSplit.from_ids([], []), SpecialIds(0, 0), **options)
    batches = StepBatches(TokenizedSplit.from_ids([[5, 1]], [[6, 1]]), SpecialIds(0, 0), **options)
    assert list(batches.iterate(4, 3)) == []  # nothing is left of the run
    assert [batch.step for batch in batches.iterate(4, 5)] == [4, 5]


def test_widths_are_multiples_and_stay_within_the_limit() -> None:
    rng = np.random.default_rng(7)
    source, target = rng.integers(1, 60, 300), rng.integers(1, 20, 300)
    split = TokenizedSplit.from_ids([[1] * n for n in source], [[1] * n for n in target])
    for multiple in (1, 8, 32):
        batches = StepBatches(
            split, SpecialIds(0, 0), rank=1, world_size=2, global_batch_size=50,
            micro_batch_tokens=600, batching="length_grouped", seed=1, width_multiple=multiple,
        )  # fmt: skip
        seen = padded = 0
        for batch in batches.iterate(1, batches.steps_per_epoch):
            for micro in batch.micro_batches:
                rows, width = micro.input_ids.shape
                assert width % multiple == 0 and micro.labels.shape[1] % multiple == 0
                assert rows * (width + micro.labels.shape[1]) <= 600
                if rows == 1:
                    assert width + micro.labels.shape[1] <= batches.longest_example
                seen += len(micro.target_ids)
            padded += batch.padded_tokens
        assert padded >= source.sum() + target.sum()
        assert 0 < seen < target.sum()
        exact = max(-(-source // multiple) * multiple + -(-target // multiple) * multiple)
        assert batches.longest_example == exact
    with pytest.raises(UserError, match="micro_batch_tokens"):
        check_longest(split, 64, 64)


def test_real_targets_are_found_in_the_padding() -> None:
    sources = [np.array([5, 6, 1]), np.array([7, 1])]
    targets = [np.array([9, 1]), np.array([8, 4, 3, 1])]
    micro = collate(sources, targets, SpecialIds(pad=0, decoder_start=0), 8)
    assert micro.labels.shape == (2, 8) and micro.input_ids.shape == (2, 8)
    assert micro.target_ids.tolist() == [9, 1, 8, 4, 3, 1]
    assert micro.target_rows.tolist() == [0, 1, 8, 9, 10, 11]
    assert collate([], [], SpecialIds(0, 0)).target_ids.tolist() == []
