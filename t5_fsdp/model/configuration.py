"""What model the options ask for: its transformers configuration, checked; reads no weights."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from t5_fsdp.config import ModelConfig
from t5_fsdp.data.batch_division import round_up
from t5_fsdp.errors import UserError
from t5_fsdp.files import not_a_folder
from t5_fsdp.model import attention as attention_module
from t5_fsdp.model.adapter import choose_adapter
from t5_fsdp.model.build import SHAPE_OPTIONS, ModelSpec, build_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB_MULTIPLE = 128  # tensor cores like it, and T5's own 32,128 is one


class Vocabulary(Protocol):
    """What a model's configuration takes from a tokenizer; transformers' are such ones."""

    @property
    def pad_token_id(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    def __len__(self) -> int: ...


def resolve_spec(
    options: ModelConfig, tokenizer: Vocabulary, stored: ModelSpec | None = None
) -> ModelSpec:
    """The model that the options ask for, checked against the tokenizer; reads no weights.

    `own_head` is what the configuration says (`tie_word_embeddings: false`; mT5 and umT5 always
    have one); for pretrained weights `pretrained.open_pretrained` finds out and corrects it.

    Args:
        stored: what `options.config` overrides instead of `options.name`: a checkpoint's model.

    Raises:
        UserError: unknown or ill-typed names in `model.config`, a folder or Hub id that can't be
            read, no T5-like model, a vocabulary smaller than the tokenizer's, or an adapter for
            layers that the model lacks.
    """
    raw: dict[str, Any] = {}
    if stored is not None:
        raw = stored.config.to_dict()
    elif options.name is not None:
        raw = _read_raw_config(options.name, options.revision)
    overrides = dict(options.config)
    model_type = overrides.pop("model_type", raw.get("model_type", "t5"))
    defaults = _tokenizer_defaults(tokenizer, model_type)
    if raw:
        defaults.pop("vocab_size")  # the embedding's rows are those of the named model
    values = {**defaults, **raw, **overrides}
    values.pop("model_type", None)
    config = _make_config(model_type, values, set(overrides))
    own_head = _says_own_head(model_type, values)
    if stored is not None and not {"tie_word_embeddings", "scale_decoder_outputs"} & set(overrides):
        own_head = stored.own_head
    if config.vocab_size < len(tokenizer):
        raise UserError(
            f"the model has vocab_size {config.vocab_size} but the tokenizer {len(tokenizer)} "
            "tokens; use the model's own tokenizer (model.tokenizer: null) or raise "
            "model.config.vocab_size (with model.init: random)"
        )
    spec = ModelSpec(config=config, own_head=own_head)
    if options.adapter is not None:
        with _refused_when_it_fails():
            plain = build_on_meta(spec)
        spec.adapter = choose_adapter(options, plain)
    return spec


def _says_own_head(model_type: str, values: dict[str, Any]) -> bool:
    tied = values.get("tie_word_embeddings")
    if tied is None and model_type in ("mt5", "umt5"):
        return True
    # transformers >= 5.17 stores T5 v1.1's own head under the second name.
    return tied is False or values.get("scale_decoder_outputs") is False


def _tokenizer_defaults(tokenizer: Vocabulary, model_type: str) -> dict[str, Any]:
    size, end = len(tokenizer), tokenizer.eos_token_id
    values = {
        "vocab_size": round_up(size, VOCAB_MULTIPLE),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": end,
        # T5 and Pegasus start decoding with the padding token.
        "decoder_start_token_id": tokenizer.pad_token_id,
    }
    # Ids of a family's own vocabulary (BART's 2) mean other tokens in this one.
    family = _family_defaults(model_type)
    if family.get("forced_eos_token_id") is not None:
        values["forced_eos_token_id"] = end
    start = family.get("decoder_start_token_id")
    if start is not None and start == family.get("eos_token_id"):
        values["decoder_start_token_id"] = end
    return values


def _family_defaults(model_type: str) -> dict[str, Any]:
    """What transformers' configuration class of a model type says; {} for an unknown type."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type).to_dict()
    except (ValueError, KeyError):
        return {}


def _read_raw_config(name: str, revision: str | None) -> dict[str, Any]:
    from transformers import PretrainedConfig

    folder = Path(name)
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise UserError(f"model.name: {not_a_folder(name)}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        if (folder / "checkpoints").is_dir():
            raise UserError(
                f"model.name: {name} is a run's folder; give one of its checkpoints, "
                f"{folder / 'checkpoints'}/step-..."
            )
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"model.name: {name} holds a PEFT adapter alone; give the model that it belongs "
                "to, or the checkpoint that it was exported from"
            )
        raise UserError(
            f"model.name: {name} has no config.json; give a Hugging Face folder, a Hub id or a "
            "checkpoint folder of this program"
        )
    try:
        # The file as it is: the configuration class would drop tie_word_embeddings.
        raw, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except json.JSONDecodeError as error:
        raise UserError(f"model.name: {name}: config.json is no JSON ({error})") from None
    except (OSError, ValueError) as error:
        raise unreadable_name(name, error) from None
    if not raw:
        raise unreadable_name(name, OSError("no config.json found"))
    if not isinstance(raw, dict):
        raise UserError(
            f"model.name: {name}: config.json holds no configuration but a {type(raw).__name__}"
        )
    return raw


def unreadable_name(name: str, error: Exception) -> UserError:
    """The error for a `model.name` that leads nowhere."""
    reason = str(error).strip().split("\n")[0][:200]
    return UserError(
        f"model.name: {name} is neither a folder here nor readable from the Hugging Face Hub "
        f"({reason}); check the name and the network, or give a folder with the model in it"
    )


def check_overrides(options: ModelConfig) -> None:
    """Check `options.config` as far as that takes neither a tokenizer, thus data, nor weights.

    A name that leads nowhere is left to `resolve_spec`: a run that goes on may do without it.

    Raises:
        UserError: unknown or ill-typed names in `model.config`, or values that make no model.
    """
    if not options.config:
        return
    raw: dict[str, Any] = {}
    if options.name is not None:
        try:
            raw = _read_raw_config(options.name, options.revision)
        except UserError:
            return
    values = {**raw, **options.config}
    _make_config(values.pop("model_type", "t5"), values, set(options.config) - {"model_type"})


def _check_names_and_types(model_type: str, values: dict[str, Any], chosen: set[str]) -> None:
    from transformers import AutoConfig

    known = set(_family_defaults(model_type))
    if not known:
        raise UserError(
            f"model.config.model_type: {model_type} is unknown to the installed transformers; "
            "use t5, mt5, umt5, bart or pegasus"
        )
    known |= {"decoder_start_token_id"}
    problems = []
    for name in sorted(chosen - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"model.config.{name} is no option of a {model_type} model{hint}")
    if problems:
        raise UserError(*problems)
    problems = _type_problems(AutoConfig.for_model(model_type), values, chosen)
    if problems:
        raise UserError(*problems)


def _make_config(model_type: str, values: dict[str, Any], chosen: set[str]) -> PretrainedConfig:
    from transformers import AutoConfig

    _check_names_and_types(model_type, values, chosen)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # the type is huggingface_hub's own and moved between releases
        reason = " ".join(str(error).split())
        raise UserError(f"model.config has a value that {model_type} refuses: {reason}") from None
    if not config.is_encoder_decoder:
        raise UserError(f"a {model_type} model has no encoder and decoder; use a T5")
    for name in SHAPE_OPTIONS:
        value = getattr(config, name, 1)
        if isinstance(value, int) and value < 1:
            raise UserError(f"model.config.{name} is {getattr(config, name)}; it must be 1 or more")
    return config


# Options of transformers that change what a forward returns, which this program relies on.
_OUTPUT_OPTIONS = ("return_dict", "output_attentions", "output_hidden_states", "use_cache")


def _type_problems(
    defaults: PretrainedConfig, values: dict[str, Any], chosen: set[str]
) -> list[str]:
    """Values of another type than the option's default has, and options that are not free."""
    problems = []
    for name in sorted(chosen):
        value, default = values[name], getattr(defaults, name, None)
        if name in _OUTPUT_OPTIONS:
            problems.append(f"model.config.{name} can't be chosen; leave it out")
        kinds: tuple[type, ...] = (type(default),)
        if isinstance(default, float):
            kinds = (float, int)
        wrong = not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool)
        if name in ("tie_word_embeddings", "scale_decoder_outputs"):
            default, wrong = False, not isinstance(value, bool)
        if default is not None and wrong:
            wanted = {int: "whole number", float: "number", bool: "true or false", str: "text"}
            kind = wanted.get(type(default), type(default).__name__)
            problems.append(f"model.config.{name} is {value!r}; it must be a {kind}")
    return problems


def check_positions(config: PretrainedConfig, lengths: dict[str, int], multiple: int = 1) -> None:
    """Refuse lengths for which the model has no positions; a T5's are relative, without an end.

    Args:
        lengths: the most tokens that the model will be given, by the option that says so.
        multiple: of which they are multiples, where they are rounded up.

    Raises:
        UserError: naming each option that is too large.
    """
    if "max_position_embeddings" not in _family_defaults(config.model_type):
        return
    limit = config.max_position_embeddings
    fits = limit // multiple * multiple
    problems = [
        f"{name} is {length}, but this {config.model_type} has positions for {limit} tokens "
        f"(max_position_embeddings); set it to {fits} or less"
        for name, length in lengths.items()
        if length > limit
    ]
    if problems:
        raise UserError(*problems)


def check_model(spec: ModelSpec, attention: str) -> None:
    """Send a forward pass through the model on the meta device.

    Raises:
        UserError: the configuration makes no working model, or one of its special tokens is none
            of its vocabulary.
    """
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(spec.config, name, None)
        if not isinstance(value, int) or not 0 <= value < spec.config.vocab_size:
            raise UserError(
                f"model.config.{name} is {value}; it must be a token below vocab_size "
                f"{spec.config.vocab_size}"
            )
    with _refused_when_it_fails():
        model = build_on_meta(spec, attention)
        if attention_module.implementation(spec.config.model_type, attention) == "sdpa":
            # transformers' masks for sdpa look at values, which meta has not.
            model = build_on_meta(spec, "eager")
        ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
        model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits  # noqa: B018


@contextlib.contextmanager
def _refused_when_it_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a value can upset
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"model.config makes no working model: {reason}") from None
