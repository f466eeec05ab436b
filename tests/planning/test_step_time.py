"""Time and communication of a step, against figures worked out by hand."""

from __future__ import annotations

import pytest

from t5_fsdp.errors import UserError
from t5_fsdp.model.devices import DEVICES, peak_flops
from t5_fsdp.planning.step_time import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    Lengths,
    communication,
    recomputation_factor,
    step_time,
)
from tests.planning.runs import changed, planned

A100 = DEVICES["a100-40"]
LENGTHS = Lengths(512, 128, "")


def test_arithmetic_of_t5_3b_on_eight_a100s() -> None:
    """16 sequences a device, 5.84 TFLOP each, and a third more with recomputation."""
    run = planned("google-t5/t5-3b", parallel__activation_checkpointing="none")
    time = step_time(run, A100, LENGTHS)
    assert time.compute_seconds == pytest.approx(16 * 5.84 / (312 * COMPUTE_EFFICIENCY), rel=0.01)
    # NVLink is faster than the arithmetic; what it can't hide is small.
    assert time.compute_seconds < time.step_seconds < 1.05 * time.compute_seconds
    assert time.mfu == pytest.approx(COMPUTE_EFFICIENCY, rel=0.05)
    assert time.tokens_per_second == pytest.approx(128 * 640 / time.step_seconds)
    again = step_time(changed(run, parallel__activation_checkpointing="full"), A100, LENGTHS)
    assert again.compute_seconds == pytest.approx(4 / 3 * time.compute_seconds)
    assert again.mfu < 0.8 * time.mfu


def test_recomputation_of_some_layers() -> None:
    run = planned("google/byt5-small", parallel__activation_checkpointing_stack="encoder")
    assert recomputation_factor(run) == pytest.approx(1 + 12 / 16 / 3)
    every = changed(run, parallel__activation_checkpointing_every=5)
    assert recomputation_factor(every) == pytest.approx(1 + 3 / 16 / 3)
    kept = changed(run, parallel__activation_checkpointing="selective")
    assert recomputation_factor(kept) == 1.0


def test_bytes_of_full_sharding() -> None:
    """Blocks are gathered twice a micro-batch, the root once; gradients are reduced in float32."""
    run = planned("google-t5/t5-3b", parallel__sync_every_micro_batch=True)
    count, root = run.sizes.count, run.sizes.root.count
    sent = communication(run, 2)
    expected = 2 * (2 * (2 * count - root) + 4 * count) * 7 / 8
    assert (sent.within_node, sent.between_nodes) == (pytest.approx(expected), 0)
    once = communication(changed(run, parallel__sync_every_micro_batch=False), 2)
    assert sent.within_node - once.within_node == pytest.approx(4 * count * 7 / 8)
    kept = communication(changed(run, parallel__sharding="shard_grad_op"), 2)
    assert kept.within_node == pytest.approx(2 * (2 * count + 4 * count) * 7 / 8)
    ddp = changed(run, parallel__engine="ddp", parallel__sharding="no_shard")
    assert communication(ddp, 2).within_node == pytest.approx(2 * 2 * 4 * count * 7 / 8)
    alone = planned("google-t5/t5-3b", world_size=1)
    assert communication(alone, 2).within_node == 0


def test_bytes_between_nodes() -> None:
    run = planned("google-t5/t5-3b", world_size=32)
    count, root = run.sizes.count, run.sizes.root.count
    full = communication(run, 1)
    expected = (2 * (2 * count - root) + 4 * count) * 31 / 32
    assert full.between_nodes == full.within_node == pytest.approx(expected)
    hybrid = communication(changed(run, parallel__sharding="hybrid_shard"), 1)
    # An all-reduce of 8 ranks' shards between four nodes.
    assert hybrid.between_nodes == pytest.approx(2 * 4 * count * 3 / 4)
    assert hybrid.between_nodes < full.between_nodes
    # On the slow network of P4d this decides about the step.
    slow = step_time(run, A100, LENGTHS)
    seconds = slow.communication_between_nodes_bytes / (50e9 * BANDWIDTH_EFFICIENCY)
    assert slow.communication_seconds == pytest.approx(seconds)
    assert slow.step_seconds > slow.compute_seconds


def bytes_into_nodes(rings: list[list[int]], local: int, received: float) -> float:
    """Of the node that gets most, when each rank of a ring receives so much from the one before."""
    into: dict[int, float] = {}
    for ring in rings:
        for before, rank in zip([ring[-1], *ring], ring, strict=False):
            if before // local != rank // local:
                into[rank // local] = into.get(rank // local, 0.0) + received
    return max(into.values(), default=0.0)


@pytest.mark.parametrize(
    ("world", "local", "replicas"),
    [(8, 8, 2), (16, 8, 4), (16, 8, 2), (32, 8, 2), (24, 8, 4), (24, 8, 2), (12, 4, 4), (9, 3, 3)],
)
def test_bytes_between_nodes_of_any_number_of_replicas(
    world: int, local: int, replicas: int
) -> None:
    """Also several copies on a node, and copies whose ranks do not fill whole nodes."""
    run = planned(
        "google-t5/t5-small", world_size=world, devices_per_node=local,
        parallel__sharding="hybrid_shard", parallel__num_replicas=replicas,
    )  # fmt: skip
    count, root, shards = run.sizes.count, run.sizes.root.count, world // replicas
    copies = [list(range(first, first + shards)) for first in range(0, world, shards)]
    sharded = (2 * (2 * count - root) + 4 * count) * (shards - 1) / shards
    same = [list(range(first, world, shards)) for first in range(shards)]
    reduced = 2 * 4 * count / shards * (replicas - 1) / replicas
    expected = bytes_into_nodes(copies, local, sharded) + bytes_into_nodes(same, local, reduced)
    sent = communication(run, 1)
    assert sent.between_nodes == pytest.approx(expected)
    beside = reduced if shards < local else 0
    assert sent.within_node == pytest.approx(sharded + beside)


def test_a_part_of_the_ranks_to_gather_from_again() -> None:
    run = planned("google-t5/t5-3b", world_size=32, parallel__reshard_after_forward=8)
    count, blocks = run.sizes.count, run.sizes.count - run.sizes.root.count
    sent = communication(run, 3)
    whole = (3 * 2 + 4) * count * 31 / 32
    assert sent.between_nodes == pytest.approx(whole)
    assert sent.within_node == pytest.approx(whole + 3 * 2 * blocks * 7 / 8)


def test_all_wait_for_the_rank_that_has_most() -> None:
    """Ten examples on eight ranks take as long as sixteen."""
    few, full = (planned("google-t5/t5-3b", train__global_batch_size=n) for n in (10, 16))
    times = [step_time(run, A100, LENGTHS) for run in (few, full)]
    assert times[0].compute_seconds == times[1].compute_seconds
    assert times[0].mfu == pytest.approx(10 / 16 * times[1].mfu)


def test_more_micro_batches_gather_more() -> None:
    run = planned("google-t5/t5-3b")
    few, many = (
        step_time(changed(run, train__micro_batch_tokens=tokens), A100, LENGTHS)
        for tokens in (8192, 1024)
    )
    assert (few.micro_batches, many.micro_batches) == (2, 16)
    assert many.communication_within_node_bytes > 4 * few.communication_within_node_bytes


def test_an_adapter_reduces_next_to_nothing() -> None:
    whole, adapter = (planned("google-t5/t5-base", model__adapter=name) for name in (None, "lora"))
    assert adapter.sizes.trained < 0.05 * adapter.sizes.count
    for each in (0, 1):
        runs = whole, adapter
        assert runs[each].sizes.count >= 222_903_552
    times = [step_time(run, A100, LENGTHS) for run in (whole, adapter)]
    assert times[1].compute_seconds < times[0].compute_seconds
    assert times[1].optimizer_seconds < 0.1 * times[0].optimizer_seconds


def test_every_preset_has_a_peak_and_some_precisions_have_none() -> None:
    for device in DEVICES.values():
        assert peak_flops(device.name, "bf16") is not None, device
        assert 15e9 < device.memory_bytes < 160e9 < device.memory_bandwidth
    assert DEVICES["a100-40"].node_bandwidth == 400e9 / 8
    import dataclasses

    with pytest.raises(UserError, match="peak of CPU is not known"):
        step_time(planned(), dataclasses.replace(A100, name="CPU"), LENGTHS)
