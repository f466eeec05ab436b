"""`plan`: memory and time of a run before anyone pays for it, without GPU, weights or network."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, ParallelConfig, width_multiple
from t5_fsdp.errors import UserError
from t5_fsdp.files import check_writable, write_json
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.distributed import World
    from t5_fsdp.model.build import ModelSpec
    from t5_fsdp.planning.run import PlannedRun

OWN_OPTIONS = [
    Extra("world_size", "Devices, one process each.", type=int, default=8),
    Extra("devices_per_node", "Devices of one machine.", type=int, default=8),
    Extra("device", "Which device, for its memory and speed; cpu: what a run on the CPU keeps, "
          "without a time.",
          type=Literal["a100-40", "a100-80", "h100", "h200", "l4", "a10g", "v100-16", "v100-32",
                       "t4", "cpu"],
          default="a100-40"),
    Extra("device_memory_gib", "Memory of a device in GiB; null: as of --device, with cpu this "
          "machine's, divided by the processes of a node. 2 GiB of a GPU's are taken to be CUDA's, "
          "NCCL's and lost between blocks.", type=float | None),
    Extra("source_tokens", "Mean tokens of a source, for the time; null: of the prepared data, "
          "else data.max_source_tokens.", type=float | None),
    Extra("target_tokens", "Mean tokens of a target; null: likewise.", type=float | None),
    Extra("num_examples", "Training examples, of which data.max_train_examples may leave fewer; "
          "null: of the prepared data, else known for WikiHow, CNN/DailyMail, XSum, SAMSum and the "
          "bundled sample.", type=int | None),
    Extra("price_per_hour", "Dollars for a node and hour.", type=float | None),
    Extra("simulate", "Run the step of one rank on tensors without memory as well, which takes "
          "seconds to minutes; false: closed forms alone.", type=bool, default=True),
    Extra("sweep", "Go through sharding, activation checkpointing, optimizer and micro-batch: what "
          "fits, fastest first.", type=bool, default=False),
    Extra("json", "Write the numbers to this file as well.", type=str | None, metavar="FILE"),
]  # fmt: skip
_MOST_RANKS = 2**20
_MOST_EXAMPLES = 2**40


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code: 0 also for a run that does not fit."""
    return run(functools.partial(_plan, argv), results_on_stdout=False)


def _plan(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="plan",
        description="Memory and time of a training run, without running it.",
        extra=OWN_OPTIONS,
        config_required=True,
    )
    config = resolve(layers)
    if session.launch.world_size > 1:
        raise UserError("plan runs as one process, for any --world_size; start it without torchrun")
    file = None if layers.own["json"] is None else Path(layers.own["json"])
    if file is not None:
        check_writable(file, "--json")
    report = make_plan(config, layers.own, session)
    if file is not None:
        write_json(file, report)
        session.console.say(f"written: {file}")


def make_plan(config: Config, own: Mapping[str, Any], session: Session) -> dict[str, Any]:
    """Say the plan; its numbers, as `--json` writes them.

    Args:
        config: checked.
        own: the command's own options.
        session: whose console speaks.

    Raises:
        UserError: what is wrong with them, or with the run.
    """
    _check(own, config)
    # Not before: it takes torch, and wrong options are to be said at once.
    from t5_fsdp.cli.plan_report import PlanReport

    session.enter_world()
    world = _planned_world(own)
    _check_ranks(config.parallel, world)
    return PlanReport(plan_run(config, world), config, own, session).make()


def _check(own: Mapping[str, Any], config: Config) -> None:
    """Raises UserError with all that is wrong with the command's own options."""
    from t5_fsdp.model.devices import DEVICES

    problems = []
    if own["device"] not in (*DEVICES, "cpu"):
        problems.append(f"--device is {own['device']}; give one of {', '.join(DEVICES)}, cpu")
    whole = {"world_size": _MOST_RANKS, "devices_per_node": _MOST_RANKS,
             "num_examples": _MOST_EXAMPLES}  # fmt: skip
    problems += [
        f"--{name} is {own[name]}; give a whole number from 1 to {most:,}"
        for name, most in whole.items()
        if own[name] is not None and not 1 <= own[name] <= most
    ]
    for name in ("device_memory_gib", "price_per_hour"):
        if own[name] is not None and not 0 < own[name] < 1e9:
            problems.append(f"--{name} is {own[name]}; give a number above 0 and below 1e9")
    for name in ("source_tokens", "target_tokens"):
        most = getattr(config.data, f"max_{name}")
        if own[name] is not None and not 1 <= own[name] <= most:
            problems.append(
                f"--{name} is {own[name]:g}; give a mean from 1 to data.max_{name}, {most}"
            )
    if own["device"] == "cpu":
        timed = [name for name in ("sweep", "price_per_hour") if own[name] not in (None, False)]
        problems += [
            f"--{name} is {json.dumps(own[name])}, but a CPU's speed is not known, so that nothing "
            "is timed; leave it out, or give another --device"
            for name in timed
        ]
    size, local = own["world_size"], own["devices_per_node"]
    if not problems and size > local and size % local:
        problems.append(
            f"--world_size {size} is no multiple of --devices_per_node {local}; give whole nodes"
        )
    if problems:
        raise UserError(*problems)


def _planned_world(own: Mapping[str, Any]) -> World:
    import torch

    from t5_fsdp.distributed import Launch, World

    size = own["world_size"]
    launch = Launch(world_size=size, local_world_size=min(size, own["devices_per_node"]))
    device = torch.device("cpu" if own["device"] == "cpu" else "cuda")
    return World(launch, torch.distributed.HashStore(), device)


def _check_ranks(parallel: ParallelConfig, world: World) -> None:
    """Raises UserError where the sharding does not suit the ranks; they may be the default ones."""
    from t5_fsdp.parallel.mesh import mesh_problems

    size, nodes = world.world_size, world.world_size // world.launch.local_world_size
    if problems := mesh_problems(parallel, world):
        hint = f"planned for --world_size {size}, {counted(nodes, 'node')}: is that your run's?"
        raise UserError(*(f"{problem} ({hint})" for problem in problems))


def plan_run(config: Config, world: World, spec: ModelSpec | None = None) -> PlannedRun:
    """The run of a configuration on so many ranks.

    Args:
        spec: its model; None: as `planned_spec` finds it.

    Raises:
        UserError: the model is not to be had, or the sharding does not suit the ranks.
    """
    from t5_fsdp.model.configuration import check_model, check_positions
    from t5_fsdp.model.flops import T5Shape
    from t5_fsdp.parallel.mesh import mesh_problems
    from t5_fsdp.planning.planned_model import planned_spec
    from t5_fsdp.planning.run import PlannedRun

    if problems := mesh_problems(config.parallel, world):
        raise UserError(*problems)
    if spec is None:
        spec = planned_spec(config.model)
        lengths = {f"data.{n}": getattr(config.data, n)
                   for n in ("max_source_tokens", "max_target_tokens")}  # fmt: skip
        check_positions(spec.config, lengths, width_multiple(config))
        check_model(spec, config.model.attention)
    try:
        T5Shape.of(spec.config)
    except AttributeError:
        raise UserError(
            f"the options of a {spec.config.model_type} do not say its shape as those of a T5, "
            "BART or Pegasus do; use one of these"
        ) from None
    return PlannedRun.of(
        spec,
        config.model.attention,
        data=config.data,
        parallel=config.parallel,
        optimizer=config.optimizer,
        train=config.train,
        width_multiple=width_multiple(config),
        world=world,
    )
