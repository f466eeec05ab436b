"""What fits, what would, and what is refused."""

from __future__ import annotations

import pytest

from t5_fsdp.config_problems import sharding_problems
from t5_fsdp.model.devices import DEVICES
from t5_fsdp.parallel.mesh import mesh_problems
from t5_fsdp.planning.fit import (
    largest_micro_batch_tokens,
    refusal,
    remedies,
    usable_bytes,
    with_options,
)
from t5_fsdp.planning.memory import estimate_memory
from t5_fsdp.planning.step_time import Lengths
from t5_fsdp.planning.sweep import sweep
from tests.planning.runs import changed, planned

GIB = 2**30
FORTY = usable_bytes(40 * GIB)


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    run = planned("google-t5/t5-3b", parallel__activation_checkpointing="none")
    tokens = largest_micro_batch_tokens(run, FORTY)
    assert tokens is not None and 662 < tokens < 16 * 662
    peaks = [
        estimate_memory(changed(run, train__micro_batch_tokens=number)).peak
        for number in (tokens, tokens + 1)
    ]
    assert peaks[0] <= FORTY < peaks[1]
    share = changed(run, parallel__activation_checkpointing="full", train__global_batch_size=16)
    assert largest_micro_batch_tokens(share, FORTY) == 2 * 662
    assert largest_micro_batch_tokens(run, 6 * GIB) is None


def test_11b_needs_gradients_reduced_after_each_micro_batch() -> None:
    run = planned("google-t5/t5-11b")
    assert estimate_memory(run).peak > FORTY
    changes = remedies(run, FORTY)
    assert {"parallel.sync_every_micro_batch": True} in [change.options for change in changes]
    for change in changes:
        assert estimate_memory(with_options(run, change.options)).peak == change.peak <= FORTY
        assert "GiB" in change.describe()


def test_a_whole_share_may_fit_where_a_part_of_it_does_not() -> None:
    """With one micro-batch a step, no whole gradients are kept between two."""
    run = planned("google-t5/t5-11b", parallel__sharding="hybrid_shard", world_size=16,
                  train__micro_batch_tokens=2648)  # fmt: skip
    assert estimate_memory(run).peak > FORTY
    assert largest_micro_batch_tokens(run, FORTY) == 8 * 662
    raised = {"train.micro_batch_tokens": 8 * 662}
    assert raised in [change.options for change in remedies(run, FORTY)]
    found = sweep(run, DEVICES["a100-40"], Lengths(512, 150, ""), FORTY)
    wanted = {
        "parallel.sharding": "hybrid_shard", "parallel.activation_checkpointing": "full",
        "optimizer.name": "adamw", "optimizer.moments_dtype": "fp32",
    } | raised  # fmt: skip
    assert any(wanted.items() <= candidate.options.items() for candidate in found)


def test_changes_are_joined_where_none_suffices() -> None:
    run = planned("google-t5/t5-11b", parallel__activation_checkpointing="none")
    joined, smaller = remedies(run, FORTY)
    reduced = {"parallel.sync_every_micro_batch": True}
    assert joined.options == reduced | {"parallel.activation_checkpointing": "full"}
    assert smaller.options == reduced | {
        "train.micro_batch_tokens": smaller.options["train.micro_batch_tokens"]
    }
    for change in (joined, smaller):
        assert estimate_memory(with_options(run, change.options)).peak <= FORTY
    assert remedies(planned("google-t5/t5-11b", world_size=1), FORTY) == []
    ddp = planned("google-t5/t5-3b", parallel__engine="ddp", parallel__sharding="no_shard")
    assert remedies(ddp, FORTY)[0].options["parallel.engine"] == "fsdp2"


def test_smaller_micro_batches_are_reduced_each_where_they_would_not_fit_else() -> None:
    """One micro-batch keeps no whole gradients, the smaller ones that would fit do."""
    run = planned("google-t5/t5-base", train__micro_batch_tokens=32768)
    assert run.micro_batches == 1
    [change] = remedies(run, GIB)
    assert change.options["parallel.sync_every_micro_batch"] is True
    assert estimate_memory(with_options(run, change.options)).peak == change.peak <= GIB


def test_advice_names_only_what_changes_and_as_one_would_write_it() -> None:
    run = planned(
        "google-t5/t5-11b", world_size=16, parallel__sharding="hybrid_shard",
        parallel__num_replicas=8, parallel__reshard_after_forward=False,
    )  # fmt: skip
    options = remedies(run, FORTY)[0].options
    expected = {
        "parallel.sharding": "full_shard",
        "parallel.num_replicas": None,
        "parallel.reshard_after_forward": None,
    }
    assert options.items() >= expected.items()
    assert "parallel.engine" not in options
    assert "parallel.num_replicas: null" in remedies(run, FORTY)[0].describe()


def test_only_what_is_clearly_too_large_is_refused() -> None:
    run = planned("google-t5/t5-11b", parallel__sync_every_micro_batch=True)
    assert refusal(run, 40 * GIB) is None
    error = refusal(run, 16 * GIB)
    assert error is not None and "gradients and optimizer state alone" in error.problems[0]
    assert "21.1 GiB" in error.problems[0] and "--check_memory false" in error.problems[0]
    kept = changed(run, parallel__activation_checkpointing="none")
    error = refusal(kept, 40 * GIB)
    assert error is not None and "a step need" in error.problems[0]
    assert any("activation_checkpointing: full" in problem for problem in error.problems[1:])
    # A little over may be the estimate's error, and is left to the run.
    peak = estimate_memory(run, run.micro_batch(*run.longest)).peak
    assert refusal(run, int(0.9 * peak)) is None
    assert refusal(run, int(0.75 * peak)) is not None


def test_a_sweep_gives_what_fits_fastest_first() -> None:
    run = planned("google-t5/t5-3b", world_size=16)
    found = sweep(run, DEVICES["a100-40"], Lengths(512, 128, ""), FORTY)
    assert len(found) > 10
    seconds = [candidate.time.step_seconds for candidate in found]
    assert seconds == sorted(seconds)
    assert all(candidate.memory.peak <= FORTY for candidate in found)
    shardings = {candidate.options["parallel.sharding"] for candidate in found}
    assert {"full_shard", "shard_grad_op", "hybrid_shard"} <= shardings
    for candidate in found[:5]:
        again = estimate_memory(with_options(run, candidate.options))
        assert again.peak == candidate.memory.peak
    assert not sweep(run, DEVICES["a100-40"], Lengths(512, 128, ""), 2 * GIB)


# Settings whose options do not go with every other that a sweep or a remedy would set.
UNUSUAL: list[dict[str, object]] = [
    {"parallel__cpu_offload": True},
    {"parallel__activation_checkpointing_stack": "encoder"},
    {"parallel__activation_checkpointing_every": 2},
    {"parallel__forward_prefetch": 2},
    {"parallel__reshard_after_forward": 4},
    {"parallel__engine": "fsdp1", "parallel__backward_prefetch": "post"},
    {"parallel__engine": "fsdp1", "parallel__sharding": "no_shard", "optimizer__name": "adafactor"},
    {"parallel__wrap": "size", "parallel__wrap_min_parameters": 10_000_000},
    {"parallel__reduce_dtype": "bf16"},
]


@pytest.mark.parametrize("options", UNUSUAL, ids=str)
@pytest.mark.parametrize("gib", [4, 24])
def test_what_is_advised_is_what_a_training_takes(options: dict[str, object], gib: int) -> None:
    run = planned("google-t5/t5-large", **options)
    advised = [change.options for change in remedies(run, gib * GIB)]
    advised += [c.options for c in sweep(run, DEVICES["a100-40"], Lengths(512, 150, ""), gib * GIB)]
    assert advised
    for setting in advised:
        found = with_options(run, setting)
        assert sharding_problems(found.parallel, found.optimizer) == [], setting
        assert mesh_problems(found.parallel, found.world) == [], setting
        assert estimate_memory(found).peak <= gib * GIB


def test_a_sweep_says_what_has_to_change_beside_it() -> None:
    run = planned("google-t5/t5-base", parallel__cpu_offload=True)
    found = sweep(run, DEVICES["a100-40"], Lengths(512, 150, ""), FORTY)
    beside = {c.options["parallel.engine"]: c.companions for c in found}
    assert beside == {"ddp": {"parallel.cpu_offload": False}, "fsdp2": {}}


def test_recomputing_only_some_blocks_is_not_yet_all_that_saves() -> None:
    run = planned("google-t5/t5-large", parallel__activation_checkpointing_every=4)
    options = [change.options for change in remedies(run, 9 * GIB)]
    assert {"parallel.activation_checkpointing_every": 1} in options


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sweep_of_few_ranks(world_size: int) -> None:
    run = planned("google-t5/t5-base", world_size=world_size)
    found = sweep(run, DEVICES["l4"], Lengths(512, 128, ""), usable_bytes(24 * GIB))
    engines = {candidate.options["parallel.engine"] for candidate in found}
    assert engines == ({"fsdp2"} if world_size == 1 else {"fsdp2", "ddp"})
