"""An error that memory ran out becomes advice: what was being computed, and which options help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from t5_fsdp.config import OptimizerConfig, ParallelConfig, TrainConfig
from t5_fsdp.data.batching import StepBatch
from t5_fsdp.data.collation import MicroBatch
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError, is_out_of_memory, tried_to_allocate
from t5_fsdp.model.activations import MicroBatchShape
from t5_fsdp.quantities import memory_size
from t5_fsdp.training.memory_use import resident_bytes
from t5_fsdp.training.profiling import MemorySnapshots

_WORTH_SAYING = 0.01  # of all that is taken
# Reserved beyond what is allocated: so much of it is lost between pieces that do not fit.
_FRAGMENTED = 0.15


@dataclass(frozen=True)
class Settings:
    """The options that decide how much memory a step takes, and its largest forward pass.

    Attributes:
        longest_example: tokens of source and target; a micro-batch has to hold it.
    """

    parallel: ParallelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    forward: MicroBatchShape
    longest_example: int


# Bytes that a rank needs at the peak of a step.
Estimate = Callable[[Settings], int]


@dataclass(frozen=True)
class Remedy:
    """One change of the options.

    Attributes:
        change: options and values, in words.
        price: what it costs.
        is_dear: it costs much speed, or changes what is computed.
    """

    change: str
    price: str
    after: Settings
    is_dear: bool = False


def remedies(now: Settings, *, world_size: int, on_gpu: bool) -> list[Remedy]:
    """The options that are not yet at their most sparing value, each changed by itself."""
    return [
        *_batch_remedies(now),
        *_activation_remedies(now),
        *_sharding_remedies(now, world_size, on_gpu),
        *_optimizer_remedies(now),
    ]


def _batch_remedies(now: Settings) -> Iterator[Remedy]:
    forward, limit = now.forward, now.train.micro_batch_tokens
    one = forward.source + forward.target
    half = max(one, forward.rows * one // 2, now.longest_example)
    if half < forward.rows * one:
        smaller = replace(forward, rows=half // one)
        yield Remedy(
            f"train.micro_batch_tokens: {half} (now {limit}; this one had {forward.rows * one})",
            "the same numbers, in more micro-batches",
            replace(now, train=replace(now.train, micro_batch_tokens=half), forward=smaller),
        )
    elif forward.rows == 1:
        yield Remedy(
            f"data.max_source_tokens: {forward.source // 2}",
            "longer sources are cut",
            replace(now, forward=replace(forward, source=forward.source // 2)),
            is_dear=True,
        )
    rows = now.train.loss_chunk_rows or forward.rows * forward.target
    chunk = max(32, min(rows, forward.rows * forward.target) // 4)
    if chunk < rows:
        yield Remedy(
            f"train.loss_chunk_rows: {chunk}",
            "the same numbers, in more pieces",
            replace(now, train=replace(now.train, loss_chunk_rows=chunk)),
        )


def _activation_remedies(now: Settings) -> Iterator[Remedy]:
    parallel = now.parallel
    sparing = replace(
        parallel,
        activation_checkpointing="full",
        activation_checkpointing_stack="both",
        activation_checkpointing_every=1,
    )
    if parallel != sparing:
        yield Remedy(
            "parallel.activation_checkpointing: full",
            "up to a third more arithmetic",
            replace(now, parallel=sparing),
        )


def _sharding_remedies(now: Settings, world_size: int, on_gpu: bool) -> Iterator[Remedy]:
    parallel = now.parallel
    if world_size > 1 and parallel.engine == "ddp":
        spread = replace(parallel, engine="fsdp2", sharding=None)
        yield Remedy(
            "parallel.engine: fsdp2 (and sharding: null)",
            "more communication",
            replace(now, parallel=spread),
        )
    elif world_size > 1 and (
        parallel.sharding not in (None, "full_shard") or parallel.reshard_after_forward is not None
    ):
        spread = replace(
            parallel, sharding="full_shard", num_replicas=None, reshard_after_forward=None
        )
        yield Remedy(
            "parallel.sharding: full_shard (reshard_after_forward and num_replicas: null)",
            "more communication",
            replace(now, parallel=spread),
        )
    if world_size > 1 and parallel.engine != "ddp" and not parallel.sync_every_micro_batch:
        yield Remedy(
            "parallel.sync_every_micro_batch: true",
            "more communication",
            replace(now, parallel=replace(parallel, sync_every_micro_batch=True)),
        )
    if on_gpu and parallel.engine != "ddp" and not parallel.cpu_offload:
        yield Remedy(
            "parallel.cpu_offload: true",
            "much slower; weights, gradients and optimizer state in host memory",
            replace(now, parallel=replace(parallel, cpu_offload=True)),
            is_dear=True,
        )


def _optimizer_remedies(now: Settings) -> Iterator[Remedy]:
    optimizer = now.optimizer
    if optimizer.name != "adamw":
        return
    if optimizer.moments_dtype == "fp32":
        yield Remedy(
            "optimizer.moments_dtype: bf16",
            "moments are rounded",
            replace(now, optimizer=replace(optimizer, moments_dtype="bf16")),
            is_dear=True,
        )
    if now.parallel.engine != "fsdp1" or now.parallel.sharding == "no_shard":
        yield Remedy(
            "optimizer.name: adafactor (with lr 1e-3, see docs/optimization.md)",
            "another optimizer: a run that AdamW began can't go on with it",
            replace(now, optimizer=replace(optimizer, name="adafactor", moments_dtype="fp32")),
            is_dear=True,
        )


def advice(now: Settings, estimate: Estimate | None, *, world_size: int, on_gpu: bool) -> list[str]:
    """One line for each change that saves memory, those that cost little first, then by bytes.

    Args:
        estimate: None: nobody knows how much a change saves, so all are named.
    """
    found = remedies(now, world_size=world_size, on_gpu=on_gpu)
    if estimate is None:
        ordered = sorted(found, key=lambda remedy: remedy.is_dear)
        return [f"{remedy.change} ({remedy.price})" for remedy in ordered]
    before = estimate(now)
    saving = [(before - estimate(remedy.after), remedy) for remedy in found]
    worth = [(saved, remedy) for saved, remedy in saving if saved >= _WORTH_SAYING * before]
    worth.sort(key=lambda pair: (pair[1].is_dear, -pair[0]))
    lines = [
        f"{remedy.change} saves about {memory_size(saved)} of {memory_size(before)} "
        f"({remedy.price})"
        for saved, remedy in worth
    ]
    return lines or ["no option is left that saves much: take more devices, or a smaller model"]


class MemoryGuard:
    """Round each step of training: turns an out-of-memory error into a UserError with advice.

    Attributes:
        micro_batch: the number of the one at work, from 0; None outside of them.
    """

    def __init__(
        self,
        world: World,
        sections: tuple[ParallelConfig, OptimizerConfig, TrainConfig],
        longest_example: int,
        estimate: Estimate | None,
        snapshots: MemorySnapshots,
    ) -> None:
        self._world, self._sections = world, sections
        self._longest_example = longest_example
        self._estimate, self._snapshots = estimate, snapshots
        self.micro_batch: int | None = None

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """Round one step's work.

        Raises:
            UserError: memory ran out; with the step, the micro-batch, what was taken, and advice.
        """
        self.micro_batch = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._explained(batch, error) from error

    def _explained(self, batch: StepBatch, error: BaseException) -> UserError:
        index = self.micro_batch
        forwards = [_forward(micro) for micro in batch.micro_batches]
        where = "the optimizer's step"
        forward = max(forwards, key=lambda each: each.rows * (each.source + each.target))
        if index is not None:
            forward = forwards[index]
            where = (
                f"micro-batch {index + 1} of {len(forwards)} ({forward.rows} x {forward.source} "
                f"source and {forward.rows} x {forward.target} target tokens)"
            )
        head = f"out of memory on rank {self._world.rank} at step {batch.step}, {where}"
        head += tried_to_allocate(error)
        lines = advice(
            Settings(*self._sections, forward, self._longest_example),
            self._estimate,
            world_size=self._world.world_size,
            on_gpu=self._world.device.type == "cuda",
        )
        if path := self._snapshots.out_of_memory():
            lines.append(f"what took up memory is in {path}")
        return UserError(f"{head}; {self._taken()}; what helps, best first:", *lines)

    def _taken(self) -> str:
        device = self._world.device
        if device.type != "cuda":
            return f"this process takes {memory_size(resident_bytes())} of the host's memory"
        allocated, reserved = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        _, total = torch.cuda.mem_get_info(device)
        parts = f"{memory_size(allocated)} allocated and {memory_size(reserved)} reserved"
        text = f"{parts} of {memory_size(total)}"
        if reserved - allocated > _FRAGMENTED * total:
            text += " (fragmented: try PYTORCH_ALLOC_CONF=expandable_segments:True)"
        return text


def _forward(micro: MicroBatch) -> MicroBatchShape:
    source, target = micro.input_ids.shape, micro.labels.shape
    return MicroBatchShape(rows=source[0], source=source[1], target=target[1])
