"""The limit: plain PyTorch round transformers' model, on the same batches, all of them at hand."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from t5_fsdp.benchmark.clock import Clock
from t5_fsdp.benchmark.ours import step_batches, tokens_of
from t5_fsdp.benchmark.workload import Workload
from t5_fsdp.benchmark.world import entered_world
from t5_fsdp.data.batching import StepBatch
from t5_fsdp.data.collation import IGNORED_LABEL, MicroBatch
from t5_fsdp.distributed import World
from t5_fsdp.model.flops import T5Shape


def train(workload: Workload, clock_options: dict[str, int]) -> dict[str, Any]:
    """On a rank: the steps that `ours` makes, on one process or under DDP; losses by step.

    No data is read or collated meanwhile, nothing is logged, and losses stay on the device.
    """
    with entered_world(workload.device) as world:
        clock = Clock(T5Shape.of(workload.spec().config), world.device, **clock_options)
        model = workload.plain_model(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate,
                                      weight_decay=0.0, fused=True)  # fmt: skip
        if world.world_size > 1:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        batches = step_batches(workload, world)
        steps = [batches.step(number) for number in range(1, clock.total_steps + 1)]
        losses = []
        for batch in steps:
            clock.tick(tokens_of(batch, world))
            losses.append(_step(model, optimizer, batch, workload, world))
        sums = world.sum([float(loss) for loss in losses])
        del model, optimizer
    return {"losses": {n: sums[n - 1] for n in range(1, len(sums) + 1)}}


def _step(
    model: Any, optimizer: Any, batch: StepBatch, workload: Workload, world: World
) -> torch.Tensor:
    total = torch.zeros((), device=world.device)
    for number, micro in enumerate(batch.micro_batches, start=1):
        is_last = number == len(batch.micro_batches)
        alone = is_last or world.world_size == 1
        with contextlib.nullcontext() if alone else model.no_sync():
            loss = _loss(model, micro.to(world.device), workload, world) / batch.target_tokens
            # DDP takes the mean over ranks, and the loss is divided by all ranks' tokens already.
            (loss * world.world_size).backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _loss(model: Any, micro: MicroBatch, workload: Workload, world: World) -> torch.Tensor:
    autocast = torch.autocast(world.device.type, torch.bfloat16)
    with autocast if workload.param_dtype == "bf16" else contextlib.nullcontext():
        logits = model(**micro.inputs()).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        micro.labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
