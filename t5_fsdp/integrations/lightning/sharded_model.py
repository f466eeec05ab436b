"""The model with its loss, sharded where Lightning's strategy leaves that to the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import wrap

from t5_fsdp.config import Config, ParallelConfig
from t5_fsdp.model.build import (
    ModelSpec,
    StateDict,
    build_on_meta,
    build_with_weights,
    unique_state_dict,
)
from t5_fsdp.model.forward import attach_loss
from t5_fsdp.model.loss import LossOptions
from t5_fsdp.parallel import activation_checkpointing
from t5_fsdp.parallel.common import DTYPES
from t5_fsdp.parallel.wrapping import find_units


def build(spec: ModelSpec, weights: Mapping[str, torch.Tensor], config: Config) -> Any:
    """The model that gives its loss, not yet sharded."""
    model = build_with_weights(spec, weights, config.model.attention)
    attach_loss(model, LossOptions.of(config.train))
    activation_checkpointing.apply(model, config.parallel)
    return model


def empty_weights(spec: ModelSpec) -> StateDict:
    """Float32 weights on the CPU, still to be filled."""
    layout = unique_state_dict(build_on_meta(spec))
    return {name: torch.empty_like(weight, device="cpu") for name, weight in layout.items()}


def shard(model: Any, parallel: ParallelConfig, mesh: Any) -> Any:
    """The model as the strategy needs it.

    Args:
        mesh: of ModelParallelStrategy, which shards nothing itself; None under another one.
    """
    if mesh is None:
        return _wrap_units(model, parallel)
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[parallel.param_dtype], reduce_dtype=DTYPES[parallel.reduce_dtype]
    )
    for _, unit in reversed(find_units(model, parallel)):
        fully_shard(unit, mesh=mesh["data_parallel"], mp_policy=precision)
    fully_shard(model, mesh=mesh["data_parallel"], mp_policy=precision)
    return model


def _wrap_units(model: Any, parallel: ParallelConfig) -> Any:
    """Shard by FSDP1 where the strategy is Lightning's: it has said how (`enable_wrap`).

    Elsewhere torch's `wrap` changes nothing.
    """
    for name, unit in reversed(find_units(model, parallel)):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, wrap(unit))
    return wrap(model)


def shard_index(model: Any, mesh: Any) -> int:
    """Which shard of the model this rank holds: ranks that hold the same one have the same.

    Args:
        mesh: as of `shard`.
    """
    if mesh is not None:
        return mesh["data_parallel"].get_local_rank()
    if not isinstance(model, FullyShardedDataParallel):
        return 0
    if model.sharding_strategy == ShardingStrategy.NO_SHARD:
        return 0
    return torch.distributed.get_rank(model.process_group)  # of those that share one copy


def clip_grad_norm(model: Any, limit: float) -> float:
    """Clip the global norm of the gradients, in the way that the model needs; the norm before."""
    if isinstance(model, FullyShardedDataParallel):
        norm = model.clip_grad_norm_(limit)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def full_weights(model: Any, spec: ModelSpec) -> StateDict:
    """All weights by their names in the model, on every rank; a collective."""
    options = StateDictOptions(full_state_dict=True)
    stored: Any = get_model_state_dict(model, options=options)
    return {name: stored[name] for name in unique_state_dict(build_on_meta(spec))}
