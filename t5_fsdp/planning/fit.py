"""Whether a run fits into a device, the largest micro-batch that does, and what else would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from t5_fsdp.config import ParallelConfig
from t5_fsdp.config_problems import idle_options, sharding_problems
from t5_fsdp.errors import UserError
from t5_fsdp.parallel.mesh import mesh_problems
from t5_fsdp.planning.memory import estimate_memory
from t5_fsdp.planning.run import PlannedRun
from t5_fsdp.quantities import memory_size

# Of a device's memory PyTorch's tensors cannot have: CUDA's context (0.5 GiB), NCCL's buffers
# (about 0.5), workspaces of cuBLAS, and what the allocator loses between its blocks.
RESERVED_BYTES = 2 * 2**30
# A run is refused before it starts only where the estimate is over by more than it may be wrong.
_CLEARLY = 1.25


def usable_bytes(device_bytes: int) -> int:
    """What a run's tensors can have of a GPU's memory."""
    return max(0, device_bytes - RESERVED_BYTES)


def largest_micro_batch_tokens(run: PlannedRun, limit: int) -> int | None:
    """The largest `train.micro_batch_tokens` whose estimated peak is at most `limit` bytes.

    Returns:
        At most what a rank's share of a step comes to: a larger one changes nothing. None when not
        even one example fits.
    """

    def fits(tokens: int) -> bool:
        train = replace(run.train, micro_batch_tokens=tokens)
        return estimate_memory(replace(run, train=train)).peak <= limit

    for low, high in _alike(run):
        if not fits(low):
            continue
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low
    return None


def _alike(run: PlannedRun) -> list[tuple[int, int]]:
    """First and last `micro_batch_tokens` of steps of one, of two and of more micro-batches.

    Within each a larger micro-batch needs more memory; from one to the next less may do, as whole
    gradients need not be kept between micro-batches where there is only one.
    """
    longest, examples = sum(run.longest), run.examples_a_rank
    firsts = sorted({examples, -(-examples // 2), 1}, reverse=True)
    lasts = [examples * longest, *(first * longest - 1 for first in firsts)]
    return [(first * longest, last) for first, last in zip(firsts, lasts, strict=False)]


@dataclass(frozen=True)
class Change:
    """Options that would need less memory.

    Attributes:
        options: by dotted name.
        peak: estimated with them, in bytes.
    """

    options: dict[str, Any]
    peak: int

    def describe(self) -> str:
        """As they stand in a configuration."""
        return f"{as_yaml(self.options)} (peak {memory_size(self.peak)})"


def as_yaml(options: dict[str, Any]) -> str:
    """In one line, as they stand in a configuration."""
    words = {None: "null", True: "true", False: "false"}
    return ", ".join(
        f"{name}: {words[value] if value is None or isinstance(value, bool) else value}"
        for name, value in options.items()
    )


def remedies(run: PlannedRun, limit: int) -> list[Change]:
    """Changes that make the run fit into `limit` bytes, the least costly first; may be empty.

    Those that suffice alone and change no more than speed. Where there are none, the fewest that
    suffice together: with the micro-batch as it is, and with the largest that fits.
    """
    alone = [change for change in _single_changes(run, limit) if change.peak <= limit]
    return alone or _joint_changes(run, limit)


def _joint_changes(run: PlannedRun, limit: int) -> list[Change]:
    with_smaller: Change | None = None
    options: dict[str, Any] = {}
    for more in _steps(run):
        joined = accepted(run, options | more)
        if joined is None:
            continue
        options = joined
        changed = with_options(run, options)
        peak = estimate_memory(changed).peak
        if peak <= limit:
            found = [Change(dict(options), peak), with_smaller]
            return [change for change in found if change is not None]
        with_smaller = with_smaller or _with_fitting_micro_batch(run, options, limit)
    return [] if with_smaller is None else [with_smaller]


def _with_fitting_micro_batch(
    run: PlannedRun, options: dict[str, Any], limit: int
) -> Change | None:
    reduced = {"parallel.sync_every_micro_batch": True}
    # Smaller micro-batches are several, between which whole gradients would be kept.
    for more in ({}, reduced):
        changed = with_options(run, options | more)
        tokens = largest_micro_batch_tokens(changed, limit)
        if tokens is not None:
            found = options | more | {"train.micro_batch_tokens": tokens}
            return Change(found, estimate_memory(with_options(run, found)).peak)
    return None


def _single_changes(run: PlannedRun, limit: int) -> Iterator[Change]:
    tokens = largest_micro_batch_tokens(run, limit)
    if tokens is not None and tokens != run.train.micro_batch_tokens:
        options: dict[str, Any] = {"train.micro_batch_tokens": tokens}
        yield Change(options, estimate_memory(with_options(run, options)).peak)
    for step in _cheap_steps(run):
        found = accepted(run, step)
        if found is not None:
            yield Change(found, estimate_memory(with_options(run, found)).peak)


def _cheap_steps(run: PlannedRun) -> Iterator[dict[str, Any]]:
    """What changes speed alone."""
    parallel = run.parallel
    is_whole = not parallel.frees_units or parallel.sharding == "hybrid_shard"
    if run.world.world_size > 1 and is_whole:
        stays = parallel.engine != "ddp" and run.optimizer.name != "adafactor"
        yield _parallel_changes(
            parallel,
            engine=parallel.engine if stays else "fsdp2",  # fsdp1 has no rows for Adafactor
            sharding="full_shard",
            num_replicas=None,
            reshard_after_forward=None,
        )
    if run.micro_batches > 1 and not parallel.sync_every_micro_batch:
        yield {"parallel.sync_every_micro_batch": True}
    everything = _parallel_changes(
        parallel,
        activation_checkpointing="full",
        activation_checkpointing_stack="both",
        activation_checkpointing_every=1,
    )
    if everything:
        yield everything


def _parallel_changes(parallel: ParallelConfig, **wanted: Any) -> dict[str, Any]:
    """Those that differ from what is set, by dotted name."""
    return {f"parallel.{name}": value for name, value in wanted.items()
            if getattr(parallel, name) != value}  # fmt: skip


def _steps(run: PlannedRun) -> Iterator[dict[str, Any]]:
    yield from _cheap_steps(run)
    if run.optimizer.name == "adamw" and run.optimizer.moments_dtype == "fp32":
        yield {"optimizer.moments_dtype": "bf16"}
    if run.optimizer.name != "adafactor" and run.parallel.engine != "fsdp1":
        yield {"optimizer.moments_dtype": "fp32", "optimizer.name": "adafactor"}


def with_options(run: PlannedRun, options: dict[str, Any]) -> PlannedRun:
    """The run with other values of options of its sections, by dotted name."""
    for name, value in options.items():
        section, _, option = name.partition(".")
        run = replace(run, **{section: replace(getattr(run, section), **{option: value})})
    return run


def accepted(run: PlannedRun, options: dict[str, Any]) -> dict[str, Any] | None:
    """Options as a training takes them: with what has to change beside them, by dotted name.

    E.g. parallel.cpu_offload: false beside parallel.engine: ddp.

    Returns:
        None where options that stay, or the ranks, do not suit them.
    """
    idle = idle_options(with_options(run, options).parallel)
    options = options | {f"parallel.{option.name}": option.neutral for option in idle}
    changed = with_options(run, options)
    if changed.parallel.wrap != run.parallel.wrap:
        return None  # the units would be others than those that `run.sizes` counts
    if sharding_problems(changed.parallel, changed.optimizer):
        return None
    return None if mesh_problems(changed.parallel, changed.world) else options


def refusal(run: PlannedRun, device_bytes: int) -> UserError | None:
    """Why a run cannot fit into so much memory, a GPU's or a process's part of a host's.

    Returns:
        None where it may.

    Cautious: it asks whether weights, gradients and optimizer state alone are too large, or the
    peak of the longest examples is by a quarter, which no error of the estimate explains. Too small
    a margin shows as an out-of-memory error at the first long batch, which says the same advice.
    """
    parts = estimate_memory(run, run.micro_batch(*run.longest))
    on_gpu = run.world.device.type == "cuda"
    state, limit = parts.state, usable_bytes(device_bytes) if on_gpu else device_bytes
    if state <= limit and parts.peak <= _CLEARLY * device_bytes:
        return None
    what = "weights, gradients and optimizer state alone" if state > limit else "a step"
    needed = state if state > limit else parts.peak
    changes = remedies(run, limit)
    advice = [f"fits with {change.describe()}" for change in changes] or [
        "no setting of these ranks fits; use more of them, a smaller model, or model.adapter: lora"
    ]
    room = memory_size(device_bytes)
    place = f"a device with {room}" if on_gpu else f"{room}, its part of this host's memory"
    return UserError(
        f"the run does not fit: {what} need {memory_size(needed)} on a rank, of {place}; change "
        "options as below, or give --check_memory false",
        *advice,
    )
