"""DDP: a whole copy on every rank; on a single process the bare model."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from t5_fsdp.model.build import StateDict
from t5_fsdp.parallel.common import DTYPES, WholeModelEngine, cast, share_buffers, stored_tensors


class DDPEngine(WholeModelEngine):
    """See `engine.Engine`, whose methods these are."""

    def _wrap(self) -> None:
        device = self._world.device
        # It was filled in host memory. On a CPU it stays there; a planner's fake tensors could not
        # be moved a second time.
        model = self.model if device.type == "cpu" else self.model.to(device)
        dtype = DTYPES[self._options.param_dtype]
        if dtype != torch.float32:
            # Weights stay float32; matrix products are computed in `dtype`.
            autocast = torch.autocast(device.type, dtype)
            model.forward = autocast(model.forward)  # type: ignore[method-assign]
        if self._world.world_size > 1:
            model = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                init_sync=False,  # the ranks have the same weights already, or load them next
                gradient_as_bucket_view=True,  # no second copy of the gradients
                broadcast_buffers=False,  # as under FSDP each rank has its own running means
            )
        self.model = model

    def after_evaluation(self) -> None:
        pass  # every rank holds all parameters anyway

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        limit = float("inf") if max_norm is None else max_norm
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def sharded_generation(self) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError("DDP has nothing sharded; gather_full costs no communication")

    def gather_bytes(self, dtype: torch.dtype) -> int:
        return 0 if dtype == torch.float32 else dtype.itemsize

    def gather_full(self, dtype: torch.dtype) -> StateDict:
        tensors = stored_tensors(self.model)
        full = {name: cast(tensor.detach(), dtype) for name, tensor in tensors.items()}
        share_buffers(self.model, full)
        return full
