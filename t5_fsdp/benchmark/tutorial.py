"""The public FSDP tutorial for T5: FSDP1 round each block, every example padded to full length."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from t5_fsdp.benchmark.clock import Clock, StepTokens
from t5_fsdp.benchmark.workload import PAD, Workload
from t5_fsdp.benchmark.world import entered_world
from t5_fsdp.distributed import World
from t5_fsdp.model.flops import T5Shape
from t5_fsdp.seeding import numpy_generator


def train(workload: Workload, clock_options: dict[str, int]) -> dict[str, Any]:
    """On a rank: sources padded to max_source_tokens, targets to max_target_tokens.

    As there the loss is the model's own, padding of the targets included, and parameters,
    reduction and buffers are in bf16 where the workload computes in it.
    """
    with entered_world(workload.device) as world:
        clock = Clock(T5Shape.of(workload.spec().config), world.device, **clock_options)
        model = _shard(workload.plain_model(torch.device("cpu")), workload, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate)
        losses = []
        for number in range(clock.total_steps):
            rows = _draw(workload, number, world)
            inputs = _pad(rows, workload)
            clock.tick(_count(rows, workload))
            losses.append(_step(model, optimizer, inputs, world))
        sums = world.sum([float(loss) for loss in losses])
        del model, optimizer
    return {"losses": {n + 1: total / world.world_size for n, total in enumerate(sums)}}


def _shard(model: Any, workload: Workload, world: World) -> Any:
    precision = None
    if workload.param_dtype == "bf16":
        dtype = torch.bfloat16
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    block = type(model.encoder.block[0])
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={block}
        ),
        mixed_precision=precision,
        device_id=world.device,
    )


def _draw(workload: Workload, step: int, world: World) -> list[int]:
    """This rank's share of a batch of examples drawn at random."""
    rng = numpy_generator(workload.seed, "tutorial", step)
    size = min(workload.global_batch_size, len(workload.examples))
    drawn = rng.choice(len(workload.examples), size, replace=False).tolist()
    return drawn[world.rank :: world.world_size]


def _count(rows: list[int], workload: Workload) -> StepTokens:
    source, target = (
        int(sum(offsets[row + 1] - offsets[row] for row in rows))
        for _, offsets in (workload.examples.sources, workload.examples.targets)
    )
    width = workload.max_source_tokens + workload.max_target_tokens
    return StepTokens(len(rows), source, target, len(rows) * width)


def _pad(rows: list[int], workload: Workload) -> dict[str, torch.Tensor]:
    source_width, target_width = workload.max_source_tokens, workload.max_target_tokens
    input_ids = torch.full((len(rows), source_width), PAD)
    labels = torch.full((len(rows), target_width), PAD)
    for place, row in enumerate(rows):
        for filled, part in (
            (input_ids, workload.examples.sources),
            (labels, workload.examples.targets),
        ):
            ids = part[0][part[1][row] : part[1][row + 1]]
            filled[place, : len(ids)] = torch.from_numpy(ids.astype("int64"))
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": labels,
        "decoder_attention_mask": (labels != PAD).long(),
    }


def _step(
    model: nn.Module, optimizer: Any, inputs: dict[str, torch.Tensor], world: World
) -> torch.Tensor:
    moved = {name: tensor.to(world.device) for name, tensor in inputs.items()}
    optimizer.zero_grad()
    loss = model(**moved).loss
    loss.backward()
    optimizer.step()
    return loss.detach()
