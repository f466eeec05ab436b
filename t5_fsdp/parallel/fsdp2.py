"""FSDP2: every parameter sharded over all ranks, or within replicas, by torch's `fully_shard`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.model.build import StateDict, check_names
from t5_fsdp.parallel.common import DTYPES, clean_name
from t5_fsdp.parallel.mesh import make_mesh
from t5_fsdp.parallel.wrapping import select_units


class FSDP2Engine:
    """See `engine.Engine`, whose methods these are."""

    def __init__(
        self, model: nn.Module, options: ParallelConfig, world: World, policy: Callable[..., bool]
    ) -> None:
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
        units = [block for _, block in select_units(model, policy)]
        for block in units:
            fully_shard(
                block,
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

    def load_full(self, weights: StateDict) -> None:
        if dist.get_rank() == 0:
            # strict=False below would leave what is missing as uninitialised memory.
            check_names(set(weights), {clean_name(n) for n, _ in self.model.named_parameters()})
        self.materialize()
        set_model_state_dict(
            self.model,
            dict(weights),  # torch adds the other names of shared weights to what it is given
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
        )

    def materialize(self) -> None:
        on_cpu = self._options.cpu_offload
        self.model.to_empty(device="cpu" if on_cpu else self._world.device)

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

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        full: StateDict = {}
        for name, parameter in self.model.named_parameters():
            # Cast before gathering: half the bytes on the wire for bf16.
            shard = parameter.detach().to(device=self._world.device, dtype=dtype)
            full[clean_name(name)] = shard.full_tensor() if isinstance(shard, DTensor) else shard
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
