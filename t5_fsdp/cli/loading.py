"""A trained model by what the user names: checkpoint, run folder, Hugging Face folder or Hub id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.cli import run_folder
from t5_fsdp.cli.options import Layers
from t5_fsdp.config import Config, ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.files import looks_like_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from t5_fsdp.cli.process import Session
    from t5_fsdp.console import Console
    from t5_fsdp.distributed import World
    from t5_fsdp.evaluation.evaluate import Generator
    from t5_fsdp.model.build import ModelSpec


@dataclass
class FoundModel:
    """What the user named, before any weight is read.

    Attributes:
        checkpoint: one of ours, or None for a Hugging Face folder or Hub id.
        base: the configuration stored with it, as nested dicts.
    """

    name: str
    option: str
    checkpoint: Path | None
    base: dict[str, Any]

    @property
    def stored_data(self) -> dict[str, Any] | None:
        return self.base.get("data")

    def digest(self, config: Config) -> str:
        """Of what decides about the numbers that it computes, as far as files show it.

        Call it on one rank, after `choose`, and for a Hub id once it is in the cache.
        """
        versions = run_folder.library_versions()
        values = {
            "weights": self._weights(config),
            "attention": config.model.attention,
            "tf32": config.parallel.tf32,
            "versions": [versions[name] for name in ("torch", "transformers", "tokenizers")],
        }
        text = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _weights(self, config: Config) -> list[Any]:
        from huggingface_hub import try_to_load_from_cache

        from t5_fsdp.checkpoint.format import COMPLETE

        if self.checkpoint is not None:  # COMPLETE has the checksum of every other file
            return [(self.checkpoint / COMPLETE).read_text(encoding="utf-8")]
        options = hub_options(self.name, config)
        values = [self.name, options.revision, options.config]
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            files = sorted(path for path in folder.glob("*") if path.is_file())
            stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
            return [*values, stats]
        # The path names the commit.
        cached = try_to_load_from_cache(self.name, "config.json", revision=options.revision)
        return [*values, str(cached)]

    def choose(self, best_metric: str, session: Session) -> None:
        """Of a run's folder take the best checkpoint by `best_metric`; a collective.

        Rank 0 chooses for all, and tells of damaged ones.
        """
        if self.checkpoint is None:
            return
        assert session.world is not None
        self.checkpoint = session.world.on_rank_zero(
            lambda: run_folder.find_checkpoint(
                Path(self.name), self.option, best_metric, session.console.warn
            )
        )

    def evaluation_folder(self, config: Config, split: str) -> Path:
        """Where its evaluations lie: in the run that a checkpoint belongs to, else the configured.

        Call it after `choose`.
        """
        from t5_fsdp.checkpoint.format import folder_name, read_state

        run_dir, label = Path(config.run_dir), Path(self.name).name
        if self.checkpoint is not None:
            step = read_state(self.checkpoint).step
            # What is converted has no step.
            label = folder_name(step) if step else self.checkpoint.absolute().name
            if self.checkpoint.parent.name == "checkpoints":
                run_dir = self.checkpoint.parent.parent
        return run_dir / "evaluation" / label / split


@dataclass
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        generator: a whole model on this rank's device, or one that is sharded over all ranks.
        source: what it was loaded from, for messages.
        prepared: the prepared data of its run.
    """

    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    tokenizer_source: str
    source: str
    prepared: Path | None


def find_model(layers: Layers, own: str, name: str, *, needs_config: bool = True) -> FoundModel:
    """Tell our checkpoints and run folders from Hugging Face folders and Hub ids.

    Args:
        own: the option that names it.
        needs_config: refuse a model that says nothing about data and generation, where --config
            does not either.

    Raises:
        UserError: a folder that is none of these, an adapter without its base, --config is missing
            for a model that was not exported here, or another --model option than a checkpoint has.
    """
    from t5_fsdp.checkpoint.exported_options import exported_options
    from t5_fsdp.checkpoint.format import step_of

    option = layers.dashes + own
    folder = Path(name)
    is_hf = (folder / "config.json").is_file()
    if (folder / "adapter_config.json").is_file() and not is_hf:
        raise UserError(
            f"{option} {name} holds a PEFT adapter alone; give the checkpoint that it was exported "
            "from, or export that as a whole (--format hf)"
        )
    ours = step_of(folder) is not None or (folder / "checkpoints").is_dir()
    if ours or (not is_hf and (folder.exists() or looks_like_path(name))):
        checkpoint = run_folder.find_checkpoint(folder, option)
        base = run_folder.read_config_dict(checkpoint)
        _check_model_flags(layers, base.get("model", {}), checkpoint)
        return FoundModel(name, option, checkpoint, base)
    base = dict(exported_options(folder))
    if needs_config and not layers.files and not base:
        what = (
            "a Hugging Face folder" if is_hf else "no folder here, so a Hub id or a misspelt path"
        )
        raise UserError(
            f"{option} {name} is {what}; with one that was not exported here give "
            f"{layers.config_argument} too, for the data and the generation settings"
        )
    return FoundModel(name, option, None, base)


def _check_model_flags(layers: Layers, stored: dict[str, Any], checkpoint: Path) -> None:
    """Raises UserError for a model option that the checkpoint's model can't follow.

    Its weights are what they are: the answer would be about another model than was asked for.
    """
    flags = layers.flags.get("model")
    if not isinstance(flags, dict):  # told with what else is wrong
        return
    problems = [
        f"{layers.dashes}model.{name} {value} can't be given with {checkpoint}, which was trained "
        f"with {stored[name]}; leave it out"
        for name, value in flags.items()
        if name != "attention" and name in stored and stored[name] != value
    ]
    if problems:
        raise UserError(*problems)


def load_model(found: FoundModel, config: Config, world: World, console: Console) -> LoadedModel:
    """Read the weights, in the precision to compute in, sharded where they don't fit; a collective.

    Raises:
        UserError: damaged, not readable, or not a model for summaries.
    """
    from t5_fsdp.cli.generator import generates_sharded, shard_for_generation
    from t5_fsdp.evaluation.evaluate import Generator
    from t5_fsdp.model.build import build_with_weights
    from t5_fsdp.parallel.common import DTYPES
    from t5_fsdp.parallel.precision import use_tf32

    use_tf32(config.parallel.tf32, world.device)
    opened = _open(found, config)
    if generates_sharded(opened.spec, config, world, console):
        generator = shard_for_generation(opened.spec, opened.weights, config, world)
    else:
        dtype = DTYPES[config.parallel.param_dtype]
        cast = {
            name: tensor.to(device=world.device, dtype=dtype)
            for name, tensor in opened.weights.items()
        }
        generator = Generator.whole(build_with_weights(opened.spec, cast, config.model.attention))
    return LoadedModel(
        generator=generator,
        tokenizer=opened.tokenizer,
        tokenizer_source=opened.tokenizer_source,
        source=found.name if found.checkpoint is None else str(found.checkpoint),
        prepared=opened.prepared,
    )


@dataclass
class _Opened:
    """A model whose weights are read when they are asked for."""

    spec: ModelSpec
    weights: Mapping[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerBase
    tokenizer_source: str
    prepared: Path | None


def _open(found: FoundModel, config: Config) -> _Opened:
    from t5_fsdp.checkpoint.format import TOKENIZER, read_state
    from t5_fsdp.checkpoint.stored_weights import StoredWeights
    from t5_fsdp.data.tokenization import load_tokenizer
    from t5_fsdp.model.configuration import check_positions, resolve_spec
    from t5_fsdp.model.pretrained import open_pretrained

    weights: Mapping[str, torch.Tensor]
    if found.checkpoint is not None:
        state = read_state(found.checkpoint)
        tokenizer_source, prepared = str(found.checkpoint / TOKENIZER), Path(state.prepared)
        tokenizer = load_tokenizer(tokenizer_source)
        spec, weights = state.spec, StoredWeights(found.checkpoint)
    else:
        options = hub_options(found.name, config)
        tokenizer_source, prepared = found.name, None
        tokenizer = load_tokenizer(tokenizer_source, options.revision, option=found.option)
        spec = resolve_spec(options, tokenizer)
        opened = open_pretrained(options, spec)
        weights, spec.own_head = opened.tensors, opened.own_head
    check_positions(
        spec.config,
        {
            "data.max_source_tokens": config.data.max_source_tokens,
            "evaluation.max_new_tokens": config.evaluation.max_new_tokens,
        },
    )
    return _Opened(spec, weights, tokenizer, tokenizer_source, prepared)


def hub_options(name: str, config: Config) -> ModelConfig:
    """The model options for a Hugging Face folder or Hub id."""
    options = ModelConfig(name=name, attention=config.model.attention)
    if name == config.model.name:
        # The recipe's own model; another one has its own revisions and shape.
        options.revision, options.config = config.model.revision, config.model.config
    return options
