"""Counts the memory of the tensors that an operation has left behind."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Within it, every storage that is made is noted; `bytes_left` counts those that live still.

    Autograd's saved tensors are among them, and what activation checkpointing keeps, which hooks
    on saved tensors do not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Any, tuple[int, ...], str]] = []
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known() is None:
                    reference = self._known[storage._cdata] = weakref.ref(storage)
                    self._made.append((reference, tuple(tensor.shape), str(func)))
        return result

    def bytes_left(self, without: Iterable[torch.Size | tuple[int, ...]]) -> int:
        """Bytes of living storages, but for those of the given shapes (weights and their views)."""
        left_out = {tuple(shape) for shape in without}
        left_out |= {shape[::-1] for shape in left_out}
        total = 0
        for reference, shape, operation in self._made:
            storage = reference()
            # Gradients that the loss keeps, made of zeros_like, and flat buffers that weights are
            # gathered into are no activations.
            is_other = shape in left_out or "zeros_like" in operation or len(shape) < 2
            if storage is not None and not is_other:
                total += storage.nbytes()
        return total
