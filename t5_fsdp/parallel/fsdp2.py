"""FSDP2: every parameter sharded over all ranks, or within replicas, by torch's `fully_shard`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.model.build import StateDict
from t5_fsdp.parallel.common import (
    DTYPES,
    allocate,
    broadcast,
    cast,
    fill,
    share_buffers,
    stored_tensors,
)
from t5_fsdp.parallel.mesh import make_mesh
from t5_fsdp.parallel.wrapping import find_units


class FSDP2Engine:
    """See `engine.Engine`, whose methods these are."""

    def __init__(self, model: nn.Module, options: ParallelConfig, world: World) -> None:
        self._options, self._world = options, world
        mesh = make_mesh(options, world)
        precision = MixedPrecisionPolicy(
            param_dtype=DTYPES[options.param_dtype], reduce_dtype=DTYPES[options.reduce_dtype]
        )
        offload = OffloadPolicy()
        if options.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        reshard = options.reshard_after_forward
        if reshard is None:
            reshard = options.sharding != "shard_grad_op"
        units = [unit for _, unit in find_units(model, options)]
        for unit in reversed(units):  # what lies in another unit comes first
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard,
            )
        # In place: the class changes. The root is needed again at once in the backward pass.
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
        self.model = model
        _sum_gradients(model)
        _prefetch(units, options.forward_prefetch)

    def load_full(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.materialize()
        fill(stored_tensors(self.model), weights, self._world, self._spread)

    def _spread(self, target: torch.Tensor, weight: torch.Tensor | None) -> None:
        if not isinstance(target, DTensor):
            broadcast(target, weight)
            return
        mesh = target.device_mesh
        if weight is None:
            # Only its shape is looked at, and memory that nobody writes to costs nothing.
            weight = torch.empty(target.shape, dtype=target.dtype, device=mesh.device_type)
        shard = distribute_tensor(weight, mesh, target.placements, src_data_rank=0)
        target.to_local().copy_(shard.to_local())

    def materialize(self) -> None:
        device = self._world.device
        on_cpu = self._options.cpu_offload
        allocate(self.model, torch.device("cpu") if on_cpu else device, device)

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        reduce = is_last or self._options.sync_every_micro_batch
        self.model.set_requires_gradient_sync(reduce)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def after_evaluation(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextlib.contextmanager
    def sharded_generation(self) -> Iterator[Any]:
        # `generate` reads the embedding and the head itself: it has to gather the root's weights.
        # Once: each registration wraps the method as it finds it.
        if "generate" not in vars(self.model):
            register_fsdp_forward_method(self.model, "generate")
        with torch.compiler.set_stance("force_eager"):  # its shapes are not training's
            yield self.model
        self.after_evaluation()

    def gather_bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        full: StateDict = {}
        for name, tensor in stored_tensors(self.model).items():
            # Cast before gathering: half the bytes on the wire for bf16.
            shard = cast(tensor.detach(), dtype).to(self._world.device)
            full[name] = shard.full_tensor() if isinstance(shard, DTensor) else shard
        share_buffers(self.model, full)
        return full


def _prefetch(units: list[nn.Module], distance: int) -> None:
    """Gather `distance` units ahead in both passes, also from the encoder into the decoder."""
    if not distance:
        return  # FSDP2's own: the next unit, in the order in which they were run
    for position, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        ahead = units[position + 1 : position + 1 + distance]
        behind = units[max(0, position - distance) : position][::-1]
        unit.set_modules_to_forward_prefetch(ahead)  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(behind)  # type: ignore[arg-type]


def _sum_gradients(model: nn.Module) -> None:
    # The loss is divided by the tokens of the whole global batch already, so gradients are sums
    # over ranks. The divide factor is not recursive, and gloo has no scaled sum: both switches
    # have to be set on every unit.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
