"""`train`: from a configuration to a trained, validated, checkpointed model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.disk_check import check_disk
from t5_fsdp.cli.export_hf import export_at_end
from t5_fsdp.cli.memory_check import refuse_what_cannot_fit, say_memory
from t5_fsdp.cli.options import Extra, parse_layers, resolve
from t5_fsdp.cli.paths import check_paths
from t5_fsdp.cli.prepare_data import prepare_on_all_ranks, say_audit
from t5_fsdp.cli.process import Session, run
from t5_fsdp.cli.run_description import describe_parameters, describe_size, say_units
from t5_fsdp.cli.trainer_assembly import train_from
from t5_fsdp.config import Config
from t5_fsdp.config_problems import best_metric_problems
from t5_fsdp.console import Console
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.cli.starting_point import StartingPoint
    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.distributed import World
    from t5_fsdp.evaluation.own_metric import Metric

_EXTRA = [
    Extra(
        "check",
        "Validate configuration, data and model, say what would be trained, and stop.",
        type=bool,
        default=False,
    ),
    Extra(
        "check_memory",
        "On a GPU, refuse a run whose estimated memory exceeds it clearly; false: try it.",
        type=bool,
        default=True,
    ),
]


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code (0 done, 2 user error, 75 preempted, 1 defect)."""
    return run(functools.partial(_train, argv))


def _train(argv: Sequence[str], session: Session) -> None:
    layers = parse_layers(
        argv,
        command="train",
        description="Fine-tune T5 for summarization; under torchrun on all its processes.",
        extra=_EXTRA,
        config_required=True,
    )
    config = resolve(layers, check_data=source_problems)
    check_paths(config)
    world = session.enter_world()
    if layers.own["check"]:
        _check(config, session, world, layers.own["check_memory"])
    else:
        train_model(config, session, world, check_memory=layers.own["check_memory"])


def _check_before_data(config: Config) -> None:
    """Raises UserError for what can be refused before data are read and tokenized."""
    from t5_fsdp.model.configuration import check_overrides
    from t5_fsdp.training.trackers.trackers import check_trackers

    check_trackers(config.logging)
    check_overrides(config.model)


def _find_resume(
    config: Config, world: World, warn: Callable[[str], None], content: bool = True
) -> Path | None:
    def find() -> str | None:
        found = run_folder.find_resume(Path(config.run_dir), config.checkpoint, warn, content)
        return str(found) if found else None

    found = world.on_rank_zero(find)
    return Path(found) if found else None


def _check(config: Config, session: Session, world: World, check_memory: bool) -> None:
    from t5_fsdp.cli.starting_point import find_start
    from t5_fsdp.model.build import build_on_meta

    world.on_rank_zero(lambda: _check_before_data(config))
    resume = _find_resume(config, world, session.console.warn, content=False)
    prepared = prepare_on_all_ranks(config, world, session.console, warn=False)
    say_audit(prepared.audit, session.console)
    start = find_start(config, world, prepared, resume)
    for warning in start.warnings:
        session.console.warn(warning)
    model = build_on_meta(start.spec)
    world.on_rank_zero(lambda: check_disk(model, start, config))
    say_memory(config, world, start.spec, prepared, session.console)
    if check_memory:
        refuse_what_cannot_fit(config, world, start.spec, prepared)
    say_units(model, config, session, world)
    session.console.say(
        f"the configuration is sound: {describe_parameters(model, start)}, "
        f"{describe_size(start)}, {start.last_step:,} in all; "
        + (f"it would go on from {resume}" if resume else "it would start at step 1")
    )


def train_model(
    config: Config,
    session: Session,
    world: World,
    metric: Metric | None = None,
    check_memory: bool = True,
) -> None:
    """Train as `config` says, from where its run_dir stands; what the command and the library do.

    All is settled, and refused, first; the lock on run_dir is the first thing that is written.

    Args:
        config: checked.
        session: of this rank; its world has been entered.
        metric: one of the caller's own, for the validations.
        check_memory: refuse what can't fit into the memory of the devices.

    Raises:
        UserError: what the user can mend.
        Preempted: a signal asked to stop.
    """
    from t5_fsdp.cli.report import refresh_report
    from t5_fsdp.cli.starting_point import find_start

    world.on_rank_zero(lambda: _check_before_data(config))
    run_dir = Path(config.run_dir)
    lock: list[Any] = []

    def take_lock() -> None:
        lock.append(run_folder.lock_run_dir(run_dir, session.console))
        session.held.callback(lock[0].release)

    session.on_early_end = functools.partial(_record_early_stop, run_dir, lock)
    was_there = world.on_rank_zero(lambda: run_folder.has_lock(run_dir))
    if was_there:  # a run that is in there may delete what is being read
        world.on_rank_zero(take_lock)
    resume = _find_resume(config, world, session.console.warn)
    prepared = prepare_on_all_ranks(config, world, session.console)
    start = find_start(config, world, prepared, resume)
    if check_memory:
        refuse_what_cannot_fit(config, world, start.spec, prepared)
    world.on_rank_zero(lambda: _check_metric(metric, config, prepared))
    start.open_weights(world)

    if not was_there:
        world.on_rank_zero(take_lock)
    if _find_resume(config, world, lambda _: None, content=False) != start.resume:
        # Another new run in this folder was quicker, and has ended.
        resume = _find_resume(config, world, session.console.warn)
        start = find_start(config, world, prepared, resume)
        start.open_weights(world)
    was_finished = start.is_finished
    if was_finished:
        _say_finished(start, config, session, world)
    else:
        train_from(start, config, session, world, prepared, metric)
    if config.checkpoint.export_at_end:
        world.on_rank_zero(lambda: export_at_end(config, session.console, anew=not was_finished))
    with session.interruption.deferred():  # the run has done its work
        world.on_rank_zero(lambda: refresh_report(run_dir, session.console))


def _check_metric(metric: Metric | None, config: Config, prepared: PreparedData) -> None:
    """Raises UserError for a metric that gives no figures, or not the one that decides."""
    from t5_fsdp.evaluation.own_metric import TRIED_EXAMPLES, try_metric

    if metric is None:
        return
    split = prepared.split("validation")
    if split is None:
        raise UserError(
            "the metric is computed at validations, and there is no validation split; give one, "
            "or leave the metric out"
        )
    few = range(min(TRIED_EXAMPLES, len(split)))
    references = [split.text(index)["summary"] for index in few]
    names = try_metric(metric, references)
    if problems := best_metric_problems(config.evaluation, names):
        raise UserError(*problems)


def _record_early_stop(run_dir: Path, lock: list[Any], state: str, message: str) -> None:
    """Of what ends before the run's folder is opened only a stop by a signal is recorded in it."""
    from t5_fsdp.checkpoint.format import complete_checkpoints, step_of
    from t5_fsdp.training.metrics import write_status

    if state != "preempted":
        return
    with contextlib.suppress(UserError):  # another run is in there: its status is that one's
        if not lock:
            lock.append(run_folder.lock_run_dir(run_dir, Console(False), wait_seconds=0))
        last = next(reversed(complete_checkpoints(run_dir)), None)
        step = step_of(last) or 0 if last else 0
        write_status(run_dir, state, step, str(last) if last else None, message)


def _say_finished(start: StartingPoint, config: Config, session: Session, world: World) -> None:
    from t5_fsdp.training.early_stopping import describe_early_stop
    from t5_fsdp.training.metrics import write_status

    if not world.is_main:
        return
    run_dir, step, last = Path(config.run_dir), start.state.step, start.last_step
    if start.early_stop:
        assert start.resume is not None
        message = describe_early_stop(
            start.state.scores, config.evaluation, step, last, start.resume.parent
        )
        what = f"{start.resume}: {message}"
        remedy = "raise evaluation.early_stopping_patience or set it to null"
    else:
        message = f"trained {counted(step, 'step')}"
        what = f"{start.resume} is already trained to step {step} of {last}"
        remedy = "raise train.epochs or train.max_steps"
    session.console.open_log(run_dir / "log.txt")
    session.console.say(
        f"{what}; nothing to do. To train on, {remedy}; to start anew, give --run_dir"
    )
    write_status(run_dir, "finished", step, str(start.resume), message)
