"""FSDP2: every parameter sharded over all ranks by torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.model.build import StateDict, check_names
from t5_fsdp.parallel.wrapping import select_units

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FSDP2Engine:
    """See `engine.Engine`, whose methods these are."""

    def __init__(
        self, model: nn.Module, options: ParallelConfig, world: World, policy: Callable[..., bool]
    ) -> None:
        self._device = world.device
        self._sync_every_micro_batch = options.sync_every_micro_batch
        mesh = init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))
        precision = MixedPrecisionPolicy(
            param_dtype=DTYPES[options.param_dtype], reduce_dtype=DTYPES[options.reduce_dtype]
        )
        for _, block in select_units(model, policy):
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)  # in place: the class changes
        self.model = model
        _sum_gradients(model)

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
        self.model.to_empty(device=self._device)

    def set_last_micro_batch(self, is_last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last or self._sync_every_micro_batch)

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        full: StateDict = {}
        for name, parameter in self.model.named_parameters():
            # Cast before gathering: half the bytes on the wire for bf16.
            shard = parameter.detach().to(dtype)
            full[clean_name(name)] = shard.full_tensor() if isinstance(shard, DTensor) else shard
        return full


def clean_name(name: str) -> str:
    """A parameter's name without the activation checkpointing wrapper's part."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _sum_gradients(model: nn.Module) -> None:
    # The loss is divided by the tokens of the whole global batch already, so gradients are sums
    # over ranks. The divide factor is not recursive, and gloo has no scaled sum: both switches
    # have to be set on every unit.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
