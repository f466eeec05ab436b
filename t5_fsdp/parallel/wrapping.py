"""Which modules become units of sharding and of activation checkpointing."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from t5_fsdp.config import ParallelConfig

CHECKPOINTED = "_checkpoint_wrapped_module"  # what torch's wrapper calls the module inside it
Named = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module) -> Named:
    """(name, module) of the model's repeated blocks, in the order of the forward pass.

    The model says itself what they are: transformers makes each a GradientCheckpointingLayer, and
    any model may name their classes in `_no_split_modules`. And they stand in a list of modules:
    BERT names its embeddings too, which are no block. Of a block that is recomputed the wrapper is
    returned: as a unit of sharding it shares one gathering of its weights between recomputation
    and backward.

    Returns:
        [] when the model names none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    blocks = [
        (name, module)
        for name, module in modules.items()
        if (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names)
        and isinstance(modules.get(_without_wrapper(name).rpartition(".")[0]), nn.ModuleList)
    ]
    return _outside_wrappers(model, blocks)


def blocks_at_work(model: nn.Module) -> list[nn.Module]:
    """Of a model that is spread already, the blocks whose forward pass waits for no other rank.

    They lie inside of FSDP1's units; FSDP2 gathers in a hook, ahead of those registered later.

    Returns:
        [] when transformers does not tell which its blocks are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = list(model.named_modules())
    blocks: Named = [(n, m) for n, m in modules if isinstance(m, GradientCheckpointingLayer)]
    return [module for _, module in _outside_wrappers(model, blocks)]


def find_units(model: nn.Module, options: ParallelConfig) -> Named:
    """(name, module) of the units of sharding, in the order of the forward pass.

    What is in none of them belongs to the root, which is no item of the list. A unit may lie in
    another one and is then no part of it.

    Args:
        model: not yet sharded.
        options: wrap and wrap_min_parameters. A model that names no blocks is wrapped by size.
    """
    blocks = find_blocks(model) if options.wrap == "block" else []
    allowed = _Allowed(model)
    if blocks:
        return [(name, block) for name, block in blocks if allowed(block)]
    return _outside_wrappers(model, _units_by_size(model, options.wrap_min_parameters, allowed))


class _Allowed:
    """Whether a module may be a unit by what it is, whatever its size.

    A parameter that is used in several places (T5's embedding: by encoder, decoder and head) must
    be gathered in all of them, so what holds one stays in the root. And a unit's parameters are
    gathered by its forward: a list of modules has none, and the weight of an output head is used
    without it where the loss is computed by chunks.
    """

    def __init__(self, model: nn.Module) -> None:
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._shared = {key for key, count in uses.items() if count > 1}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self._in_head = set() if head is None else {id(module) for module in head.modules()}

    def __call__(self, module: nn.Module) -> bool:
        has_forward = type(module).forward is not nn.Module.forward
        holds_shared = any(id(p) in self._shared for p in module.parameters())
        return has_forward and not holds_shared and id(module) not in self._in_head


def _units_by_size(model: nn.Module, minimum: int, allowed: _Allowed) -> Named:
    """Modules whose parameters that no smaller unit took are `minimum` or more.

    torch's size_based_auto_wrap_policy, applied from below as FSDP1 does it.
    """
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Parameters of the module that units took."""
        count = sum(parameter.numel() for parameter in module.parameters())
        if not size_based_auto_wrap_policy(module, True, count, minimum):
            return 0
        taken = sum(visit(child) for child in module.children())
        is_large = size_based_auto_wrap_policy(module, False, count - taken, minimum)
        if is_large and module is not model and allowed(module):
            chosen.add(id(module))
            return count
        return taken

    visit(model)
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen]


def describe_units(model: nn.Module, options: ParallelConfig, num_shards: int) -> str:
    """A table of the units of sharding: parameters, and float32 bytes of them on a rank.

    Where some are frozen, it also says how many are not: they alone have gradients and moments.

    Args:
        model: not yet sharded, e.g. on the meta device.
        options: as of `find_units`.
        num_shards: ranks that share a copy.
    """
    units = find_units(model, options)
    unit_of = unit_of_parameters(model, units)
    names = [*(name for name, _ in units), ""]
    counts, trained = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for parameter in model.parameters():
        name = unit_of[id(parameter)]
        counts[name] += parameter.numel()
        trained[name] += parameter.numel() * parameter.requires_grad
    lines = [(name or "(root)", counts[name], trained[name]) for name in names]
    lines.append(("all", sum(counts.values()), sum(trained.values())))
    width = max(len(name) for name, _, _ in lines)
    table = [("unit", "parameters", "bytes a rank", "trained")]
    for name, count, some in lines:
        table.append((name, f"{count:,}", f"{-(-4 * count // num_shards):,}", f"{some:,}"))
    last = 3 if counts == trained else 4
    return "\n".join(
        name.ljust(width) + "".join(cell.rjust(16) for cell in cells)
        for name, *cells in (row[:last] for row in table)
    )


def find_trained_parts(model: nn.Module, options: ParallelConfig) -> list[nn.Module]:
    """Modules that train inside a unit of which other parts are frozen: an adapter's matrices."""
    unit_of = unit_of_parameters(model, find_units(model, options))
    kinds: dict[str, set[bool]] = {}
    for parameter in model.parameters():
        kinds.setdefault(unit_of[id(parameter)], set()).add(parameter.requires_grad)
    mixed = {name for name, found in kinds.items() if len(found) == 2}
    allowed = _Allowed(model)
    own = [(module, list(module.parameters(recurse=False))) for module in model.modules()]
    return [
        module
        for module, parameters in own
        if parameters
        and all(p.requires_grad and unit_of[id(p)] in mixed for p in parameters)
        and allowed(module)
    ]


def unit_of_parameters(model: nn.Module, units: Named) -> dict[int, str]:
    """The name of the unit that holds a parameter ("": the root), by the parameter's id.

    Of units that lie in each other it is the inner one, which comes later.
    """
    return {id(p): name for name, unit in [("", model), *units] for p in unit.parameters()}


def _outside_wrappers(model: nn.Module, found: Named) -> Named:
    """Instead of a module that is recomputed the wrapper round it."""
    modules = dict(model.named_modules())
    return [(outer, modules[outer]) for outer in (_without_wrapper(name) for name, _ in found)]


def _without_wrapper(name: str) -> str:
    return name.removesuffix(f".{CHECKPOINTED}")
