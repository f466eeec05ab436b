"""DDP: a whole copy on every rank; on a single process the bare model."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.model.build import StateDict
from t5_fsdp.parallel.common import DTYPES, clean_name, fill_whole


class DDPEngine:
    """See `engine.Engine`, whose methods these are."""

    def __init__(self, model: nn.Module, options: ParallelConfig, world: World) -> None:
        self.model = model
        self._options, self._world = options, world

    def load_full(self, weights: StateDict) -> None:
        fill_whole(self.model, weights, self._world)
        self._wrap()

    def materialize(self) -> None:
        fill_whole(self.model, None, self._world)
        self._wrap()

    def _wrap(self) -> None:
        device = self._world.device
        model = self.model.to(device)
        dtype = DTYPES[self._options.param_dtype]
        if dtype != torch.float32:
            # Weights stay float32; matrix products are computed in `dtype`.
            autocast = torch.autocast(device.type, dtype)
            model.forward = autocast(model.forward)  # type: ignore[method-assign]
        if self._world.world_size > 1:
            model = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,  # no second copy of the gradients
                broadcast_buffers=False,  # T5 has none
            )
        self.model = model

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        alone = not isinstance(self.model, DistributedDataParallel)
        if alone or is_last or self._options.sync_every_micro_batch:
            return contextlib.nullcontext()
        return self.model.no_sync()  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        # DDP averages over all ranks; the loss is divided by the tokens of all ranks already.
        (loss * self._world.world_size).backward()

    def after_evaluation(self) -> None:
        pass  # every rank holds all parameters anyway

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        limit = float("inf") if max_norm is None else max_norm
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        return {
            clean_name(name): parameter.detach().to(dtype)
            for name, parameter in self.model.named_parameters()
        }
