"""`plan`: memory and time of a run before anyone pays for it, without GPU, weights or network."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, ParallelConfig, cache_dir, width_multiple
from t5_fsdp.errors import UserError
from t5_fsdp.files import check_writable, write_json
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.distributed import World
    from t5_fsdp.model.build import ModelSpec
    from t5_fsdp.model.devices import Device
    from t5_fsdp.planning.parts import MemoryParts
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
_SIMULATED_OF_SWEEP = 3
_MOST_RANKS = 2**20
_MOST_EXAMPLES = 2**40
_GIB = 2**30


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
    session.enter_world()
    world = _planned_world(own)
    _check_ranks(config.parallel, world)
    return _Plan(plan_run(config, world), config, own, session).make()


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


def _host_bytes() -> int:
    """Memory of this machine, or of the container.

    Raises:
        UserError: the system does not tell.
    """
    from t5_fsdp.cli.machine_checks.limits import memory_limit_bytes

    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(total, memory_limit_bytes() or total)
    except (AttributeError, ValueError, OSError):
        raise UserError(
            "--device cpu needs --device_memory_gib here: this system does not tell its memory"
        ) from None


def _check_micro_batch(run: PlannedRun) -> None:
    longest, limit = sum(run.longest), run.train.micro_batch_tokens
    if longest > limit:
        raise UserError(
            f"train.micro_batch_tokens is {limit}, but an example may have {longest} tokens "
            f"(data.max_source_tokens + data.max_target_tokens); raise it to {longest}, or lower "
            "those"
        )


class _Plan:
    """From a planned run to what is printed and written."""

    def __init__(
        self, planned: PlannedRun, config: Config, own: Mapping[str, Any], session: Session
    ) -> None:
        from t5_fsdp.model.devices import DEVICES
        from t5_fsdp.planning.fit import usable_bytes
        from t5_fsdp.planning.workload import find_workload

        self._config, self._own, self._session = config, own, session
        self._device: Device | None = DEVICES.get(own["device"])
        if own["device_memory_gib"] is not None:
            self._memory = int(own["device_memory_gib"] * _GIB)
        elif self._device is None:
            self._memory = _host_bytes() // planned.world.launch.local_world_size
        else:
            self._memory = self._device.memory_bytes
        self._limit = self._memory if self._device is None else usable_bytes(self._memory)
        self._workload = find_workload(
            config.data,
            config.model,
            cache_dir(config),
            source_tokens=own["source_tokens"],
            target_tokens=own["target_tokens"],
            num_examples=own["num_examples"],
        )
        self._run = planned.with_longest(*self._workload.longest)
        _check_micro_batch(self._run)

    def make(self) -> dict[str, Any]:
        """Say the plan; the same as JSON values."""
        from t5_fsdp.cli import plan_tables as tables
        from t5_fsdp.planning.fit import largest_micro_batch_tokens, remedies
        from t5_fsdp.planning.memory import estimate_memory, worst_micro_batch

        run, say = self._run, self._session.console.say
        estimated, batch = estimate_memory(run), worst_micro_batch(run)
        say(tables.heading(run, batch, self._own["device"]))
        simulated = self._simulate(run) if self._own["simulate"] else None
        parts = simulated or estimated
        # Where the simulation finds more, the advice of the closed forms has to leave room for it.
        limit = min(self._limit, self._limit * estimated.peak // parts.peak)
        fitting = largest_micro_batch_tokens(run, limit)
        changes = [] if parts.peak <= self._limit else remedies(run, limit)
        say(tables.memory(estimated, simulated))
        say(tables.verdict(parts, self._memory, self._limit, fitting, run, changes))
        validation = self._validation(parts)
        if parts.peak <= self._limit:
            mode = self._config.evaluation.generation_mode
            say(tables.validation(validation, self._limit, run, mode))
        report = {
            "model": self._config.model.name,
            "num_parameters": run.sizes.count,
            "num_trained_parameters": run.sizes.trained,
            "world_size": run.world.world_size,
            "devices_per_node": run.world.launch.local_world_size,
            "device": self._own["device"],
            "device_memory_bytes": self._memory,
            "usable_memory_bytes": self._limit,
            "method": "closed form" if simulated is None else "simulation",
            **parts.to_json(),
            "closed_form": estimated.to_json(),
            "simulated": None if simulated is None else simulated.to_json(),
            "fits": parts.peak <= self._limit,
            "largest_micro_batch_tokens": fitting,
            "micro_batch": dataclasses.asdict(batch),
            "changes_that_fit": [change.options for change in changes],
            "validation_bytes": sum(validation),
            **self._time(),
        }
        if self._own["sweep"]:
            report["sweep"] = self._sweep()
        return report

    def _validation(self, parts: MemoryParts) -> tuple[int, int]:
        """Bytes of what a validation finds on the device, and of a whole model that generates."""
        from t5_fsdp.cli.generator import whole_model_bytes

        run = self._run
        needed = whole_model_bytes(run.spec, self._config, run.sizes.count)
        lasting = parts.parameters + parts.optimizer_state
        if run.parallel.engine == "ddp" and run.world.world_size > 1:
            lasting += parts.gradients  # views of DDP's buckets; all others are freed by then
        return lasting, needed

    def _warn(self, text: str) -> None:
        from t5_fsdp.cli.plan_tables import wrap

        self._session.console.say(wrap(f"warning: {text}"))

    def _simulate(self, run: PlannedRun) -> MemoryParts | None:
        """What the simulation finds, or None, with a warning, where it is not to be had."""
        try:
            return self._try_to_simulate(run)
        except UserError as error:
            self._warn(f"no simulation: {error.problems[0]}")
            return None

    def _try_to_simulate(self, run: PlannedRun) -> MemoryParts:
        from t5_fsdp.cli.plan_tables import wrap
        from t5_fsdp.model.loss import LossOptions
        from t5_fsdp.planning.memory import worst_micro_batch
        from t5_fsdp.planning.simulation import simulate

        console = self._session.console
        batch, train = worst_micro_batch(run), run.train
        with console.progress(100, "simulated, percent") as progress:
            percent = 0

            def advance(done: int, total: int) -> None:
                nonlocal percent
                progress.advance(100 * done // total - percent)
                percent = 100 * done // total

            result = simulate(
                run.spec,
                run.parallel,
                run.optimizer,
                LossOptions(train.label_smoothing, train.z_loss, train.loss_chunk_rows),
                world_size=run.world.world_size,
                devices_per_node=run.world.launch.local_world_size,
                rows=batch.rows,
                source_tokens=batch.source,
                target_tokens=batch.target,
                micro_batches=run.micro_batches,
                attention=run.attention,
                for_gpu=run.world.device.type == "cuda",
                progress=advance,
            )
        console.say(f"simulated in {result.seconds:.0f} s")
        for note in result.notes:
            console.say(wrap(f"simulated otherwise than it runs: {note}"))
        return result.parts

    def _time(self) -> dict[str, Any]:
        from t5_fsdp.cli import plan_tables as tables
        from t5_fsdp.model.devices import has_bf16
        from t5_fsdp.parallel.precision import emulated_bf16_warning
        from t5_fsdp.planning.step_time import step_time

        if self._device is None:
            return {}
        workload, price = self._workload, self._own["price_per_hour"]
        time = step_time(self._run, self._device, workload.lengths)
        steps = workload.steps(self._config.train)
        hours = None if steps is None else steps * time.step_seconds / 3600
        nodes = -(-self._run.world.world_size // self._own["devices_per_node"])
        dollars = None if hours is None or price is None else hours * nodes * price
        self._session.console.say(
            tables.time(time, workload, steps, hours, dollars, nodes, price, self._device)
        )
        parallel, name = self._run.parallel, self._device.name
        if warning := emulated_bf16_warning(parallel, name, has_bf16(name)):
            self._warn(f"{warning}. The time is that of float32 at best")
        if parallel.cpu_offload:
            self._warn(
                "the step takes longer: parallel.cpu_offload's copies and its optimizer on the CPU "
                "are not counted"
            )
        return {
            **time.to_json(),
            "mean_source_tokens": workload.lengths.source,
            "mean_target_tokens": workload.lengths.target,
            "num_examples": workload.num_examples,
            "steps": steps,
            "hours": hours,
            "dollars": dollars,
        }

    def _sweep(self) -> list[dict[str, Any]]:
        from t5_fsdp.cli import plan_tables as tables
        from t5_fsdp.planning.sweep import sweep

        assert self._device is not None  # see `_check`
        say = self._session.console.say
        found = sweep(self._run, self._device, self._workload.lengths, self._limit)
        rows = [candidate.to_json() for candidate in found]
        say(tables.sweep(found))
        if self._own["simulate"]:
            for number, candidate in enumerate(found[:_SIMULATED_OF_SWEEP]):
                parts = self._simulate(candidate.run)
                if parts is None:
                    break
                rows[number]["simulated"] = parts.to_json()
                say(tables.simulated_candidate(number + 1, candidate, parts, self._limit))
        return rows
