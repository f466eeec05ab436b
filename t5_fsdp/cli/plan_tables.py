"""What `plan` prints, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from t5_fsdp.planning.fit import as_yaml
from t5_fsdp.planning.step_time import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from t5_fsdp.quantities import counted, duration, memory_size, traffic_size

if TYPE_CHECKING:
    from t5_fsdp.model.activations import MicroBatchShape
    from t5_fsdp.model.devices import Device
    from t5_fsdp.planning.fit import Change
    from t5_fsdp.planning.parts import MemoryParts
    from t5_fsdp.planning.run import PlannedRun
    from t5_fsdp.planning.step_time import StepTime
    from t5_fsdp.planning.sweep import Candidate
    from t5_fsdp.planning.workload import Workload

_GIB = 2**30
_WIDTH = 80
# By how much closed form and simulation may differ at the peak without a word.
_AGREE = 0.10


def wrap(text: str) -> str:
    """Lines of 80 columns."""
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _times(*seconds: float) -> tuple[list[str], str]:
    """Numbers of three digits, and the unit that suits the first: steps take microseconds to hours.

    E.g. (["0.442", "0.401"], "ms").
    """
    factor, unit = (1.0, "s") if seconds[0] >= 0.1 else (1000.0, "ms")
    shown = [factor * value for value in seconds]
    return ["0" if v < 1e-4 else f"{v:.1f}" if v >= 100 else f"{v:#.3g}" for v in shown], unit


def _memory_unit(num_bytes: int) -> tuple[int, str]:
    """Of a column whose largest number this is: bytes, and the name."""
    return (_GIB, "GiB") if num_bytes >= _GIB // 2 else (2**20, "MiB")


def heading(run: PlannedRun, batch: MicroBatchShape, device: str) -> str:
    """The run in two or three lines."""
    parallel, world = run.parallel, run.world
    nodes = world.world_size // world.launch.local_world_size
    trained = "" if run.sizes.trained == run.sizes.count else f" ({run.sizes.trained:,} trained)"
    optimizer: str = run.optimizer.name
    if run.optimizer.moments_dtype != "fp32":
        optimizer += f" {run.optimizer.moments_dtype}"
    sharding = parallel.sharding or ("no_shard" if parallel.engine == "ddp" else "full_shard")
    what = (
        f"{run.sizes.count:,} parameters{trained}, {world.world_size} x {device} on "
        f"{counted(nodes, 'node')}, {parallel.engine} {sharding} "
        f"{parallel.param_dtype}, activation checkpointing {parallel.activation_checkpointing}, "
        f"{optimizer}"
    )
    rows = (
        f"the micro-batch that needs most: {batch.rows} x ({batch.source} + {batch.target}) "
        f"tokens; a step of the longest examples has {counted(run.micro_batches, 'micro-batch')}"
    )
    return f"{wrap(what)}\n{wrap(rows)}"


def memory(estimated: MemoryParts, simulated: MemoryParts | None) -> str:
    """A row a part; the parts are not largest at the same time, so the peak is less than a sum."""
    columns = [estimated] if simulated is None else [estimated, simulated]
    size, unit = _memory_unit(estimated.peak)
    titles = ["closed form", "simulated"][: len(columns)]
    lines = [f"{unit} a rank".ljust(24) + "".join(title.rjust(14) for title in titles)]
    for name in asdict(estimated):
        cells = "".join(f"{getattr(column, name) / size:14.2f}" for column in columns)
        lines.append(name.replace("_", " ").ljust(24) + cells)
    if simulated is not None:
        difference = estimated.peak / simulated.peak - 1
        if abs(difference) > _AGREE:
            more = "more" if difference > 0 else "less"
            lines.append(
                wrap(
                    f"the closed form says {abs(difference):.0%} {more} than the simulation, which "
                    "counts; the largest micro-batch and the advice below are the closed form's"
                )
            )
    return "\n".join(lines)


def verdict(
    parts: MemoryParts,
    device_bytes: int,
    limit: int,
    fitting: int | None,
    run: PlannedRun,
    changes: Sequence[Change],
) -> str:
    """Fits or not, by how much, and what to change."""
    room = limit - parts.peak
    device = memory_size(device_bytes)
    if limit < device_bytes:
        device += f", of which {memory_size(limit)} are usable"
    lines = []
    if room >= 0:
        lines.append(f"fits: {memory_size(room)} to spare of {device}")
    else:
        lines.append(f"does not fit: {memory_size(-room)} too much for {device}")
        lines += [f"  fits with {change.describe()}" for change in changes]
        if not changes:
            lines.append(
                "  nothing on these ranks fits; use more of them, a smaller model, or "
                "model.adapter: lora"
            )
    if fitting is None:
        lines.append("no micro_batch_tokens fits: one example is too much")
    else:
        share = run.examples_a_rank * sum(run.longest)
        note = " (a rank's whole share of a step)" if fitting >= share else ""
        lines.append(f"largest train.micro_batch_tokens that fits: {fitting:,}{note}")
    return "\n".join(wrap(line) for line in lines)


def validation(needed: tuple[int, int], limit: int, run: PlannedRun, mode: str) -> str:
    """Whether the whole model that a validation generates with has room.

    Args:
        needed: bytes of weights and optimizer state, and of the whole model and its batch.
        limit: usable bytes of the device.
        mode: `evaluation.generation_mode`.
    """
    lasting, whole = map(memory_size, needed)
    text = (
        f"validation: a whole model that generates takes {whole} beside {lasting} of weights and "
        "optimizer state"
    )
    may_shard = run.parallel.frees_units and run.world.world_size > 1
    if mode == "sharded":
        return wrap(f"{text}; not needed with evaluation.generation_mode: sharded")
    if sum(needed) <= limit:
        return wrap(f"{text}: fits")
    if mode == "auto" and may_shard:
        return wrap(
            f"{text}: too much, so the weights stay sharded, which is slow "
            "(evaluation.generation_mode)"
        )
    remedy = "set evaluation.generation_mode to auto, or " if may_shard else ""
    return wrap(f"{text}: does not fit; {remedy}lower evaluation.batch_tokens or num_beams")


def time(
    found: StepTime,
    workload: Workload,
    steps: int | None,
    hours: float | None,
    dollars: float | None,
    nodes: int,
    price: float | None,
    device: Device,
) -> str:
    """Seconds of a step and what they rest on, hours and dollars."""
    lengths = workload.lengths
    traffic = f"{traffic_size(found.communication_within_node_bytes)} within a node (a device)"
    if nodes > 1:
        between = traffic_size(found.communication_between_nodes_bytes)
        traffic += f", {between} between nodes (a node)"
    (step, compute, communication, exposed, optimizer), unit = _times(
        found.step_seconds,
        found.compute_seconds,
        found.communication_seconds - found.exposed_seconds,
        found.exposed_seconds,
        found.optimizer_seconds,
    )
    lines = [
        f"step: {step} {unit} = max(arithmetic {compute}, communication {communication}) + not "
        f"overlapped {exposed} + optimizer {optimizer}",
        f"communication of a step: {traffic}",
        f"{found.tokens_per_second:,.0f} tokens/s, {found.mfu:.0%} MFU, "
        f"{counted(found.micro_batches, 'micro-batch')} a step",
        f"tokens of an example: {lengths.source:.0f} + {lengths.target:.0f} ({lengths.origin}); "
        f"{COMPUTE_EFFICIENCY:.0%} of the peak and {BANDWIDTH_EFFICIENCY:.0%} of the bandwidths "
        f"of {device.name} in {device.node}",
    ]
    if hours is None or steps is None:
        lines.append(
            "hours: not known, as the number of training examples is not; run prepare_data first, "
            "or give --num_examples"
        )
    else:
        cost = "" if dollars is None else f", {_dollars(dollars)} at ${price:g} for a node and hour"
        origin = ""
        if workload.num_examples is not None:
            origin = f" of {workload.num_examples:,} examples ({workload.num_examples_origin})"
        lines.append(
            f"run: {counted(steps, 'step')}{origin} take {duration(3600 * hours)} on "
            f"{counted(nodes, 'node')}{cost}, without validation and checkpoints"
        )
    return "\n".join(wrap(line) for line in lines)


def _dollars(amount: float) -> str:
    """With cents where they matter."""
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"


def sweep(found: Sequence[Candidate], shown: int = 12) -> str:
    """The fastest settings that fit."""
    if not found:
        return "no setting fits"
    shown_ones = list(enumerate(found[:shown], 1))
    size, unit = _memory_unit(max(candidate.memory.peak for _, candidate in shown_ones))
    second = _times(found[0].time.step_seconds)[1]
    per_second = 1000.0 if second == "ms" else 1.0
    return "\n".join(
        [
            f"{counted(len(found), 'setting')} fit, the fastest:",
            f"{'':>3}{'sharding':<15}{'checkpointing':<14}{'optimizer':<11}{'reduce':<7}"
            f"{'micro-batch':>12}{'peak ' + unit:>9}{second + '/step':>9}",
            *(
                f"{number:>2} {_setting(candidate)}{candidate.memory.peak / size:>9.1f}"
                f"{per_second * candidate.time.step_seconds:>#9.3g}"
                for number, candidate in shown_ones
            ),
            "reduce: gradients, after each micro-batch or the last of a step",
            *(
                wrap(f"{number:>2} with {as_yaml(candidate.companions)}")
                for number, candidate in shown_ones
                if candidate.companions
            ),
        ]
    )


def _setting(candidate: Candidate) -> str:
    """What tells a row of the sweep from the others, in columns."""
    options = candidate.options
    optimizer = options["optimizer.name"]
    if options["optimizer.moments_dtype"] == "bf16":
        optimizer += " bf16"
    is_ddp = options["parallel.engine"] == "ddp"
    sharding = "ddp" if is_ddp else options["parallel.sharding"]
    reduction = "each" if options["parallel.sync_every_micro_batch"] else "last"
    return (
        f"{sharding:<15}{options['parallel.activation_checkpointing']:<14}{optimizer:<11}"
        f"{reduction:<7}{options['train.micro_batch_tokens']:>12,}"
    )


def simulated_candidate(number: int, candidate: Candidate, parts: MemoryParts, limit: int) -> str:
    """A line of one of the best."""
    fits = "fits" if parts.peak <= limit else "does not fit"
    return (
        f"setting {number}, simulated: peak {memory_size(parts.peak)} (closed form "
        f"{memory_size(candidate.memory.peak)}), {fits}"
    )
