"""The parts of one rank's memory, whoever counted them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one device, by what they are for, at the moment when most is in use.

    Attributes:
        parameters: this rank's shards of the weights, in float32.
        gradients: this rank's shards, in float32.
        optimizer_state: moments and factors of this rank's shards.
        activations: what the forward pass keeps for the backward pass.
        gathered_units: whole weights of units at work, and their whole gradients, in the dtype of
            the computation.
        loss: logits and what the loss makes of them.
        temporary: everything else at the peak: recomputed activations, inputs, buffers.
        peak: most bytes in use at once; at most the sum, since not all parts are largest together.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    gathered_units: int
    loss: int
    temporary: int
    peak: int

    @property
    def state(self) -> int:
        """What lasts over the steps, gradients included: no batch is too small for it."""
        return self.parameters + self.gradients + self.optimizer_state

    def to_json(self) -> dict[str, int]:
        """Names end in `_bytes`, as in `plan.py --json`."""
        return {f"{name}_bytes": value for name, value in asdict(self).items()}
