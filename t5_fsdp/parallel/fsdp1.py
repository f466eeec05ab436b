"""FSDP1: the first FullyShardedDataParallel, with every knob it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.model.build import StateDict
from t5_fsdp.parallel.common import DTYPES, WholeModelEngine, cast, clean_name, share_buffers
from t5_fsdp.parallel.mesh import make_mesh
from t5_fsdp.parallel.wrapping import find_trained_parts, find_units

_STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "no_shard": ShardingStrategy.NO_SHARD,
}
_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}


class FSDP1Engine(WholeModelEngine):
    """See `engine.Engine`, whose methods these are."""

    def __init__(self, model: nn.Module, options: ParallelConfig, world: World) -> None:
        super().__init__(model, options, world)
        units = [unit for _, unit in find_units(model, options)]
        # A unit has one gradient, of all its weights or of none: what trains inside a frozen one
        # has to be a unit of its own, or the frozen weights would take the memory of gradients.
        self._units = {id(unit) for unit in [*units, *find_trained_parts(model, options)]}
        self._frozen: list[tuple[nn.Module, str, nn.Parameter]] = []

    def _wrap(self) -> None:
        options, world = self._options, self._world
        precision: MixedPrecision | None = MixedPrecision(
            param_dtype=DTYPES[options.param_dtype],
            reduce_dtype=DTYPES[options.reduce_dtype],
            buffer_dtype=torch.float32,  # as under FSDP2: running means must not be rounded
            cast_forward_inputs=True,  # likewise: a unit may be a single layer
        )
        if world.world_size == 1 and options.param_dtype != "fp32":
            # On one rank FSDP1 shards nothing, and hands float32 weights gradients in the lower
            # precision, which torch 2.13 refuses: computed as under DDP.
            precision = None
            autocast = torch.autocast(world.device.type, DTYPES[options.param_dtype])
            self.model.forward = autocast(self.model.forward)  # type: ignore[method-assign]
        self.model = FullyShardedDataParallel(
            self.model,
            sharding_strategy=_STRATEGIES[options.sharding or "full_shard"],
            auto_wrap_policy=self._is_unit,
            mixed_precision=precision,
            device_id=world.device,
            backward_prefetch=_PREFETCH[options.backward_prefetch],
            forward_prefetch=options.forward_prefetch > 0,
            limit_all_gathers=options.limit_all_gathers,
            cpu_offload=CPUOffload(offload_params=True) if options.cpu_offload else None,
            use_orig_params=True,  # parameter groups and their names survive
            # With a mesh its state dicts hold DTensors, which every engine can read.
            device_mesh=make_mesh(options, world),
        )
        if world.world_size == 1 or options.sharding == "no_shard":
            # Unsharded, it leaves frozen units with the views that the backward pass used in place
            # of their parameters (torch 2.13), and the next forward fails: they are put back then.
            self._frozen = [
                (module, name, parameter)
                for module in self.model.modules()
                for name, parameter in module.named_parameters(recurse=False)
                if not parameter.requires_grad
            ]

    def _is_unit(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or id(module) in self._units

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for module, name, parameter in self._frozen:
            setattr(module, name, parameter)

    def after_evaluation(self) -> None:
        # FSDP1 has no public way to reshard its root. Evaluate between two steps or two
        # micro-batches, as the trainer does, and never between backward and optimizer step.
        pass

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        limit = float("inf") if max_norm is None else max_norm
        return self.model.clip_grad_norm_(limit)  # type: ignore[operator]

    @contextlib.contextmanager
    def sharded_generation(self) -> Iterator[Any]:
        with torch.compiler.set_stance("force_eager"):  # its shapes are not training's
            yield _Generator(self.model)

    def gather_bytes(self, dtype: torch.dtype) -> int:
        # The state dict is float32, and cast as a whole.
        return 4 if dtype == torch.float32 else 4 + dtype.itemsize

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        full: dict[str, Any] = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True)
        )
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        names = {clean_name(name) for name, _ in named}
        found = {
            name: cast(tensor, dtype).to(self._world.device)
            for name, tensor in full.items()
            if name in names
        }
        share_buffers(self.model, found)
        return found


class _Generator:
    """`generate` of a model inside FSDP1's wrapper.

    That gathers the root's weights only in its own forward: so the wrapper's forward runs
    `generate`, which calls the model's forward as ever.
    """

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper = wrapper
        self._model: Any = wrapper.module

    def __getattr__(self, name: str) -> Any:  # config, device, training, ...
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> torch.Tensor:
        """As transformers' `generate`; a collective."""
        forward = self._model.forward

        def run_once(**inputs: Any) -> Any:
            self._model.forward = forward
            return self._model.generate(**inputs)

        self._model.forward = run_once
        try:
            return self._wrapper(**arguments)
        finally:
            self._model.forward = forward
