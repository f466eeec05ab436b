"""What a training run starts from: settled, and refused where it must be, before a file changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.checkpoint.format import RunState, check_content, is_checkpoint, read_state
from t5_fsdp.checkpoint.stored_weights import StoredWeights
from t5_fsdp.cli import run_folder
from t5_fsdp.config import Config, to_dict, width_multiple
from t5_fsdp.config_problems import validation_problems
from t5_fsdp.data.batching import Batches, StepBatches, check_longest
from t5_fsdp.data.collation import SpecialIds
from t5_fsdp.data.epoch_plan import MixturePart
from t5_fsdp.data.streaming import StreamBatches, stream_digest, stream_problem
from t5_fsdp.data.tokenization import load_tokenizer, tokenizer_digest
from t5_fsdp.errors import UserError
from t5_fsdp.model.adapter import LoraAdapter
from t5_fsdp.model.build import ModelSpec, fit_adapter
from t5_fsdp.model.configuration import check_model, check_positions, resolve_spec
from t5_fsdp.model.pretrained import InitialWeights, initial_weights
from t5_fsdp.parallel.compilation import compilation_problem
from t5_fsdp.parallel.mesh import mesh_problems
from t5_fsdp.parallel.precision import precision_warnings
from t5_fsdp.quantities import counted
from t5_fsdp.training.early_stopping import stops_early
from t5_fsdp.training.trainer import total_steps

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from t5_fsdp.data.prepared import PreparedData
    from t5_fsdp.distributed import World

# How rank 0 gets the first weights; or a checkpoint of ours, of which each rank reads its part.
WeightSource = Callable[[], InitialWeights] | Path


@dataclass
class StartingPoint:
    """Model, data and place of a run before its next step.

    Attributes:
        resume: the checkpoint to go on from, or None for a start at step 1.
        state: what the next checkpoint is written from.
        last_step: the run's length in steps.
        warnings: what resuming changes about the data's order, and what may surprise.
        weights: on rank 0, after `open_weights`; empty when a checkpoint is read.
        source: where the weights come from; None when resuming.
        early_stop: the validations so far end the run before its last step.
    """

    resume: Path | None
    tokenizer: PreTrainedTokenizerBase
    special: SpecialIds
    spec: ModelSpec
    batches: Batches
    state: RunState
    last_step: int
    warnings: list[str]
    weights: Mapping[str, torch.Tensor]
    source: WeightSource | None
    has_validation: bool
    early_stop: bool

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that holds the weights: to go on from, or to start warm from."""
        return self.source if isinstance(self.source, Path) else self.resume

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do, the last step's validation included."""
        step, last = self.state.step, self.last_step
        owes_validation = self.has_validation and str(step) not in self.state.scores
        return self.early_stop or step > last or (step == last and not owes_validation)

    def open_weights(self, world: World) -> None:
        """Check them, or draw them, on rank 0; all ranks hear whether the head is the model's own.

        Raises:
            UserError: they are not to be had or not the model's, or don't fit into memory.
        """
        if self.source is None:
            return
        if isinstance(self.source, Path):
            checkpoint = self.source
            world.on_rank_zero(lambda: check_content(checkpoint))
            return
        opening = self.source

        def on_rank_zero() -> bool:
            try:
                opened = opening()
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "allocate" not in str(error):
                    raise
                raise UserError(
                    f"the model's weights do not fit into this machine's memory ({error}); choose "
                    "a smaller model"
                ) from None
            self.weights = opened.tensors
            self.warnings += [opened.note] if opened.note else []
            return opened.own_head

        self.spec.own_head = world.on_rank_zero(on_rank_zero)
        self.state.model = self.spec.to_json()


def find_start(
    config: Config, world: World, prepared: PreparedData, resume: Path | None
) -> StartingPoint:
    """Settle what a run starts from; reads no weights and writes nothing.

    Raises:
        UserError: the checkpoint belongs to other data, another tokenizer, model shape or
            optimizer; the model options are wrong; an example exceeds micro_batch_tokens.
    """
    problems = mesh_problems(config.parallel, world)
    problems += validation_problems(config.evaluation, config.parallel)
    if problem := compilation_problem(config.parallel, world.device):
        problems.append(problem)
    if problems:
        raise UserError(*problems)
    tokenizer = load_tokenizer(str(prepared.tokenizer_directory))
    hashes = _Hashes(_data_hash(config, prepared), tokenizer_digest(tokenizer))
    _check_same_everywhere(world, hashes)
    old = None if resume is None else read_state(resume)
    source: WeightSource | None = None
    warnings: list[str] = []
    if resume is None or old is None:
        spec, source = choose_model(config, tokenizer)
    else:
        warnings = _compare_data(config, old, hashes, resume)
        _compare_optimizer(config, resume)
        spec = _resumed_spec(config, tokenizer, old, resume)
    check_model(spec, config.model.attention)
    check_positions(spec.config, _longest(config), width_multiple(config))
    validation = prepared.split("validation")
    if validation is not None:
        limit = config.train.micro_batch_tokens
        check_longest(validation, limit, width_multiple(config), "validation")
    elif config.evaluation.early_stopping_patience is not None:
        raise UserError(
            f"evaluation.early_stopping_patience is {config.evaluation.early_stopping_patience}, "
            "but there is no validation split to judge by; give one (data.validation_files or "
            "validation_split), or set it to null"
        )
    special = SpecialIds(tokenizer.pad_token_id, spec.config.decoder_start_token_id)
    batches: Batches
    if config.data.streaming:
        batches = _stream(config, world, tokenizer, special, old.place if old else {})
    else:
        batches = _batches(config, world, prepared, special)
    state = _state(config, spec, hashes, prepared, old)
    last_step = total_steps(batches.steps_per_epoch, config.train)
    return StartingPoint(
        resume=resume,
        tokenizer=tokenizer,
        special=special,
        spec=spec,
        batches=batches,
        state=state,
        last_step=last_step,
        warnings=[
            *warnings,
            *_plan_warnings(old.plan if old else {}, state.plan),
            *_length_warnings(config.schedule.warmup_steps, last_step),
            *precision_warnings(config.parallel, world.device),
            *_adapter_warnings(config),
            *_early_stopping_warnings(config),
        ],
        weights={},
        source=source,
        has_validation=validation is not None,
        early_stop=state.step < last_step and stops_early(state.scores, config.evaluation),
    )


def _longest(config: Config) -> dict[str, int]:
    """The most tokens that a run gives the model at a time, padding included, by option."""
    multiple = width_multiple(config)
    note = "" if multiple == 1 else f" (rounded up to a multiple of {multiple})"
    lengths = {"evaluation.max_new_tokens": config.evaluation.max_new_tokens}
    for name in ("max_source_tokens", "max_target_tokens"):
        length = getattr(config.data, name)
        lengths[f"data.{name}{note}"] = -(-length // multiple) * multiple
    return lengths


@dataclass(frozen=True)
class _Hashes:
    """What a resume, and every rank, has to have the same: training data and vocabulary."""

    data: str
    tokenizer: str


def _state(
    config: Config, spec: ModelSpec, hashes: _Hashes, prepared: PreparedData, old: RunState | None
) -> RunState:
    """What the next checkpoint is written from: as the old one says, under today's options."""
    return RunState(
        step=old.step if old else 0,
        model=spec.to_json(),
        data_hash=hashes.data,
        tokenizer_hash=hashes.tokenizer,
        plan={
            "seed": config.seed,
            "global_batch_size": config.train.global_batch_size,
            "batching": config.train.batching,
            "mixture weights": [entry.get("weight") for entry in config.data.mixture],
        },
        window=old.window if old else {},
        scores=old.scores if old else {},
        versions=run_folder.library_versions(),
        prepared=str(prepared.directory),
        branched_from=_branch(config, old),
        place=old.place if old else {},
        loss_scale=old.loss_scale if old else {},
        skipped_in_a_row=old.skipped_in_a_row if old else 0,
    )


def choose_model(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[ModelSpec, WeightSource]:
    """The model to start with and where its weights come from.

    Raises:
        UserError: the model can't be found, or its options are wrong.
    """
    name = config.model.name
    if name is None or not is_checkpoint(Path(name)):
        spec = resolve_spec(config.model, tokenizer)
        return spec, partial(initial_weights, config.model, spec, config.seed)
    stored = read_state(Path(name)).spec
    spec = resolve_spec(config.model, tokenizer, stored)
    if config.model.init == "random":
        return spec, partial(initial_weights, config.model, spec, config.seed)
    both = stored.adapter is not None and spec.adapter is not None
    _check_same_shape(
        stored,
        spec,
        f"model.name: {name}",
        "give its model options; of an adapter, or export it merged and give that folder",
        adapter=both,
    )
    if both or stored.adapter is spec.adapter:
        return spec, Path(name)
    return spec, partial(_change_adapter, Path(name), stored.adapter, spec, config.seed)


def _change_adapter(
    checkpoint: Path, stored: LoraAdapter | None, asked: ModelSpec, seed: int
) -> InitialWeights:
    """The checkpoint's weights with a new adapter beside them, or with theirs merged into them."""
    weights = fit_adapter(StoredWeights(checkpoint), stored, asked, seed)
    return InitialWeights(weights, asked.own_head)


def _branch(config: Config, old: RunState | None) -> str | None:
    if config.checkpoint.resume not in ("auto", "never"):
        return str(Path(config.checkpoint.resume).resolve())
    return old.branched_from if old else None


def _check_same_shape(
    stored: ModelSpec, asked: ModelSpec, holder: str, remedy: str, *, adapter: bool = True
) -> None:
    """Raises UserError when `holder`'s weights would not fit the model that is asked for.

    Args:
        adapter: compare the adapters too.
    """
    now = asked.shape()
    pairs = [(name, there, now[name]) for name, there in stored.shape().items()]
    if adapter:
        pairs += _adapter_pairs(stored.adapter, asked.adapter)
    if stored.config.model_type != asked.config.model_type:
        pairs = pairs[:1]  # the others have other names
    differences = [f"{name} is {there} there and {now} now" for name, there, now in pairs
                   if there != now]  # fmt: skip
    if differences:
        raise UserError(
            f"{holder} holds another model than the options ask for; {remedy}",
            *differences,
        )


def _adapter_pairs(
    stored: LoraAdapter | None, asked: LoraAdapter | None
) -> list[tuple[str, Any, Any]]:
    """(option, there, now) of what makes two adapters compute differently; dropout does not."""
    if stored is None or asked is None:
        there, now = ("null" if adapter is None else "lora" for adapter in (stored, asked))
        return [("model.adapter", there, now)]
    return [
        ("model.lora_rank", stored.rank, asked.rank),
        ("model.lora_alpha", stored.alpha, asked.alpha),
        ("model.lora_targets", ", ".join(stored.targets), ", ".join(asked.targets)),
    ]


def _check_same_everywhere(world: World, hashes: _Hashes) -> None:
    """Raises UserError when this rank's node has prepared other data than rank 0."""
    if world.on_rank_zero(lambda: hashes) != hashes:
        raise UserError(
            f"rank {world.rank} has other training data or another tokenizer than rank 0; give all "
            "nodes the same files, or a data.cache_dir that they share"
        )


def _data_hash(config: Config, prepared: PreparedData) -> str:
    if config.data.streaming:
        return stream_digest(config.data)
    return prepared.content_hash["train"]


def _batches(
    config: Config, world: World, prepared: PreparedData, special: SpecialIds
) -> StepBatches:
    split = prepared.split("train")
    assert split is not None
    weights = [entry.get("weight") for entry in config.data.mixture]
    mixture = [
        MixturePart(part.start, part.stop, weight)
        for part, weight in zip(prepared.parts, weights, strict=False)
        if weight is not None
    ]
    return StepBatches(
        split,
        special,
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=config.train.global_batch_size,
        micro_batch_tokens=config.train.micro_batch_tokens,
        batching=config.train.batching,
        seed=config.seed,
        width_multiple=width_multiple(config),
        mixture=mixture,
        name_of=lambda index: split.text(index)["id"],
    )


def _stream(
    config: Config,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    special: SpecialIds,
    place: dict[str, int],
) -> StreamBatches:
    limit, multiple = config.train.micro_batch_tokens, width_multiple(config)
    if problem := stream_problem(config.data, limit, multiple):
        raise UserError(problem)
    return StreamBatches(
        config.data,
        tokenizer,
        special,
        world,
        global_batch_size=config.train.global_batch_size,
        micro_batch_tokens=limit,
        seed=config.seed,
        width_multiple=multiple,
        **place,
    )


def _resumed_spec(
    config: Config, tokenizer: PreTrainedTokenizerBase, old: RunState, folder: Path
) -> ModelSpec:
    """The checkpoint's model; other values that keep its shape (dropout) may have changed.

    Raises:
        UserError: the options ask for a model of another shape.
    """
    if run_folder.read_config_dict(folder).get("model") == to_dict(config.model):
        return old.spec
    asked, _ = choose_model(config, tokenizer)
    if not {"tie_word_embeddings", "scale_decoder_outputs"} & set(config.model.config):
        # What the options do not say was read off the weights.
        asked.own_head = old.spec.own_head
    _check_same_shape(
        old.spec, asked, str(folder), "give its model options, or another run_dir to start anew"
    )
    return asked


def _compare_data(config: Config, old: RunState, hashes: _Hashes, folder: Path) -> list[str]:
    """Warnings of other data or another tokenizer than the checkpoint's, where that is accepted.

    Raises:
        UserError: where it is not; with the options that differ.
    """
    changed = {}
    if old.tokenizer_hash != hashes.tokenizer:
        changed["tokenizer"] = (
            f"{folder} was trained with another tokenizer ({old.tokenizer_hash[:12]}, now "
            f"{hashes.tokenizer[:12]}; one that is learned follows the training data)",
            "use that one and that data",
        )
    if old.data_hash != hashes.data:
        changed["data"] = (
            f"{folder} was trained on other training data (content {old.data_hash[:12]}, now "
            f"{hashes.data[:12]})",
            "restore the data, its limits and prefix",
        )
    for name, (what, remedy) in changed.items():
        if name not in config.checkpoint.accept_changed:
            raise UserError(
                f"{what}; {remedy}, give another run_dir, or accept it with "
                f"checkpoint.accept_changed: [{', '.join(changed)}]",
                *_changed_options(config, folder),
            )
    return [
        f"{what}; going on, as checkpoint.accept_changed allows" for what, _ in changed.values()
    ]


def _changed_options(config: Config, folder: Path) -> list[str]:
    """The data's options that are not those of a checkpoint's configuration, one a line."""
    there = run_folder.read_config_dict(folder).get("data") or {}
    of_training = [
        (name, there[name], value)
        for name, value in to_dict(config.data).items()
        if name in there and not name.startswith(("cache_", "validation_", "test_"))
    ]
    differences = [
        f"data.{name} is {before!r} there and {now!r} now"
        for name, before, now in of_training
        if before != now
    ]
    return differences or ["the options of the data are the same: its files have changed"]


def _compare_optimizer(config: Config, folder: Path) -> None:
    """Raises UserError when the checkpoint holds the state of another optimizer."""
    stored = run_folder.read_config_dict(folder).get("optimizer") or {}
    name = config.optimizer.name
    if (there := stored.get("name", name)) != name:
        raise UserError(
            f"{folder} was trained with optimizer.name: {there}, whose state {name} cannot go on "
            f"from; give optimizer.name: {there}, or start a new run_dir from its weights "
            f"(model.name: {folder})"
        )


def _adapter_warnings(config: Config) -> list[str]:
    if config.model.adapter is None or config.optimizer.name != "adafactor":
        return []
    return [
        "optimizer.name: adafactor takes steps in proportion to a parameter's size, and half of an "
        "adapter's start from 0: it hardly learns; use adamw"
    ]


def _early_stopping_warnings(config: Config) -> list[str]:
    if config.evaluation.early_stopping_patience is None or config.checkpoint.keep_best > 0:
        return []
    return [
        "checkpoint.keep_best is 0: when the run stops early, its best checkpoint may be gone; set "
        "it to 1"
    ]


def _length_warnings(warmup: int, last: int) -> list[str]:
    if warmup < last:
        return []
    return [
        f"schedule.warmup_steps is {warmup}, but the run has {counted(last, 'step')}: the learning "
        "rate never reaches optimizer.lr; lower it, or lower train.global_batch_size"
    ]


def _plan_warnings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {old.get(name)} and is {value} now: from here on the order of the data is "
        "another, so this epoch may repeat or miss examples"
        for name, value in new.items()
        if name in old and old[name] != value
    ]
