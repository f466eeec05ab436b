"""All settings of a run that fit, fastest first, by closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from t5_fsdp.errors import UserError
from t5_fsdp.model.devices import Device
from t5_fsdp.planning.fit import accepted, largest_micro_batch_tokens, with_options
from t5_fsdp.planning.memory import estimate_memory
from t5_fsdp.planning.parts import MemoryParts
from t5_fsdp.planning.run import PlannedRun
from t5_fsdp.planning.step_time import Lengths, StepTime, step_time

_CHECKPOINTING = ("none", "selective", "full")
_SHARDINGS: tuple[tuple[str, str], ...] = (
    ("fsdp2", "full_shard"), ("fsdp2", "shard_grad_op"), ("fsdp2", "hybrid_shard"),
    ("ddp", "no_shard"),
)  # fmt: skip
_OPTIMIZERS: tuple[tuple[str, str], ...] = (
    ("adamw", "fp32"), ("adamw", "bf16"), ("adafactor", "fp32")
)  # fmt: skip
_SWEPT = frozenset({
    "parallel.engine", "parallel.sharding", "parallel.num_replicas",
    "parallel.reshard_after_forward", "parallel.activation_checkpointing",
    "parallel.sync_every_micro_batch", "optimizer.name", "optimizer.moments_dtype",
    "train.micro_batch_tokens",
})  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A setting that fits.

    Attributes:
        options: that differ between candidates, and what of the run has to change with them, by
            dotted name.
        run: the run with them.
    """

    options: dict[str, Any]
    run: PlannedRun
    memory: MemoryParts
    time: StepTime

    @property
    def companions(self) -> dict[str, Any]:
        """Options that no sweep goes through, but that these do not go with."""
        return {name: value for name, value in self.options.items() if name not in _SWEPT}

    def to_json(self) -> dict[str, Any]:
        """Options, memory and time."""
        return {"options": self.options, **self.memory.to_json(), **self.time.to_json()}


def sweep(run: PlannedRun, device: Device, lengths: Lengths, limit: int) -> list[Candidate]:
    """Settings whose estimated peak is at most `limit` bytes, fastest first.

    Over sharding, activation checkpointing, optimizer, whether gradients are reduced after each
    micro-batch, and micro-batches: the largest that fits of each. Of equally fast ones the one that
    needs less memory comes first. Optimizers are different recipes, not only different sizes.
    """
    found = []
    for setting in _settings(run):
        options = accepted(run, setting)
        if options is None:
            continue
        changed = with_options(run, options)
        tokens = largest_micro_batch_tokens(changed, limit)
        if tokens is None:
            continue
        options["train.micro_batch_tokens"] = tokens
        changed = with_options(run, options)
        if changed.parallel.sync_every_micro_batch and changed.micro_batches == 1:
            continue  # the same as without
        try:
            time = step_time(changed, device, lengths)
        except UserError:
            continue
        found.append(Candidate(options, changed, estimate_memory(changed), time))
    return sorted(found, key=lambda c: (c.time.step_seconds, c.memory.peak))


def _settings(run: PlannedRun) -> Iterator[dict[str, Any]]:
    for (engine, sharding), checkpointing, (name, moments), synced in itertools.product(
        _SHARDINGS, _CHECKPOINTING, _OPTIMIZERS, (False, True)
    ):
        if run.world.world_size == 1 and sharding != "full_shard":
            continue
        if run.world.world_size == 1 and synced:
            continue  # whole gradients are all there is
        if engine == "ddp" and (synced or run.parallel.reduce_dtype != "fp32"):
            continue  # nothing to gain, or not to be had
        yield {
            "parallel.engine": engine,
            "parallel.sharding": sharding,
            "parallel.num_replicas": (
                run.parallel.num_replicas if sharding == "hybrid_shard" else None
            ),
            "parallel.reshard_after_forward": None,
            "parallel.activation_checkpointing": checkpointing,
            "parallel.sync_every_micro_batch": synced,
            "optimizer.name": name,
            "optimizer.moments_dtype": moments,
        }
