"""Time of an optimizer step by roofline: the slowest of arithmetic, links and network.

FSDP gathers the next unit's weights and reduces the last one's gradients while a unit computes, so
arithmetic and communication run side by side and the longer one counts. The root's weights come
before anything can be computed, and the last gradients after; those are added, and so is the
optimizer's step, which the memory's bandwidth limits.

The two constants are what well-run training reaches of the data sheets' figures; a plan says them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from t5_fsdp.errors import UserError
from t5_fsdp.model.devices import Device, peak_flops
from t5_fsdp.model.flops import training_flops
from t5_fsdp.planning.run import PlannedRun

# Of the peak, recomputation counted: NeMo's T5-3B reaches about 47 % on A100s, T5X 25 to 37 % on
# TPUs, DeepSpeed's Flan-T5-XL (small batches, padded) about 20 %.
COMPUTE_EFFICIENCY = 0.45
# Of a link's and of the memory's bandwidth: NCCL's all-gather of large buffers reaches 230 of 300
# GB/s on A100s, a fused optimizer about as much of its memory's.
BANDWIDTH_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Lengths:
    """Tokens of a mean example, and where they are known from."""

    source: float
    target: float
    origin: str


@dataclass(frozen=True)
class Communication:
    """Bytes of one optimizer step.

    Attributes:
        within_node: that one device receives from others of its node (all, on one node).
        between_nodes: that one node receives from the others.
    """

    within_node: float
    between_nodes: float

    def __add__(self, other: Communication) -> Communication:
        return Communication(
            self.within_node + other.within_node, self.between_nodes + other.between_nodes
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they are made of.

    Attributes:
        step_seconds: max(compute, communication) + exposed + optimizer.
        exposed_seconds: communication that nothing runs beside.
        tokens_per_second: mean tokens of all devices, padding left out.
        mfu: share of the peak, recomputation not counted.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    communication_within_node_bytes: int
    communication_between_nodes_bytes: int
    micro_batches: int
    tokens_per_second: float
    mfu: float

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def step_time(run: PlannedRun, device: Device, lengths: Lengths) -> StepTime:
    """One optimizer step of examples of mean length.

    Raises:
        UserError: the device has no such precision.
    """
    parallel, world_size = run.parallel, run.world.world_size
    peak = peak_flops(device.name, parallel.param_dtype, parallel.tf32)
    if peak is None:
        raise UserError(f"the peak of {device.name} is not known; choose another --device")
    examples = run.train.global_batch_size / world_size
    micro_batches = mean_micro_batches(run, lengths)
    source, target = round(lengths.source), round(lengths.target)
    flops = training_flops(run.shape, source, target)
    # All wait for the rank that has most.
    compute = run.examples_a_rank * flops * recomputation_factor(run) / (COMPUTE_EFFICIENCY * peak)
    sent = communication(run, micro_batches)
    beside = _seconds(sent, device)
    exposed = _seconds(_exposed(run), device)
    optimizer = _optimizer_seconds(run, device)
    total = max(compute, beside - exposed) + exposed + optimizer
    tokens = run.train.global_batch_size * (lengths.source + lengths.target)
    return StepTime(
        step_seconds=total,
        compute_seconds=compute,
        communication_seconds=beside,
        exposed_seconds=exposed,
        optimizer_seconds=optimizer,
        communication_within_node_bytes=round(sent.within_node),
        communication_between_nodes_bytes=round(sent.between_nodes),
        micro_batches=micro_batches,
        tokens_per_second=tokens / total,
        mfu=examples * flops / total / peak,
    )


def mean_micro_batches(run: PlannedRun, lengths: Lengths) -> int:
    """Micro-batches of a rank in a step of examples of mean length."""
    padded = lengths.source + lengths.target
    rows = max(1, int(run.train.micro_batch_tokens // padded))
    return -(-run.examples_a_rank // rows)


def recomputation_factor(run: PlannedRun) -> float:
    """Arithmetic of a step relative to one without recomputation, whose forward pass is a third.

    `selective` recomputes no product. Attention counts with its stack; the head is in neither.
    """
    options, shape = run.activation_options(), run.shape
    if options.checkpointing != "full":
        return 1.0
    layers = {"encoder": shape.encoder_layers, "decoder": shape.decoder_layers}
    recomputed = sum(options.recomputed(stack, count) for stack, count in layers.items())
    whole = 3.0 if not shape.frozen else 2.0
    return 1.0 + recomputed / sum(layers.values()) / whole


def communication(run: PlannedRun, micro_batches: int) -> Communication:
    """Bytes of a step: all-gathers of weights, reductions of gradients, between copies too.

    A ring's all-gather or reduce-scatter of B bytes over n ranks brings each (n - 1) / n B, an
    all-reduce twice that; as much enters each node if the ring spans nodes.
    """
    parallel, sizes = run.parallel, run.sizes
    reductions = micro_batches if parallel.sync_every_micro_batch else 1
    gradients = float(sizes.trained)
    if parallel.engine == "ddp" or parallel.sharding == "no_shard":
        itemsize = 4 if parallel.engine == "ddp" else run.reduce_itemsize
        return _over(run, run.world.world_size, 2 * reductions * itemsize * gradients)
    blocks = float(sizes.count - sizes.root.count)
    shards, reshard = run.num_shards, parallel.reshard_after_forward
    gathered = micro_batches * run.itemsize * (blocks + sizes.root.count)
    sent = _over(run, shards, gathered + reductions * run.reduce_itemsize * gradients)
    if parallel.frees_units:
        # A number: the backward pass gathers from so many ranks.
        again = shards if isinstance(reshard, bool) or reshard is None else reshard
        sent += _over(run, again, micro_batches * run.itemsize * blocks)
    return sent + _between_replicas(run, reductions * run.reduce_itemsize * gradients / shards)


def _between_replicas(run: PlannedRun, size: float) -> Communication:
    """Of all-reduces of a shard among the ranks that hold the same one."""
    shards, local = run.num_shards, run.world.launch.local_world_size
    replicas = run.world.world_size // shards
    received = 2 * size * (replicas - 1) / replicas
    # As many rings pass through a node as it holds different shards.
    rings = min(shards, local) if run.world.world_size > local else 0
    return Communication(received if shards < local else 0.0, rings * received)


def _over(run: PlannedRun, ranks: int, size: float) -> Communication:
    """Of rings over so many neighbouring ranks."""
    received = size * (ranks - 1) / ranks
    return Communication(received, _rings_across(run, ranks) * received)


def _rings_across(run: PlannedRun, ranks: int) -> int:
    """Rings of neighbouring ranks that enter a node and leave it, on the node that has most.

    One where a ring spans whole nodes, none where it lies inside of one, and up to two where rings
    and nodes do not divide each other.
    """
    local, size = run.world.launch.local_world_size, run.world.world_size
    most = 0
    for first in range(0, min(size, math.lcm(local, ranks)), local):
        edges = (first, first + local)
        most = max(most, len({edge // ranks for edge in edges if edge % ranks and edge < size}))
    return most


def _exposed(run: PlannedRun) -> Communication:
    """The root's weights before the first unit, and the last unit's gradients."""
    parallel, sizes = run.parallel, run.sizes
    if parallel.engine == "ddp" or parallel.sharding == "no_shard":
        last = sizes.largest("encoder").trained
        return _over(run, run.world.world_size, 2.0 * 4 * last)
    size = run.itemsize * sizes.root.count + run.reduce_itemsize * sizes.root.trained
    return _over(run, run.num_shards, float(size))


def _seconds(sent: Communication, device: Device) -> float:
    within = sent.within_node / device.link_bandwidth
    between = sent.between_nodes / device.node_bandwidth
    return max(within, between) / BANDWIDTH_EFFICIENCY


def _optimizer_seconds(run: PlannedRun, device: Device) -> float:
    """Weights, gradients and state are read and written once, gradients twice more to clip them."""
    engine, shards = run.parallel.engine, run.num_shards
    trained = run.sizes.on_a_rank(engine, shards, trained_only=True)
    state = run.sizes.optimizer_bytes(run.optimizer, engine, shards)
    moved = 2 * state + trained * 4 * (2 + 1 + 3)
    return moved / (BANDWIDTH_EFFICIENCY * device.memory_bandwidth)
