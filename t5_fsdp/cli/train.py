"""`train`: from a configuration to a trained, validated, checkpointed model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.options import Extra, dump_yaml, parse_layers, resolve
from t5_fsdp.cli.prepare_data import prepare_on_all_ranks, say_audit
from t5_fsdp.cli.process import Session, run
from t5_fsdp.config import Config, to_dict
from t5_fsdp.data.sources import source_problems
from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from t5_fsdp.checkpoint.manager import RunState
    from t5_fsdp.data.tokenization import PreparedData
    from t5_fsdp.distributed import World
    from t5_fsdp.model.build import ModelSpec, StateDict

_EXTRA = [
    Extra(
        "check",
        "Validate configuration, data and model, say what would be trained, and stop.",
        type=bool,
        default=False,
    )
]
_MODEL_SHAPE = (
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "vocab_size",
    "feed_forward_proj", "relative_attention_num_buckets",
)  # fmt: skip


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
    config = resolve(layers)
    if problems := source_problems(config.data):
        raise UserError(*problems)
    world = session.enter_world()
    run_dir = Path(config.run_dir)
    if layers.own["check"]:
        _check(config, session)
        return
    # Held in this frame: the lock ends with the run.
    lock: list[Any] = []
    resume = world.on_rank_zero(lambda: _claim(config, session, lock))
    session.console.open_log(run_dir / "log.txt")
    prepared = prepare_on_all_ranks(config, world, session.console)
    _train_prepared(config, session, prepared, Path(resume) if resume else None)
    for held in lock:
        held.release()


def _claim(config: Config, session: Session, lock: list[Any]) -> str | None:
    run_dir = Path(config.run_dir)
    if config.checkpoint.resume != "auto":  # refuse before anything is written
        run_folder.find_resume(run_dir, config.checkpoint)
    lock.append(run_folder.lock_run_dir(run_dir, session.console))
    found = run_folder.find_resume(run_dir, config.checkpoint)
    return str(found) if found else None


def _check(config: Config, session: Session) -> None:
    from t5_fsdp.data.batching import check_longest
    from t5_fsdp.data.tokenization import load_tokenizer
    from t5_fsdp.model.build import build_on_meta, num_parameters

    assert session.world is not None
    prepared = prepare_on_all_ranks(config, session.world, session.console)
    say_audit(prepared.audit, session.console)
    split = prepared.split("train")
    assert split is not None
    check_longest(split, config.train.micro_batch_tokens)
    spec, _ = _spec_and_weights(config, load_tokenizer(str(prepared.tokenizer_directory)))
    count = num_parameters(build_on_meta(spec))
    session.console.say(
        f"the configuration is sound: {count:,} parameters, {len(split):,} examples"
    )


def _train_prepared(
    config: Config, session: Session, prepared: PreparedData, resume: Path | None
) -> None:
    from t5_fsdp.checkpoint.manager import CheckpointManager, complete_checkpoints, read_state
    from t5_fsdp.data.batching import SpecialIds, StepBatches
    from t5_fsdp.data.tokenization import load_tokenizer
    from t5_fsdp.model.build import build_on_meta, num_parameters
    from t5_fsdp.model.flops import T5Shape
    from t5_fsdp.parallel.engine import check_optimizer, parallelize
    from t5_fsdp.training.metrics import write_status
    from t5_fsdp.training.optimizer import make_optimizer
    from t5_fsdp.training.trainer import LoopOptions, Trainer, total_steps

    world, console, run_dir = session.world, session.console, Path(config.run_dir)
    assert world is not None
    tokenizer = load_tokenizer(str(prepared.tokenizer_directory))
    split = prepared.split("train")
    assert split is not None
    old = read_state(resume) if resume else None
    if old is not None:
        spec = _resumed_spec(config, tokenizer, prepared, old, resume)
        _compare_data(old, prepared, resume)
        weights: StateDict = {}
    else:
        spec, read_weights = _spec_and_weights(config, tokenizer)
    special = SpecialIds(tokenizer.pad_token_id, spec.config.decoder_start_token_id)
    batches = StepBatches(
        split,
        special,
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=config.train.global_batch_size,
        micro_batch_tokens=config.train.micro_batch_tokens,
        batching=config.train.batching,
        seed=config.seed,
    )
    if old is None:
        holder: dict[str, StateDict] = {}

        def read() -> bool:
            holder["weights"], own_head = read_weights()
            return own_head

        spec.own_head = world.on_rank_zero(read)
        weights = holder.get("weights", {})
    state = _state(config, spec, prepared, old)
    last = total_steps(batches.steps_per_epoch, config.train)
    if world.is_main:
        run_folder.write_run_files(
            run_dir,
            dump_yaml(config),
            run_folder.describe_environment(world.world_size, _device_name(world)),
            prepared.audit,
            prepared.tokenizer_directory,
        )
    if state.step >= last:
        console.say(
            f"{run_dir} is already trained to step {state.step} of {last}; nothing to do. "
            "To train on, raise train.epochs or train.max_steps; to start anew, give --run_dir"
        )
        return
    _warn_about_plan(state, config, console)
    _say_start(config, session, len(split), batches.steps_per_epoch, last, resume, state.step)

    def status_failed(message: str) -> None:
        last_saved = complete_checkpoints(run_dir)
        saved = str(last_saved[-1]) if last_saved else None
        write_status(run_dir, "failed", state.step, saved, message)

    session.on_failure = status_failed
    session.last_checkpoint = lambda: next(reversed(complete_checkpoints(run_dir)), None)
    world.connect(config.train.collective_timeout_seconds)
    model = build_on_meta(spec, config.model.attention)
    count = num_parameters(model)
    engine = parallelize(model, config.parallel, world)
    if resume is None:
        engine.load_full(weights)
        weights.clear()
    else:
        engine.materialize()
    optimizer = make_optimizer(engine.model.parameters(), config.optimizer)
    check_optimizer(optimizer, engine.model)
    checkpoints = CheckpointManager(
        run_dir,
        world,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        best_metric=config.evaluation.best_metric,
    )
    if resume is not None:
        checkpoints.load(resume, engine.model, optimizer)
    console.say(
        f"{count:,} parameters, {world.world_size} x {_device_name(world)}, "
        f"{config.parallel.engine} {config.parallel.param_dtype}, "
        f"attention {config.model.attention}"
    )
    trainer = Trainer(
        LoopOptions(
            seed=config.seed,
            optimizer=config.optimizer,
            schedule=config.schedule,
            train=config.train,
            checkpoint=config.checkpoint,
            evaluation=config.evaluation,
            logging=config.logging,
        ),
        run_dir=run_dir,
        world=world,
        console=console,
        interruption=session.interruption,
        engine=engine,
        optimizer=optimizer,
        batches=batches,
        state=state,
        checkpoints=checkpoints,
        save=lambda current: checkpoints.save(
            engine.model, optimizer, current, dump_yaml(config), prepared.tokenizer_directory
        ),
        validate=_validator(config, session, prepared, tokenizer, spec, engine),
        shape=T5Shape.of(spec.config),
        peak_flops=_peak_flops(config, world),
    )
    trainer.run()
    console.say(f"done: {last} steps; the run is in {run_dir}")


def _spec_and_weights(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[ModelSpec, Any]:
    """The model to start with and how rank 0 gets its weights."""
    from t5_fsdp.checkpoint.manager import is_checkpoint, read_state, read_weights
    from t5_fsdp.model.build import initial_weights, resolve_spec

    name = config.model.name
    if name is not None and is_checkpoint(Path(name)):
        spec = read_state(Path(name)).spec
        if config.model.init == "random":
            return spec, initial_weights(config.model, spec, config.seed)
        return spec, lambda: (read_weights(Path(name)), spec.own_head)
    spec = resolve_spec(config.model, tokenizer)
    return spec, initial_weights(config.model, spec, config.seed)


def _resumed_spec(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prepared: PreparedData,
    old: RunState,
    folder: Path | None,
) -> ModelSpec:
    """The checkpoint's model; other values that keep its shape (dropout) may have changed.

    Raises:
        UserError: the options ask for a model of another shape, or the tokenizer is another.
    """
    assert folder is not None
    tokenizer_hash = run_folder.hash_folder(prepared.tokenizer_directory)
    if old.tokenizer_hash != tokenizer_hash:
        raise UserError(
            f"{folder} was trained with another tokenizer ({old.tokenizer_hash[:12]}, now "
            f"{tokenizer_hash[:12]}); use that one, or give another run_dir"
        )
    if run_folder.read_config_dict(folder).get("model") == to_dict(config.model):
        return old.spec
    asked, _ = _spec_and_weights(config, tokenizer)
    stored = old.spec.config
    differences = [
        f"{name} is {getattr(stored, name, None)} there and {getattr(asked.config, name, None)} now"
        for name in _MODEL_SHAPE
        if getattr(stored, name, None) != getattr(asked.config, name, None)
    ]
    if differences:
        raise UserError(
            f"{folder} holds a model of another shape; give another run_dir or its model options",
            *differences,
        )
    asked.own_head = old.spec.own_head
    return asked


def _compare_data(old: RunState, prepared: PreparedData, folder: Path | None) -> None:
    if old.data_hash != prepared.content_hash["train"]:
        raise UserError(
            f"{folder} was trained on other training data (content {old.data_hash[:12]}, now "
            f"{prepared.content_hash['train'][:12]}); restore the data, its limits and prefix, or "
            "give another run_dir"
        )


def _state(
    config: Config, spec: ModelSpec, prepared: PreparedData, old: RunState | None
) -> RunState:
    from t5_fsdp.checkpoint.manager import RunState

    return RunState(
        step=old.step if old else 0,
        model=spec.to_json(),
        data_hash=prepared.content_hash["train"],
        tokenizer_hash=run_folder.hash_folder(prepared.tokenizer_directory),
        plan=old.plan if old else _plan(config),
        window=old.window if old else {},
        scores=old.scores if old else {},
        versions=run_folder.library_versions(),
        prefix=config.data.prefix,
        prepared=str(prepared.directory),
    )


def _plan(config: Config) -> dict[str, Any]:
    return {
        "seed": config.seed,
        "global_batch_size": config.train.global_batch_size,
        "batching": config.train.batching,
    }


def _warn_about_plan(state: RunState, config: Config, console: Any) -> None:
    plan = _plan(config)
    for name, value in plan.items():
        if state.plan.get(name) != value:
            console.warn(
                f"{name} was {state.plan.get(name)} and is {value} now: from here on the order of "
                "the data is another, so this epoch may repeat or miss examples"
            )
    state.plan = plan


def _say_start(
    config: Config,
    session: Session,
    num_examples: int,
    steps_per_epoch: int,
    last: int,
    resume: Path | None,
    step: int,
) -> None:
    console = session.console
    where = f"resuming from {resume} (step {step})" if resume else "starting at step 1"
    console.say(
        f"{num_examples:,} training examples, {steps_per_epoch:,} steps an epoch, {last:,} in all; "
        f"{where}"
    )


def _validator(
    config: Config,
    session: Session,
    prepared: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    engine: Any,
) -> Any:
    from t5_fsdp.data.batching import SpecialIds
    from t5_fsdp.evaluation.evaluate import choose_examples, validate
    from t5_fsdp.evaluation.generation import GenerationSettings
    from t5_fsdp.model.build import build_with_weights
    from t5_fsdp.parallel.fsdp2 import DTYPES

    world = session.world
    split = prepared.split("validation")
    assert world is not None
    if split is None:
        session.console.warn("there is no validation split: no validation, no best checkpoint")
        return None
    special = SpecialIds(tokenizer.pad_token_id, spec.config.decoder_start_token_id)
    indices = choose_examples(len(split), config.evaluation.max_examples, config.seed)
    settings = GenerationSettings.of(config.evaluation)
    dtype = DTYPES[config.parallel.param_dtype]

    def full_model() -> Any:
        return build_with_weights(spec, engine.gather_full(dtype), config.model.attention)

    def run_validation(step: int) -> dict[str, float]:
        return validate(
            engine.model,
            full_model,
            tokenizer,
            special,
            split,
            indices,
            settings,
            world,
            session.console,
            micro_batch_tokens=config.train.micro_batch_tokens,
            output_dir=Path(config.run_dir) / "evaluation" / f"step-{step:08d}" / "validation",
        )

    return run_validation


def _device_name(world: World) -> str:
    if world.device.type != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(world.device)


def _peak_flops(config: Config, world: World) -> float | None:
    from t5_fsdp.model.devices import peak_flops

    peak = peak_flops(_device_name(world), config.parallel.param_dtype)
    return None if peak is None else peak * world.world_size
