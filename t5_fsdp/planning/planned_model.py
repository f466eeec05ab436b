"""Which model a configuration names, without weights, tokenizer download or network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from t5_fsdp.checkpoint.format import is_checkpoint, read_state
from t5_fsdp.config import ModelConfig
from t5_fsdp.data.tokenization import TRAIN_TOKENIZER, load_tokenizer
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import ModelSpec
from t5_fsdp.model.configuration import resolve_spec
from t5_fsdp.model.known_shapes import known_config, known_models


@dataclass(frozen=True)
class KnownVocabulary:
    """What a model's shape needs of a tokenizer."""

    size: int
    pad_token_id: int = 0
    eos_token_id: int = 1

    def __len__(self) -> int:
        return self.size


def planned_spec(options: ModelConfig) -> ModelSpec:
    """The model that `options` ask for.

    Published T5s are known (`model.known_shapes`); a folder's config.json or a checkpoint of ours
    is read; any other Hub id is asked for its config.json.

    Raises:
        UserError: the model's options are wrong, or its configuration is not to be had.
    """
    name = options.name
    if name is None:
        return resolve_spec(options, _vocabulary(options))
    known = None if Path(name).is_dir() else known_config(name)
    if known is not None:
        own_head = not known["tie_word_embeddings"]
        return resolve_spec(options, KnownVocabulary(1), stored=_as_spec(known, own_head))
    if is_checkpoint(Path(name)):
        return resolve_spec(options, KnownVocabulary(1), stored=read_state(Path(name)).spec)
    try:
        return resolve_spec(options, KnownVocabulary(1))
    except UserError as error:
        if Path(name).exists() or "readable from the Hugging Face Hub" not in str(error):
            raise
        raise UserError(
            f"{error.problems[0]}; without a network these are known: {', '.join(known_models())}"
        ) from None


def _as_spec(values: dict[str, object], own_head: bool) -> ModelSpec:
    return ModelSpec.from_json({"config": values, "own_head": own_head})


def _vocabulary(options: ModelConfig) -> KnownVocabulary:
    """The tokenizer's size, of which a model without a name takes its vocabulary."""
    given = options.config.get("vocab_size")
    if isinstance(given, int) and not isinstance(given, bool):
        return KnownVocabulary(1)
    name = options.tokenizer or ""
    if name == TRAIN_TOKENIZER:
        return KnownVocabulary(options.tokenizer_vocab_size)
    known = None if Path(name).is_dir() else known_config(name)
    if known is not None:
        return KnownVocabulary(known["vocab_size"])
    return KnownVocabulary(len(load_tokenizer(name)))
