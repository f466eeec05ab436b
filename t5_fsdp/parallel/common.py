"""What engines share: dtypes, clean names, filling a model, and what FSDP1 and DDP do alike."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import StateDict, check_names, retie, shared_names

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# What wrappers put into the names of parameters: activation checkpointing and FSDP1.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # DDP's; a model may have a part of that name inside


def stored_tensors(model: nn.Module) -> StateDict:
    """Parameters and persistent buffers by clean name, a shared one once; not for FSDP1."""
    stored = {clean_name(name) for name in model.state_dict()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {clean_name(name): t.detach() for name, t in named if clean_name(name) in stored}


def allocate(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Give parameters memory without values, and meta buffers; other buffers are kept, moved.

    Shared parameters stay one tensor.
    """
    groups = shared_names(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)
    retie(model, groups)
    moved: dict[int, torch.Tensor] = {}
    for name, buffer in buffers.items():
        if id(buffer) not in moved:
            moved[id(buffer)] = _on(buffer, buffer_device)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, moved[id(buffer)])


def _on(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    if buffer.is_meta:
        return torch.empty_like(buffer, device=device)
    return buffer.to(device)


def fill(
    targets: StateDict,
    weights: Mapping[str, torch.Tensor],
    world: World,
    spread: Callable[[torch.Tensor, torch.Tensor | None], None],
) -> None:
    """Give all ranks rank 0's weights, one tensor after the other; a collective.

    Args:
        targets: the model's own tensors by clean name, the same names on every rank.
        weights: on rank 0 the full weights, read when asked for; not looked at elsewhere.
        spread: (target, full weight on rank 0 or None) -> the target has its values.

    Raises:
        UserError: on rank 0, names or shapes differ; PeerFailed on the others.
    """
    world.try_on_rank_zero(lambda: check_names(set(weights), set(targets)))
    with torch.no_grad():
        for name, target in targets.items():
            read = functools.partial(_read, weights, name, target)
            spread(target, world.try_on_rank_zero(read))


def _read(weights: Mapping[str, torch.Tensor], name: str, target: torch.Tensor) -> torch.Tensor:
    weight = weights[name]
    if weight.shape != target.shape:
        raise UserError(
            f"the weights do not fit the model: {name} has the shape {list(weight.shape)}, the "
            f"model's {list(target.shape)}"
        )
    # Before it travels: every rank expects as many bytes as its own tensor has.
    return weight.to(target.dtype)


def broadcast(target: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Rank 0's `weight` in the whole tensor `target` of every rank; see `fill`."""
    if weight is not None:
        target.copy_(weight)
    if dist.get_world_size() > 1:
        dist.broadcast(target, src=0)


def share_buffers(model: nn.Module, full: StateDict) -> None:
    """In `full`, which each rank has gathered, replace the buffers by rank 0's; a collective.

    Running means differ between ranks, each of which has seen other rows.
    """
    for name in [clean_name(name) for name, _ in model.named_buffers()]:
        if name in full and dist.get_world_size() > 1:
            full[name] = full[name].clone()  # it may be the model's own
            dist.broadcast(full[name], src=0)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, if it holds floating-point numbers: a count stays a count."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharing its memory; of a plain one everything."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WholeModelEngine:
    """What FSDP1 and DDP do alike, see `engine.Engine` for the methods.

    The whole model is filled in each rank's host memory before it is wrapped. Both average
    gradients over all ranks and have `no_sync` for accumulation.
    """

    def __init__(self, model: nn.Module, options: ParallelConfig, world: World) -> None:
        self.model = model
        self._options, self._world = options, world

    def load_full(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._allocate()
        fill(stored_tensors(self.model), weights, self._world, broadcast)
        self._wrap()

    def materialize(self) -> None:
        self._allocate()
        self._wrap()

    def _allocate(self) -> None:
        host = torch.device("cpu")
        allocate(self.model, host, host)

    def _wrap(self) -> None:
        """Replace `model` by its wrapped form."""
        raise NotImplementedError

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        alone = not hasattr(self.model, "no_sync")  # DDP's bare model on a single process
        if alone or is_last or self._options.sync_every_micro_batch:
            return contextlib.nullcontext()
        return self.model.no_sync()  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        # The average over ranks is undone: the loss is divided by the tokens of all ranks already.
        (loss * self._world.world_size).backward()
