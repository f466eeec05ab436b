"""torch.compile by block, with a bound on the number of compilations."""

from __future__ import annotations

import shutil

import torch
from torch import nn

from t5_fsdp.config import ParallelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.parallel.wrapping import find_blocks

# Kinds of blocks (first of a stack, others; encoder, decoder) x training and evaluation, twice
# over for shapes that happen to coincide (as many source as target tokens, a single row).
MOST_GRAPHS = 16


def apply(model: nn.Module, options: ParallelConfig) -> None:
    """Compile what each block, or its recomputation wrapper, does; nothing without the option.

    The forward function is compiled and not the module: names of parameters stay as they are, and
    the hooks that gather and free a block's weights stay outside. Rows and widths are symbolic, so
    one graph serves all micro-batches; blocks of a kind share it.

    Args:
        model: its recomputation wrappers in place, not yet sharded.
        options: compile and compile_backend.

    Raises:
        UserError: the model names no blocks.
    """
    if not options.compile:
        return
    blocks = find_blocks(model)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} names no repeated blocks to compile (in _no_split_modules); "
            "set parallel.compile: false"
        )
    _allow_graphs(MOST_GRAPHS)
    for _, block in blocks:
        block.forward = torch.compile(  # type: ignore[method-assign]
            block.forward, backend=options.compile_backend, dynamic=True
        )


def compilation_problem(options: ParallelConfig, device: torch.device) -> str | None:
    """Why blocks can't be compiled on this machine, or None."""
    on_cpu = device.type == "cpu"
    if not (options.compile and options.compile_backend == "inductor" and on_cpu):
        return None
    if any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return None
    return (
        "parallel.compile needs a C++ compiler on a CPU (g++ or clang++), and there is none; "
        "install one, or set it to false"
    )


def num_compilations() -> int:
    """Graphs that this process has compiled so far."""
    try:
        from torch._dynamo.utils import counters  # named in torch.compile's troubleshooting guide
    except ImportError:
        return 0  # it is a line of the log
    return int(counters["stats"]["unique_graphs"])


def _allow_graphs(limit: int) -> None:
    # All blocks share one limit: they are one class. Above it torch would go on uncompiled.
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(limit, dynamo.recompile_limit)
