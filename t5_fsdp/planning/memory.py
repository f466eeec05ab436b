"""Memory of one rank by closed forms: from a configuration to `MemoryParts`, in microseconds.

The peak is the largest of five moments of a step: while the loss is computed, in the backward pass
of the last layer of the decoder (everything is kept still) and of the encoder (its tokens are
more), at the end of the backward pass (all gradients, and the root's being reduced), and in the
optimizer's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from t5_fsdp.model.activations import (
    MicroBatchShape,
    backward_bytes,
    decoder_activations,
    saved_activations,
)
from t5_fsdp.model.memory import loss_bytes
from t5_fsdp.planning.model_sizes import UnitSize
from t5_fsdp.planning.parts import MemoryParts
from t5_fsdp.planning.run import PlannedRun

_MASTER = 4  # bytes of a weight or gradient between steps: float32


@dataclass(frozen=True)
class _Moment:
    """Bytes in use at once, besides parameters and optimizer state."""

    gradients: int = 0
    activations: int = 0
    gathered: int = 0
    loss: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.gathered + self.loss + self.temporary


def estimate_memory(run: PlannedRun, batch: MicroBatchShape | None = None) -> MemoryParts:
    """Bytes on the rank that has most.

    Args:
        run: what is trained, how, on how many ranks.
        batch: the micro-batch; None: of those that `train.micro_batch_tokens` allows the one that
            needs most, see `PlannedRun.worst_micro_batches`.
    """
    if batch is None:
        return max(
            (estimate_memory(run, worst) for worst in run.worst_micro_batches()),
            key=lambda parts: parts.peak,
        )
    return _Estimate(run, batch).parts()


def worst_micro_batch(run: PlannedRun) -> MicroBatchShape:
    """The micro-batch that needs most memory."""
    return max(run.worst_micro_batches(), key=lambda batch: estimate_memory(run, batch).peak)


class _Estimate:
    def __init__(self, run: PlannedRun, batch: MicroBatchShape) -> None:
        self._run, self._batch = run, batch
        self._shape, self._options = run.shape, run.activation_options()
        engine = run.parallel.engine
        shards = run.num_shards
        self._on_host = run.parallel.cpu_offload
        self._parameters = _MASTER * run.sizes.on_a_rank(engine, shards)
        self._gradients = _MASTER * run.sizes.on_a_rank(engine, shards, trained_only=True)
        self._optimizer = run.sizes.optimizer_bytes(run.optimizer, engine, shards)
        self._is_whole = engine == "ddp" or run.parallel.sharding == "no_shard"
        self._saved = saved_activations(self._shape, batch, self._options)

    def parts(self) -> MemoryParts:
        moments = self._moments()
        device = 0 if self._on_host else 1
        peak = max(moment.total for moment in moments)
        return MemoryParts(
            parameters=device * self._parameters,
            gradients=device * self._gradients,
            optimizer_state=device * self._optimizer,
            activations=self._saved,
            gathered_units=max(moment.gathered for moment in moments),
            loss=max(moment.loss for moment in moments),
            temporary=max(moment.temporary for moment in moments),
            peak=device * (self._parameters + self._optimizer) + peak,
        )

    def _moments(self) -> list[_Moment]:
        run, root = self._run, self._run.sizes.root
        early, held = self._early_gradients(), self._held_gradients()
        resident = self._resident_units()
        saved = self._saved
        of_encoder = saved - decoder_activations(self._shape, self._batch, self._options)
        of_decoder = self._decoder_share()
        root_gradient = 0 if self._is_whole else run.itemsize * root.trained
        at_work = {
            stack: resident + root_gradient + self._backward_units(stack)
            for stack in ("encoder", "decoder")
        }
        temporary = {stack: self._backward(stack) for stack in ("encoder", "decoder")}
        gradients = self._on_device(self._gradients)
        reduced = early or int(of_decoder * gradients)  # of units that are done with
        moments = [
            _Moment(early, saved, resident + held + self._forward_units(), self._loss()),
            _Moment(early, saved, at_work["decoder"] + held, 0, temporary["decoder"]),
            _Moment(
                reduced,
                of_encoder,
                at_work["encoder"] + int((1 - of_decoder) * held),
                0,
                temporary["encoder"],
            ),
            _Moment(gradients, 0, root_gradient + self._reduction(root)),
            _Moment(gradients, 0, 0, 0, self._optimizer_step()),
        ]
        if held and run.micro_batches > 2:  # one that is neither the first nor the last
            gathered = at_work["encoder"] - self._reduction(run.sizes.largest("encoder")) + held
            moments.append(_Moment(0, of_encoder, gathered, 0, temporary["encoder"]))
        return moments

    def _on_device(self, size: int) -> int:
        return 0 if self._on_host else size

    def _early_gradients(self) -> int:
        """Gradients that are there before the backward pass in question begins."""
        run = self._run
        is_reduced = run.parallel.sync_every_micro_batch or self._is_whole
        has_buckets = run.parallel.engine == "ddp" and run.world.world_size > 1
        if has_buckets or (run.micro_batches > 1 and is_reduced):
            return self._on_device(self._gradients)
        return 0

    def _decoder_share(self) -> float:
        """Of all that is trained."""
        sizes = self._run.sizes
        decoder = sum(unit.trained for unit in sizes.units if unit.stack == "decoder")
        return decoder / max(1, sizes.trained)

    def _held_gradients(self) -> int:
        """Unsharded gradients between micro-batches that are not reduced."""
        run = self._run
        if self._is_whole or run.parallel.sync_every_micro_batch or run.micro_batches == 1:
            return 0
        itemsize = run.itemsize if run.parallel.engine == "fsdp1" else run.reduce_itemsize
        return itemsize * run.sizes.trained

    def _resident_units(self) -> int:
        """Whole weights in the dtype of the computation that are there for the whole pass."""
        run, sizes = self._run, self._run.sizes
        if run.uses_autocast:
            # autocast keeps its copies to the end of the forward pass, and without recomputation
            # they are what the backward pass uses. Embeddings are not cast.
            return run.itemsize * (sizes.count - sizes.root.count)
        if run.parallel.engine == "ddp":
            return 0
        if run.parallel.frees_units:
            return run.itemsize * sizes.root.count + self._regathered()
        return run.itemsize * sizes.count

    def _regathered(self) -> int:
        """What `reshard_after_forward: N` keeps: each unit sharded over N ranks."""
        reshard, sizes = self._run.parallel.reshard_after_forward, self._run.sizes
        if isinstance(reshard, bool) or reshard is None:
            return 0
        return self._run.itemsize * sum(unit.count for unit in sizes.units) // reshard

    def _forward_units(self) -> int:
        """The unit at work and the buffer of the next one."""
        if not self._frees_units:
            return 0
        return (
            (2 + self._run.parallel.forward_prefetch)
            * self._run.itemsize
            * (self._run.sizes.largest("decoder").count)
        )

    @property
    def _frees_units(self) -> bool:
        return self._run.parallel.frees_units and not self._run.uses_autocast

    def _backward_units(self, stack: str) -> int:
        """The unit at work and the next one; its gradients and their reduction."""
        run, unit = self._run, self._run.sizes.largest(stack)
        if self._is_whole and run.parallel.engine == "ddp":
            return 0
        gathered = 2 + run.parallel.forward_prefetch if self._frees_units else 0
        gradients = run.itemsize * unit.trained
        return gathered * run.itemsize * unit.count + gradients + self._reduction(unit)

    def _reduction(self, unit: UnitSize) -> int:
        """The buffer that a unit's gradients are reduced from, and its result."""
        if self._is_whole:
            return 0
        return self._run.reduce_itemsize * (unit.trained + unit.trained // self._run.num_shards)

    def _loss(self) -> int:
        run, shape, targets = self._run, self._shape, self._batch.target_tokens
        return loss_bytes(
            d_model=shape.d_model,
            vocab=shape.vocab,
            targets=targets,
            itemsize=run.itemsize,
            rows_at_a_time=run.loss_rows(targets),
            frozen=shape.frozen,
        )

    def _backward(self, stack: str) -> int:
        return backward_bytes(self._shape, self._batch, self._options, stack)

    def _optimizer_step(self) -> int:
        """Temporary tensors of the largest parameter; torch's fused AdamW has none."""
        run = self._run
        is_fused = run.optimizer.name == "adamw" and run.optimizer.moments_dtype == "fp32"
        if is_fused or self._on_host:
            return 0
        shards = 1 if self._is_whole else run.num_shards
        return 4 * _MASTER * run.sizes.largest_trained_shard(shards)
