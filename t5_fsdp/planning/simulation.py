"""A rank's memory by running its step without the device: exact for what torch itself allocates.

    parts = simulate(spec, ParallelConfig(), OptimizerConfig(), LossOptions(), world_size=8,
                     devices_per_node=8, rows=16, source_tokens=512, target_tokens=150).parts

The real model, `parallelize`, forward and backward pass run on fake tensors with a fake process
group (see `simulated_rank`), in a child process: the fake group must not meet a real one. What
they allocate is counted by torch's memory trackers (see `memory_tracker`). Not counted are what
lies outside of torch's tensors (CUDA's context, NCCL's buffers, cuBLAS workspaces), the allocator's
fragmentation, and temporaries of the optimizer's own step.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.planning.parts import MemoryParts
from t5_fsdp.spawning import without_main

if TYPE_CHECKING:
    import torch
    from torch import nn

    from t5_fsdp.model.build import ModelSpec
    from t5_fsdp.model.loss import LossOptions

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Simulation:
    """What was found.

    Attributes:
        parts: of the rank that has the most.
        notes: what was simulated otherwise than it will be run, one line each.
        seconds: that it took.
    """

    parts: MemoryParts
    notes: tuple[str, ...]
    seconds: float


def simulate(
    spec: ModelSpec,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    loss: LossOptions,
    *,
    world_size: int,
    devices_per_node: int,
    rows: int,
    source_tokens: int,
    target_tokens: int,
    micro_batches: int = 1,
    attention: str = "sdpa",
    for_gpu: bool = True,
    timeout_seconds: float = 600.0,
    progress: Progress | None = None,
) -> Simulation:
    """The memory of a rank that trains a T5, or another encoder-decoder that `build` makes.

    Args:
        spec: the model.
        loss: smoothing, z-loss and chunk of the loss.
        rows: of a micro-batch, each of `source_tokens` and `target_tokens`, padding included.
        attention: as of `model.attention`.
        others: as of `simulate_model`.

    Raises:
        UserError: see `simulate_model`.
    """
    return simulate_model(
        functools.partial(build_with_loss, spec, attention, loss),
        functools.partial(
            forward_full_batch, rows=rows, source_tokens=source_tokens, target_tokens=target_tokens
        ),
        parallel,
        optimizer,
        world_size=world_size,
        devices_per_node=devices_per_node,
        micro_batches=micro_batches,
        for_gpu=for_gpu,
        timeout_seconds=timeout_seconds,
        progress=progress,
    )


def build_with_loss(spec: ModelSpec, attention: str, loss: LossOptions) -> nn.Module:
    """The model as `train` builds it, on the meta device."""
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.model.forward import attach_loss

    model = build_on_meta(spec, attention)
    attach_loss(model, loss)
    return model


def forward_full_batch(
    model: nn.Module, *, rows: int, source_tokens: int, target_tokens: int
) -> torch.Tensor:
    """The loss of a micro-batch without padding, which is the largest of its shape."""
    import torch

    sources = torch.zeros(rows, source_tokens, dtype=torch.int64)
    targets = torch.zeros(rows, target_tokens, dtype=torch.int64)
    objective, _ = model(
        input_ids=sources,
        attention_mask=torch.ones_like(sources),
        decoder_input_ids=targets,
        use_cache=False,
        target_rows=torch.arange(rows * target_tokens),
        target_ids=targets.flatten(),
    )
    return objective


def simulate_model(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module], torch.Tensor],
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    *,
    world_size: int,
    devices_per_node: int,
    micro_batches: int = 1,
    for_gpu: bool = True,
    timeout_seconds: float = 600.0,
    progress: Progress | None = None,
) -> Simulation:
    """The memory of a rank that trains any model.

    Args:
        build: makes the model, best on the meta device; a module-level function (or a partial of
            one), since it is called in another process. A script that defines it itself needs the
            usual `if __name__ == "__main__"`.
        step: (sharded model) -> loss of a micro-batch, a scalar; likewise. Tensors that it makes
            are fake: it can't look at their values.
        parallel: any engine. See the result's notes for what stands for what.
        world_size: ranks; any number.
        devices_per_node: ranks of a node, for hybrid_shard's groups.
        micro_batches: of an optimizer step. From the second on whole gradients lie beside the
            activations, unless parallel.sync_every_micro_batch.
        for_gpu: count what the kernels of a GPU keep: memory-efficient attention (queries, keys,
            values, output and a number a query, but no scores) and dropout masks of a byte. False:
            what this CPU's keep, as a run on the CPU does.
        timeout_seconds: then the simulation is given up.
        progress: told (units done, all units).

    Raises:
        UserError: the options do not suit the ranks or the model, the simulation took too long or
            was killed, or this torch can't do it.
        RuntimeError: it failed otherwise; with the child's traceback.
    """
    from t5_fsdp.planning.simulated_rank import Task

    task = Task(
        build, step, parallel, optimizer, world_size, devices_per_node, micro_batches, for_gpu
    )
    began = time.monotonic()
    parts, notes = _run_in_child(task, timeout_seconds, progress)
    return Simulation(parts, notes, time.monotonic() - began)


def _run_in_child(task: Any, timeout_seconds: float, progress: Progress | None) -> Any:
    if multiprocessing.current_process().daemon:
        raise UserError(
            "a simulation needs a process of its own, which a daemonic one, such as a worker of "
            "multiprocessing.Pool, may not start; plan elsewhere, or by the closed forms alone"
        )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(task, theirs), name="simulation", daemon=True)
    with without_main(task):
        child.start()
    theirs.close()  # so that the end of the child is the end of the pipe
    try:
        return _listen(ours, time.monotonic() + timeout_seconds, timeout_seconds, progress)
    except EOFError:
        child.join()
        raise UserError(
            f"the simulation's process ended with code {child.exitcode} before it was done (-9: "
            "killed, as a machine does that runs out of memory); free memory, or plan by the "
            "closed forms alone"
        ) from None
    finally:
        child.terminate()
        child.join()


def _listen(
    connection: Any, deadline: float, timeout_seconds: float, progress: Progress | None
) -> Any:
    while connection.poll(max(0.0, deadline - time.monotonic())):
        kind, content = connection.recv()
        if kind == "done":
            return content
        if kind == "refused":
            raise UserError(*content)
        if kind == "failed":
            raise RuntimeError(f"the simulation failed:\n{content}")
        if progress is not None:
            progress(*content)
    raise UserError(
        f"the simulation was not done within {timeout_seconds:g} s; give it longer, or plan by the "
        "closed forms alone"
    )


def _child(task: Any, connection: Any) -> None:
    from t5_fsdp.planning.simulated_rank import run

    try:
        result = run(task, lambda done, total: connection.send(("progress", (done, total))))
        connection.send(("done", result))
    except UserError as error:
        connection.send(("refused", error.problems))
    except Exception:
        connection.send(("failed", traceback.format_exc()))
