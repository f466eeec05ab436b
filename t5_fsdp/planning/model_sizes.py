"""How many parameters a model has, by units of sharding, and what a rank gets of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from t5_fsdp.parallel.wrapping import find_units, unit_of_parameters
from t5_fsdp.training.adafactor import is_factored
from t5_fsdp.training.optimizer import state_bytes

_T = TypeVar("_T")


@dataclass(frozen=True)
class ParameterSize:
    """Shape of a parameter, and whether it is trained."""

    shape: tuple[int, ...]
    is_trained: bool

    @property
    def count(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)

    def largest_shard(self, num_shards: int) -> int:
        """Numbers on the rank that has most, sharded by the first dimension."""
        rows, *others = self.shape or (1,)
        return -(-rows // num_shards) * math.prod(others)


@dataclass(frozen=True)
class UnitSize:
    """The parameters that are gathered together; `name` is "" for what belongs to the root."""

    name: str
    parameters: tuple[ParameterSize, ...]

    @functools.cached_property
    def stack(self) -> str:
        """encoder, decoder, or "" for the root and what is in neither."""
        parts = self.name.split(".")
        return next((stack for stack in ("encoder", "decoder") if stack in parts), "")

    @functools.cached_property
    def count(self) -> int:
        """Its numbers."""
        return sum(parameter.count for parameter in self.parameters)

    @functools.cached_property
    def trained(self) -> int:
        """Those with a gradient."""
        return sum(parameter.count for parameter in self.parameters if parameter.is_trained)


@dataclass(frozen=True)
class ModelSizes:
    """A model's units in the order of the forward pass, and the root.

    Sizes are those of the model itself, built on the meta device, whatever family it is of and
    whether it has an adapter.
    """

    units: tuple[UnitSize, ...]
    root: UnitSize
    # A search asks thousands of times, and a model has hundreds of parameters.
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: nn.Module, parallel: ParallelConfig) -> ModelSizes:
        """Of a model that is not yet sharded, e.g. on the meta device."""
        units = find_units(model, parallel)
        unit_of = unit_of_parameters(model, units)
        found: dict[str, list[ParameterSize]] = {"": [], **{name: [] for name, _ in units}}
        for parameter in model.parameters():
            size = ParameterSize(tuple(parameter.shape), parameter.requires_grad)
            found[unit_of[id(parameter)]].append(size)
        root, *others = (UnitSize(name, tuple(sizes)) for name, sizes in found.items())
        return cls(tuple(others), root)

    @functools.cached_property
    def all_units(self) -> tuple[UnitSize, ...]:
        """The units and the root."""
        return (*self.units, self.root)

    @functools.cached_property
    def count(self) -> int:
        """Parameters of the whole model."""
        return sum(unit.count for unit in self.all_units)

    @functools.cached_property
    def trained(self) -> int:
        """Those that are not frozen."""
        return sum(unit.trained for unit in self.all_units)

    def largest(self, stack: str) -> UnitSize:
        """The largest unit of a stack; the largest of all where the stack has none."""

        def find() -> UnitSize:
            of_stack = [unit for unit in self.units if unit.stack == stack]
            return max(of_stack or self.units or [self.root], key=lambda unit: unit.count)

        return self._remembered(("largest", stack), find)

    def on_a_rank(self, engine: str, num_shards: int, trained_only: bool = False) -> int:
        """Numbers of the rank that has most of them.

        fsdp2 cuts each parameter by its first dimension, fsdp1 each unit as one flat piece.
        """
        key = engine, num_shards, trained_only
        return self._remembered(key, lambda: self._count_on_a_rank(*key))

    def _count_on_a_rank(self, engine: str, num_shards: int, trained_only: bool) -> int:
        if engine == "fsdp1":
            counts = ((u.trained if trained_only else u.count) for u in self.all_units)
            return sum(-(-count // num_shards) for count in counts)
        return sum(
            parameter.largest_shard(num_shards)
            for unit in self.all_units
            for parameter in unit.parameters
            if parameter.is_trained or not trained_only
        )

    def optimizer_bytes(self, optimizer: OptimizerConfig, engine: str, num_shards: int) -> int:
        """Bytes of the optimizer's state on the rank that has most.

        AdamW: two moments of each trained number. Adafactor: for a matrix its rows, sharded, and
        its columns; anything else in full.
        """
        if optimizer.name != "adafactor":
            trained = self.on_a_rank(engine, num_shards, trained_only=True)
            return state_bytes(optimizer) * trained
        return self._remembered(
            ("adafactor", num_shards),
            lambda: 4 * sum(_adafactor_numbers(p, num_shards) for p in self._trained_parameters),
        )

    def largest_trained_shard(self, num_shards: int) -> int:
        """Numbers of the largest trained parameter on one rank."""
        return self._remembered(
            ("shard", num_shards),
            lambda: max((p.largest_shard(num_shards) for p in self._trained_parameters), default=0),
        )

    @property
    def _trained_parameters(self) -> list[ParameterSize]:
        return [p for unit in self.all_units for p in unit.parameters if p.is_trained]

    def _remembered(self, key: Any, compute: Callable[[], _T]) -> _T:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]


def _adafactor_numbers(parameter: ParameterSize, num_shards: int) -> int:
    shape = parameter.shape
    if is_factored(shape):
        return -(-shape[0] // num_shards) + shape[1]
    return parameter.largest_shard(num_shards)
