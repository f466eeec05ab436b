"""`train`: from a configuration to a trained, validated, checkpointed model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.export_hf import check_export_at_end, export_at_end
from t5_fsdp.cli.generator import training_generator
from t5_fsdp.cli.memory_check import refuse_what_cannot_fit, say_memory, step_estimate
from t5_fsdp.cli.options import Extra, dump_yaml, parse_layers, resolve
from t5_fsdp.cli.paths import check_paths
from t5_fsdp.cli.prepare_data import prepare_on_all_ranks, say_audit
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, to_dict, width_multiple
from t5_fsdp.config_problems import best_metric_problems
from t5_fsdp.console import Console
from t5_fsdp.data.source_checks import source_problems
from t5_fsdp.errors import UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    from t5_fsdp.checkpoint.retention import Retention
    from t5_fsdp.cli.starting_point import StartingPoint
    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.distributed import World
    from t5_fsdp.evaluation.evaluate import Generator, Validation
    from t5_fsdp.evaluation.own_metric import Metric
    from t5_fsdp.parallel.engine import Engine
    from t5_fsdp.training.trackers.trackers import Trackers

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
    from t5_fsdp.model.build import check_new_model
    from t5_fsdp.training.trackers.trackers import check_trackers

    check_trackers(config.logging)
    check_new_model(config.model)


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
    world.on_rank_zero(lambda: _check_room(model, start, config))
    say_memory(config, world, start.spec, prepared, session.console)
    if check_memory:
        refuse_what_cannot_fit(config, world, start.spec, prepared)
    _explain(model, config, session, world)
    session.console.say(
        f"the configuration is sound: {_describe_parameters(model, start)}, "
        f"{_describe_size(start)}, {start.last_step:,} in all; "
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
        _train_from(start, config, session, world, prepared, metric)
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


def _train_from(
    start: StartingPoint,
    config: Config,
    session: Session,
    world: World,
    prepared: PreparedData,
    metric: Metric | None,
) -> None:
    from t5_fsdp.checkpoint.manager import CheckpointManager
    from t5_fsdp.model.flops import T5Shape
    from t5_fsdp.parallel.engine import check_optimizer
    from t5_fsdp.parallel.mesh import shard_index
    from t5_fsdp.parallel.precision import use_tf32
    from t5_fsdp.training.optimizer import make_optimizer
    from t5_fsdp.training.trainer import LoopOptions, Trainer

    run_dir = Path(config.run_dir)
    _say_start(start, session)
    use_tf32(config.parallel.tf32, world.device)
    session.connect(config.train.collective_timeout_seconds)
    engine = _build_engine(start, config, session, world)
    optimizer = make_optimizer(
        engine.model,
        config.optimizer,
        seed=config.seed,
        shard=shard_index(config.parallel, world),
    )
    check_optimizer(optimizer, engine.model)
    checkpoints = CheckpointManager(
        run_dir,
        world,
        retention=_retention(config),
        background=config.checkpoint.async_save,
        warn=session.console.warn,
    )
    if start.resume is not None:
        checkpoints.load(start.resume, engine.model, optimizer)
    # What fails before leaves the folder as it was.
    _open_run_folder(start, config, session, world, prepared)
    trainer = Trainer(
        LoopOptions(
            seed=config.seed,
            parallel=config.parallel,
            optimizer=config.optimizer,
            schedule=config.schedule,
            train=config.train,
            checkpoint=config.checkpoint,
            evaluation=config.evaluation,
            logging=config.logging,
        ),
        run_dir=run_dir,
        world=world,
        console=session.console,
        interruption=session.interruption,
        engine=engine,
        optimizer=optimizer,
        batches=start.batches,
        state=start.state,
        checkpoints=checkpoints,
        save=lambda current: checkpoints.save(
            engine.model, optimizer, current, dump_yaml(config), prepared.tokenizer_directory
        ),
        validate=_validator(start, config, session, world, prepared, engine, metric),
        shape=T5Shape.of(start.spec.config, frozen=start.spec.adapter is not None),
        peak_flops=_peak_flops(config, world),
        trackers=_open_trackers(start, config, session, world),
        estimate_memory=step_estimate(config, world, start.spec, prepared),
    )
    ending = trainer.run()
    session.console.say(f"done: {ending}; the run is in {run_dir}")


def _open_trackers(
    start: StartingPoint, config: Config, session: Session, world: World
) -> Trackers:
    from t5_fsdp.training.trackers.tracker import TrackedRun
    from t5_fsdp.training.trackers.trackers import Trackers, open_trackers

    if not world.is_main:
        return Trackers.none(session.console)
    run_dir = Path(config.run_dir)
    run = TrackedRun(
        run_dir,
        name=config.logging.run_name or run_dir.resolve().name,
        project=config.logging.project,
        config=to_dict(config),
        first_step=start.state.step + 1,
    )
    return open_trackers(config.logging, run, session.console)


def _retention(config: Config) -> Retention:
    from t5_fsdp.checkpoint.retention import Retention

    return Retention(
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        best_metric=config.evaluation.best_metric,
        keep_every=config.checkpoint.keep_every,
    )


def _check_room(model: Any, start: StartingPoint, config: Config) -> None:
    """Raises UserError when the disk can't hold what is to be kept, or a folder is in the way."""
    from t5_fsdp.checkpoint.retention import check_room
    from t5_fsdp.model.build import num_parameters
    from t5_fsdp.training.optimizer import state_bytes

    check_export_at_end(config)
    every, validated = config.checkpoint.every_steps, config.evaluation.every_steps
    best_at_others = (
        start.has_validation
        and config.checkpoint.keep_best > 0
        and validated is not None
        and (every is None or validated % every != 0)
    )
    at_others = best_at_others or config.checkpoint.every_minutes is not None
    trained = num_parameters(model, trained=True)
    size = 4 * num_parameters(model) + state_bytes(config.optimizer) * trained
    check_room(
        Path(config.run_dir),
        _retention(config).most_at_once(start.last_step, every, at_others),
        size,
        4 * num_parameters(model) if config.checkpoint.export_at_end else 0,
    )


def _say_start(start: StartingPoint, session: Session) -> None:
    for warning in start.warnings:
        session.console.warn(warning)
    where = f"resuming from {start.resume} (step {start.state.step})"
    session.console.say(
        f"{_describe_size(start)}, {start.last_step:,} in all; "
        + (where if start.resume else "starting at step 1")
    )


def _open_run_folder(
    start: StartingPoint, config: Config, session: Session, world: World, prepared: PreparedData
) -> None:
    """Write what the folder says about the run, and arrange for what it says if that ends early."""
    from t5_fsdp.checkpoint.format import complete_checkpoints
    from t5_fsdp.cli.report import refresh_report
    from t5_fsdp.training.metrics import write_status

    run_dir = Path(config.run_dir)
    session.console.open_log(run_dir / "log.txt")
    world.on_rank_zero(
        lambda: run_folder.write_run_files(
            run_dir,
            dump_yaml(config),
            run_folder.describe_environment(world.world_size, _device_name(world)),
            prepared.audit,
            prepared.tokenizer_directory,
        )
    )

    def last_checkpoint() -> Path | None:
        return next(reversed(complete_checkpoints(run_dir)), None)

    def write_end(state: str, message: str) -> None:
        last = last_checkpoint()
        write_status(run_dir, state, start.state.step, str(last) if last else None, message)
        refresh_report(run_dir, session.console)

    session.on_early_end = write_end
    session.last_checkpoint = last_checkpoint


def _describe_size(start: StartingPoint) -> str:
    examples, steps = start.batches.num_examples, start.batches.steps_per_epoch
    if examples is None or steps is None:
        return "a stream of training examples, steps"
    return f"{counted(examples, 'training example')}, {counted(steps, 'step')} an epoch"


def _describe_parameters(model: Any, start: StartingPoint) -> str:
    from t5_fsdp.model.build import num_parameters

    count, trained = num_parameters(model), num_parameters(model, trained=True)
    if start.spec.adapter is None:
        return f"{count:,} parameters"
    return f"{count:,} parameters, of which an adapter's {trained:,} train ({trained / count:.2%})"


def _explain(model: Any, config: Config, session: Session, world: World) -> None:
    if config.parallel.explain:
        from t5_fsdp.parallel.mesh import num_shards
        from t5_fsdp.parallel.wrapping import describe_units, find_trained_parts

        session.console.say(
            describe_units(model, config.parallel, num_shards(config.parallel, world))
        )
        parts = find_trained_parts(model, config.parallel)
        if parts and config.parallel.engine == "fsdp1":
            session.console.say(
                f"each of the {len(parts)} modules in them that train beside frozen ones is one too"
            )


def _build_engine(start: StartingPoint, config: Config, session: Session, world: World) -> Engine:
    from t5_fsdp.checkpoint.manager import load_weights
    from t5_fsdp.model.attention import describe
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.engine import parallelize

    model = build_on_meta(start.spec, config.model.attention)
    session.console.say(
        f"{_describe_parameters(model, start)}, {world.world_size} x {_device_name(world)}, "
        f"{config.parallel.engine} {config.parallel.param_dtype}, "
        f"attention {describe(model)}"
    )
    world.on_rank_zero(lambda: _check_room(model, start, config))
    _explain(model, config, session, world)
    if config.parallel.compile:
        session.console.say("blocks are compiled when they are met first, which takes its time")
    train = config.train
    attach_loss(model, LossOptions(train.label_smoothing, train.z_loss, train.loss_chunk_rows))
    engine = parallelize(model, config.parallel, world)
    if start.checkpoint is None:
        engine.load_full(start.weights)
        start.weights = {}
    else:
        engine.materialize()
        if start.resume is None:  # else the optimizer's state comes with them
            load_weights(start.checkpoint, engine.model)
    return engine


def _validator(
    start: StartingPoint,
    config: Config,
    session: Session,
    world: World,
    prepared: PreparedData,
    engine: Engine,
    metric: Metric | None,
) -> Callable[[int], Validation] | None:
    """Loss and ROUGE of the validation subset for a step; None without such a split."""
    from t5_fsdp.checkpoint.format import folder_name
    from t5_fsdp.data.tokenization import newline_id
    from t5_fsdp.evaluation.evaluate import choose_examples, validate
    from t5_fsdp.evaluation.generation import GenerationSettings, decoding_settings
    from t5_fsdp.evaluation.rouge import RougeSettings

    split = prepared.split("validation")
    if split is None:
        session.console.warn("there is no validation split: no validation, no best checkpoint")
        return None
    newline = newline_id(start.tokenizer, config.data.keep_newlines)
    indices = choose_examples(len(split), config.evaluation.max_examples, config.seed)

    generators: list[Generator] = []

    def run_validation(step: int) -> Validation:
        if not generators:  # by now the optimizer has its state, and what is free is free
            made = training_generator(engine, start.spec, config, world, session.console)
            generators.append(made)
        return validate(
            engine.model,
            generators[0],
            start.tokenizer,
            start.special,
            split,
            indices,
            GenerationSettings.of(config.evaluation, config.seed),
            RougeSettings.of(config.evaluation),
            world,
            session.console,
            newline=newline,
            micro_batch_tokens=config.train.micro_batch_tokens,
            width_multiple=width_multiple(config),
            stored_settings=decoding_settings(config),
            num_shown=config.logging.num_summaries,
            should_stop=lambda: session.interruption.requested is not None,
            metric=metric,
            output_dir=Path(config.run_dir) / "evaluation" / folder_name(step) / "validation",
        )

    return run_validation


def _device_name(world: World) -> str:
    if world.device.type != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(world.device)


def _peak_flops(config: Config, world: World) -> float | None:
    from t5_fsdp.model.devices import peak_flops

    peak = peak_flops(_device_name(world), config.parallel.param_dtype, config.parallel.tf32)
    return None if peak is None else peak * world.world_size
