"""Counts what one rank holds while a simulated step runs, by the parts of `MemoryParts`.

The one place for torch's memory trackers, which have no public name: a dispatch mode that sees
every tensor made and freed, and knows FSDP2's gathered weights, whole gradients and buffers of
communication. Two things are added to them. What a forward pass keeps is told from what its
recomputation makes, and the loss is counted by itself. And the largest value of each part is noted
at every operation, since the parts are not largest at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from t5_fsdp.errors import UserError
from t5_fsdp.planning.parts import MemoryParts

try:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
except ImportError:  # `check_torch` says so
    FSDPMemTracker = MemTracker = object  # type: ignore[assignment, misc]
    _FSDPRefType = _MemRefType = None  # type: ignore[assignment, misc]

# What is overridden or called below, and would go unnoticed if it were gone.
_RELIED_ON = (
    "_track",
    "_update_peak_stats",
    "_update_and_maybe_create_winfos",
    "_fsdp_state_post_forward",
    "_fsdp_param_group_post_backward",
)

# The optimizer's step is not simulated, so its category is free to hold the loss.
_PARTS = {
    "parameters": ("PARAM", "SHARDED_PARAM"),
    "gradients": ("GRAD", "SHARDED_GRAD"),
    "gathered_units": ("UNSHARDED_PARAM", "UNSHARDED_GRAD", "ALL_GATHER", "REDUCE_SCATTER"),
    "activations": ("ACT",),
    "loss": ("OPT",),
    "temporary": ("TEMP", "INP", "OTH", "BUFFER"),
}
_NAMES = {category: part for part, categories in _PARTS.items() for category in categories}


def check_torch() -> None:
    """Raises UserError where torch's memory trackers are missing or have other insides."""
    lacking = [name for name in _RELIED_ON if not hasattr(FSDPMemTracker, name)]
    if lacking:
        raise UserError(
            f"torch {torch.__version__} has not the memory trackers that the simulation rests on "
            f"(torch.distributed._tools: {', '.join(lacking)}); install torch 2.13, or plan by "
            "the closed forms alone"
        )


class _Parts:
    """What both trackers do alike, mixed into them.

    Attributes:
        kept: bytes that the forward pass keeps for the backward pass; the largest micro-batch's.
        largest: bytes of each part when it is largest.
        peak: bytes in use at once at most, without the parts that are `apart`.
    """

    _curr_mem_snap: dict[torch.device, dict[Any, int]]
    reset_mod_stats: Callable[[], None]

    def start(self, categories: Any, apart: Iterable[str]) -> None:
        """Call it before the tracker is entered.

        Args:
            categories: the tracker's own.
            apart: parts that `peak` leaves out: they are not on the device, or always there.
        """
        self._categories, self._apart = categories, set(apart)
        self._part_of = {category: _NAMES[category.name] for category in categories}
        self._phase = "forward"
        self.kept = self.peak = 0
        self.largest = dict.fromkeys(_PARTS, 0)

    def begin_forward(self) -> None:
        """The next micro-batch."""
        self._phase = "forward"
        self.reset_mod_stats()  # the tracker refuses a second forward pass otherwise

    def begin_loss(self) -> None:
        """The blocks are run. Heard once in a forward pass, not in a recomputation."""
        if self._phase != "forward":
            return
        self.kept = max(self.kept, self._now()["activations"])
        self._phase = "loss"

    def end_loss(self) -> None:
        """The loss is done with, its backward pass too."""
        self._phase = "backward"

    def _now(self) -> dict[str, int]:
        found = dict.fromkeys(_PARTS, 0)
        for snapshot in self._curr_mem_snap.values():
            for category, part in self._part_of.items():
                found[part] += snapshot.get(category, 0)
        return found

    def _track(self, reftype: Any, tensor: torch.Tensor) -> None:
        if self._phase == "loss":
            reftype = self._categories.OPT
        elif self._phase == "backward":
            reftype = self._categories.TEMP
        super()._track(reftype, tensor)  # type: ignore[misc]

    def _update_peak_stats(self, peak_state: Any) -> None:
        # In place of torch's own peaks by module, which cost more than the simulation itself.
        now = self._now()
        for part, value in now.items():
            if part == "activations" and self._phase == "forward":
                continue  # some of it is kept and some is not; `kept` says later
            self.largest[part] = max(self.largest[part], value)
        total = sum(value for part, value in now.items() if part not in self._apart)
        self.peak = max(self.peak, total)

    def parts(self, optimizer_state: int) -> MemoryParts:
        """What was found, with the optimizer's state, which is there all the time, in bytes."""
        found = {**self.largest, "activations": self.kept, "optimizer_state": optimizer_state}
        now = self._now()
        found |= {"parameters": now["parameters"], "gradients": now["gradients"]}
        return self._with_peak(found)

    def _with_peak(self, found: dict[str, int]) -> MemoryParts:
        lasting = found["parameters"] + found["gradients"]
        # The optimizer's step comes when the activations are gone.
        peak = max(self.peak, lasting) + found["optimizer_state"]
        # What a forward pass makes beside what it keeps belongs to no part yet.
        found["temporary"] += max(0, peak - sum(found.values()))
        return MemoryParts(**found, peak=peak)


class ShardedTracker(_Parts, FSDPMemTracker):
    """Of a model that FSDP2 has sharded.

    Args:
        on_host: shards, their gradients and the optimizer's state are in host memory.
    """

    def __init__(self, model: nn.Module, on_host: bool) -> None:
        super().__init__(model)
        self.start(_FSDPRefType, ("parameters", "gradients") if on_host else ())
        self._on_host = on_host
        self._watched: set[int] = set()
        # What torch's tracker would count as activations or temporaries: weights that stay gathered
        # over a part of the ranks, and gradients that wait whole for the last micro-batch.
        self._made_by_fsdp: Any = None

    def _track(self, reftype: Any, tensor: torch.Tensor) -> None:
        if self._made_by_fsdp is None:
            super()._track(reftype, tensor)
        else:
            FSDPMemTracker._track(self, self._made_by_fsdp, tensor)

    def _fsdp_state_post_forward(self, unit: Any, original: Callable[..., Any]) -> Any:
        kind = _FSDPRefType.UNSHARDED_PARAM
        return super()._fsdp_state_post_forward(unit, self._mark(original, kind))

    def _fsdp_param_group_post_backward(self, unit: Any, original: Callable[..., Any]) -> Any:
        kind = _FSDPRefType.UNSHARDED_GRAD
        return super()._fsdp_param_group_post_backward(unit, self._mark(original, kind))

    def _mark(self, function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._made_by_fsdp = kind
            try:
                return function(*args, **kwargs)
            finally:
                self._made_by_fsdp = None

        return marked

    def watch_gradients(self, unit: nn.Module) -> None:
        """Hear of whole gradients as they are made; call it in a unit's forward, weights gathered.

        Without it they would count as temporary until they are reduced.
        """
        for parameter in unit.parameters():
            is_new = not isinstance(parameter, DTensor) and id(parameter) not in self._watched
            if is_new and parameter.requires_grad:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._update_and_maybe_create_winfos(parameter.grad, _FSDPRefType.UNSHARDED_GRAD)

    def _with_peak(self, found: dict[str, int]) -> MemoryParts:
        if self._on_host:
            found |= {"parameters": 0, "gradients": 0, "optimizer_state": 0}
        return super()._with_peak(found)


class WholeTracker(_Parts, MemTracker):
    """Of a model that every rank holds whole: gradients have their memory before the first step.

    Args:
        external: the model and its inputs.
    """

    def __init__(self, *external: Any) -> None:
        super().__init__()
        self.start(_MemRefType, ("gradients",))
        self.track_external(*external)

    def _with_peak(self, found: dict[str, int]) -> MemoryParts:
        self.peak += found["gradients"]
        return super()._with_peak(found)
