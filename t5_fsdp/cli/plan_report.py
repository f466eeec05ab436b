"""From a planned run to what `plan` prints and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t5_fsdp.cli import plan_tables as tables
from t5_fsdp.cli.generator import whole_model_bytes
from t5_fsdp.cli.memory_check import host_part_bytes
from t5_fsdp.cli.process import Session
from t5_fsdp.config import Config, cache_dir
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError
from t5_fsdp.model.devices import DEVICES, Device, has_bf16
from t5_fsdp.model.loss import LossOptions
from t5_fsdp.parallel.precision import emulated_bf16_warning
from t5_fsdp.planning.fit import largest_micro_batch_tokens, remedies, usable_bytes
from t5_fsdp.planning.memory import estimate_memory, worst_micro_batch
from t5_fsdp.planning.parts import MemoryParts
from t5_fsdp.planning.run import PlannedRun
from t5_fsdp.planning.simulation import simulate
from t5_fsdp.planning.step_time import step_time
from t5_fsdp.planning.sweep import sweep
from t5_fsdp.planning.workload import find_workload

_SIMULATED_OF_SWEEP = 3
_GIB = 2**30


def _device_bytes(own: Mapping[str, Any], device: Device | None, world: World) -> int:
    """Memory of a device, as given or known; of a CPU, a process's part of its host's.

    Raises:
        UserError: the system does not tell.
    """
    if own["device_memory_gib"] is not None:
        return int(own["device_memory_gib"] * _GIB)
    if device is not None:
        return device.memory_bytes
    found = host_part_bytes(world)
    if found is None:
        raise UserError(
            "--device cpu needs --device_memory_gib here: this system does not tell its memory"
        )
    return found


def _check_micro_batch(run: PlannedRun) -> None:
    longest, limit = sum(run.longest), run.train.micro_batch_tokens
    if longest > limit:
        raise UserError(
            f"train.micro_batch_tokens is {limit}, but an example may have {longest} tokens "
            f"(data.max_source_tokens + data.max_target_tokens); raise it to {longest}, or lower "
            "those"
        )


class PlanReport:
    """From a planned run to what is printed and written."""

    def __init__(
        self, planned: PlannedRun, config: Config, own: Mapping[str, Any], session: Session
    ) -> None:
        self._config, self._own, self._session = config, own, session
        self._device: Device | None = DEVICES.get(own["device"])
        self._memory = _device_bytes(own, self._device, planned.world)
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
        run = self._run
        self._session.console.say(tables.heading(run, worst_micro_batch(run), self._own["device"]))
        report = {
            "model": self._config.model.name,
            "num_parameters": run.sizes.count,
            "num_trained_parameters": run.sizes.trained,
            "world_size": run.world.world_size,
            "devices_per_node": run.world.launch.local_world_size,
            "device": self._own["device"],
            "device_memory_bytes": self._memory,
            "usable_memory_bytes": self._limit,
            **self._memory_parts(),
            **self._time(),
        }
        if self._own["sweep"]:
            report["sweep"] = self._sweep()
        return report

    def _memory_parts(self) -> dict[str, Any]:
        run, say = self._run, self._session.console.say
        estimated = estimate_memory(run)
        simulated = self._simulate(run) if self._own["simulate"] else None
        parts = simulated or estimated
        # Where the simulation finds more, the advice of the closed forms has to leave room for it.
        limit = min(self._limit, self._limit * estimated.peak // parts.peak)
        fitting, fits = largest_micro_batch_tokens(run, limit), parts.peak <= self._limit
        changes = [] if fits else remedies(run, limit)
        say(tables.memory(estimated, simulated))
        say(tables.verdict(parts, self._memory, self._limit, fitting, run, changes))
        validation = self._validation(parts)
        if fits:
            mode = self._config.evaluation.generation_mode
            say(tables.validation(validation, self._limit, run, mode))
        return {
            "method": "closed form" if simulated is None else "simulation",
            **parts.to_json(),
            "closed_form": estimated.to_json(),
            "simulated": None if simulated is None else simulated.to_json(),
            "fits": fits,
            "largest_micro_batch_tokens": fitting,
            "micro_batch": dataclasses.asdict(worst_micro_batch(run)),
            "changes_that_fit": [change.options for change in changes],
            "validation_bytes": sum(validation),
        }

    def _validation(self, parts: MemoryParts) -> tuple[int, int]:
        """Bytes of what a validation finds on the device, and of a whole model that generates."""
        run = self._run
        needed = whole_model_bytes(run.spec, self._config, run.sizes.count)
        lasting = parts.parameters + parts.optimizer_state
        if run.parallel.engine == "ddp" and run.world.world_size > 1:
            lasting += parts.gradients  # views of DDP's buckets; all others are freed by then
        return lasting, needed

    def _warn(self, text: str) -> None:
        self._session.console.say(tables.wrap(f"warning: {text}"))

    def _simulate(self, run: PlannedRun) -> MemoryParts | None:
        """What the simulation finds, or None, with a warning, where it is not to be had."""
        try:
            return self._try_to_simulate(run)
        except UserError as error:
            self._warn(f"no simulation: {error.problems[0]}")
            return None

    def _try_to_simulate(self, run: PlannedRun) -> MemoryParts:
        console = self._session.console
        batch = worst_micro_batch(run)
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
                LossOptions.of(run.train),
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
            console.say(tables.wrap(f"simulated otherwise than it runs: {note}"))
        return result.parts

    def _time(self) -> dict[str, Any]:
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
        self._warn_of_time(self._device.name)
        return {
            **time.to_json(),
            "mean_source_tokens": workload.lengths.source,
            "mean_target_tokens": workload.lengths.target,
            "num_examples": workload.num_examples,
            "steps": steps,
            "hours": hours,
            "dollars": dollars,
        }

    def _warn_of_time(self, device: str) -> None:
        """Of what makes the step longer than it was said to be."""
        parallel = self._run.parallel
        if warning := emulated_bf16_warning(parallel, device, has_bf16(device)):
            self._warn(f"{warning}. The time is that of float32 at best")
        if parallel.cpu_offload:
            self._warn(
                "the step takes longer: parallel.cpu_offload's copies and its optimizer on the CPU "
                "are not counted"
            )

    def _sweep(self) -> list[dict[str, Any]]:
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
