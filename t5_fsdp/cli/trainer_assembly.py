"""Puts a trainer together from a configuration and a starting point, and lets it train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.disk_check import check_disk, retention_of
from t5_fsdp.cli.generator import training_generator
from t5_fsdp.cli.memory_check import step_estimate
from t5_fsdp.cli.options import dump_yaml
from t5_fsdp.cli.process import Session
from t5_fsdp.cli.run_description import describe_parameters, describe_size, device_name, say_units
from t5_fsdp.config import Config, to_dict, width_multiple

if TYPE_CHECKING:
    from t5_fsdp.cli.starting_point import StartingPoint
    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.distributed import World
    from t5_fsdp.evaluation.evaluate import Generator, Validation
    from t5_fsdp.evaluation.own_metric import Metric
    from t5_fsdp.parallel.engine import Engine
    from t5_fsdp.training.trackers.trackers import Trackers


def train_from(
    start: StartingPoint,
    config: Config,
    session: Session,
    world: World,
    prepared: PreparedData,
    metric: Metric | None,
) -> None:
    """Build the model, the optimizer and what serves them, and train to the end of the run.

    Args:
        start: with its weights open.
        session: of this rank; collectives are connected here.
        metric: one of the caller's own, for the validations.

    Raises:
        UserError, Preempted: as `Trainer.run`.
    """
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
        retention=retention_of(config),
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


def _say_start(start: StartingPoint, session: Session) -> None:
    for warning in start.warnings:
        session.console.warn(warning)
    where = f"resuming from {start.resume} (step {start.state.step})"
    session.console.say(
        f"{describe_size(start)}, {start.last_step:,} in all; "
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
            run_folder.describe_environment(world.world_size, device_name(world)),
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


def _build_engine(start: StartingPoint, config: Config, session: Session, world: World) -> Engine:
    from t5_fsdp.checkpoint.stored_weights import load_weights
    from t5_fsdp.model.attention import describe
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.engine import parallelize

    model = build_on_meta(start.spec, config.model.attention)
    session.console.say(
        f"{describe_parameters(model, start)}, {world.world_size} x {device_name(world)}, "
        f"{config.parallel.engine} {config.parallel.param_dtype}, "
        f"attention {describe(model)}"
    )
    world.on_rank_zero(lambda: check_disk(model, start, config))
    say_units(model, config, session, world)
    if config.parallel.compile:
        session.console.say("blocks are compiled when they are met first, which takes its time")
    attach_loss(model, LossOptions.of(config.train))
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


def _peak_flops(config: Config, world: World) -> float | None:
    from t5_fsdp.model.devices import peak_flops

    peak = peak_flops(device_name(world), config.parallel.param_dtype, config.parallel.tf32)
    return None if peak is None else peak * world.world_size
