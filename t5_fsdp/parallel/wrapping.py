"""Which modules become units of sharding and of activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from t5_fsdp.errors import UserError

CHECKPOINTED = "_checkpoint_wrapped_module"  # what torch's wrapper calls the module inside it


def block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of the model's repeated blocks (T5Block), as the model itself declares them.

    transformers lists there what must not be split over devices.

    Raises:
        UserError: the model declares none, or none of them occurs in it.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    if not classes:
        raise UserError(f"{type(model).__name__} names no repeated block to shard by; use a T5")
    return classes


def describe_units(model: nn.Module, num_shards: int) -> str:
    """A table of the units of sharding: parameters, and float32 bytes of them on a rank.

    Args:
        model: not yet sharded, e.g. on the meta device.
        num_shards: ranks that share a copy.
    """
    counts = {
        name: sum(parameter.numel() for parameter in unit.parameters())
        for name, unit in select_units(model, wrap_policy(model))
    }
    whole = sum(parameter.numel() for parameter in model.parameters())
    counts["(root)"] = whole - sum(counts.values())
    width = max(map(len, counts))
    lines = [f"{'unit':<{width}}{'parameters':>16}{'bytes a rank':>16}"]
    for name, count in [*counts.items(), ("all", whole)]:
        lines.append(f"{name:<{width}}{count:>16,}{-(-4 * count // num_shards):>16,}")
    return "\n".join(lines)


def wrap_policy(model: nn.Module) -> Callable[..., bool]:
    """FSDP's transformer auto-wrap policy over the model's blocks.

    What is in no block, the shared embedding above all, stays in the root unit: it is used by
    encoder, decoder and head, and a shared tensor must belong to one unit.
    """
    return functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls=block_classes(model)
    )


def select_units(model: nn.Module, policy: Callable[..., bool]) -> list[tuple[str, nn.Module]]:
    """(name, module) of the units that `policy` picks, in the order of the forward pass.

    Of a block that is recomputed the wrapper is the unit: then recomputation and backward share
    one gathering of its weights.
    """
    modules = dict(model.named_modules())
    units = []
    for name, module in modules.items():
        if policy(module=module, recurse=False, nonwrapped_numel=0):
            parent, _, last = name.rpartition(".")
            wrapped = last == CHECKPOINTED
            units.append((parent, modules[parent]) if wrapped else (name, module))
    return units
