"""The T5 itself: its configuration, its weights, and whether it owns its output head.

Every rank builds the model without memory (meta device); rank 0 alone reads or draws the weights,
and the engine hands each rank its shard. Weights are float32 whatever the file holds.

transformers says of every T5 that its head is tied to the embedding and finds out only while
reading a checkpoint that the two differ (T5 v1.1, Flan-T5, mT5, umT5). A model built from the
configuration alone would tie them by accident, so here that fact is read off the weights, kept in
`ModelSpec.own_head` and applied to every model we build.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from t5_fsdp.config import ModelConfig
from t5_fsdp.data.batch_division import round_up
from t5_fsdp.errors import UserError
from t5_fsdp.files import not_a_folder
from t5_fsdp.model import attention as attention_module
from t5_fsdp.model.adapter import (
    AdaptedWeights,
    LoraAdapter,
    MergedWeights,
    choose_adapter,
    inject,
)
from t5_fsdp.seeding import seed_torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCAB_MULTIPLE = 128  # tensor cores like it, and T5's own 32,128 is one
HEAD = "lm_head.weight"
StateDict = dict[str, torch.Tensor]
Weights = Mapping[str, torch.Tensor]  # read one at a time, when asked for


@dataclass
class ModelSpec:
    """All that is needed to build the same model again, without its weights.

    Attributes:
        config: the transformers configuration.
        own_head: the output head is a weight of its own, not the embedding.
        adapter: what trains instead of the model, or None.
    """

    config: PretrainedConfig
    own_head: bool
    adapter: LoraAdapter | None = None

    def to_json(self) -> dict[str, Any]:
        """As stored in a checkpoint."""
        return {
            "own_head": self.own_head,
            "config": self.config.to_dict(),
            "adapter": None if self.adapter is None else self.adapter.to_json(),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> ModelSpec:
        """The reverse of `to_json`."""
        from transformers import AutoConfig

        values = dict(stored["config"])
        adapter = stored.get("adapter")  # not in the first checkpoints
        return cls(
            config=AutoConfig.for_model(values.pop("model_type"), **values),
            own_head=stored["own_head"],
            adapter=None if adapter is None else LoraAdapter.from_json(adapter),
        )

    def shape(self) -> dict[str, Any]:
        """What decides about the weights, by option, the adapter aside; `model_type` first."""
        options = {
            name: getattr(self.config, name, None) for name in ("model_type", *SHAPE_OPTIONS)
        }
        return {**options, "an output head of its own": self.own_head}

    def without_adapter(self) -> ModelSpec:
        """The plain model."""
        return replace(self, adapter=None)


def build_on_meta(spec: ModelSpec, attention: str = "sdpa") -> PreTrainedModel:
    """A float32 model without memory, its head tied or not, with an adapter or not.

    Beside an adapter everything else is frozen (`requires_grad` False).
    """
    from transformers import AutoModelForSeq2SeqLM

    attention_module.register()
    chosen = attention_module.implementation(spec.config.model_type, attention)
    with torch.device("meta"):
        # A copy: the attention is noted in it, and other models are built from the same.
        model = AutoModelForSeq2SeqLM.from_config(
            copy.deepcopy(spec.config), dtype=torch.float32, attn_implementation=chosen
        )
    attention_module.install(model)
    if spec.own_head:
        _untie_head(model)
    if spec.adapter is not None:
        with torch.device("meta"):
            inject(model, spec.adapter)
    return model


def build_with_weights(
    spec: ModelSpec, weights: Weights, attention: str = "sdpa"
) -> PreTrainedModel:
    """A model that takes over `weights` (names as of `unique_state_dict`), without copying them.

    Raises:
        UserError: names or shapes differ from the model's.
    """
    model = build_on_meta(spec, attention)
    check_names(set(weights), set(unique_state_dict(model)))
    restore_buffers(model)
    groups = shared_names(model)
    try:
        model.load_state_dict(dict(weights), strict=False, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the weights do not fit the model: {reason}") from None
    retie(model, groups)
    return model


def check_names(given: set[str], wanted: set[str]) -> None:
    """Refuse weights that are not exactly the model's: loading would skip the rest silently.

    Raises:
        UserError: naming one missing or surplus tensor.
    """
    missing, surplus = sorted(wanted - given), sorted(given - wanted)
    if missing or surplus:
        what = f"lack {missing[0]}" if missing else f"have {surplus[0]}, which the model lacks"
        raise UserError(
            f"the weights do not fit the model: they {what} "
            f"({len(missing)} missing, {len(surplus)} too many)"
        )


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, the first one first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: list[list[str]]) -> None:
    """Make shared weights one tensor again, after an operation that replaced them one by one.

    Args:
        groups: what `shared_names` said before it.
    """
    for first, *others in groups:
        for other in others:
            parent, _, name = other.rpartition(".")
            setattr(model.get_submodule(parent), name, model.get_parameter(first))


def restore_buffers(model: nn.Module) -> None:
    """Give buffers that no weights file holds their values again, if the meta device took them.

    transformers' models can compute theirs (BERT's position_ids). Values are on the CPU.

    Raises:
        ValueError: another model lost such a buffer; it has to be built on the CPU.
    """
    stored = set(model.state_dict())
    lost: dict[str, list[str]] = {}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in stored:
            owner, _, last = name.rpartition(".")
            lost.setdefault(owner, []).append(last)
    for owner, names in lost.items():
        _compute_buffers(model, owner, names)


def _compute_buffers(model: nn.Module, owner: str, names: list[str]) -> None:
    parts = owner.split(".") if owner else []
    ancestors = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
    # The models within a model know their own buffers; a private method of transformers, which has
    # no public one that leaves the parameters alone.
    knowing: Any = next((module for module in ancestors if hasattr(module, "_init_weights")), None)
    if knowing is None:
        raise ValueError(
            f"the buffer {owner}.{names[0]} is on the meta device and in no state dict, so its "
            "values are lost; build the model on the CPU"
        )
    module = ancestors[0]
    for name in names:
        setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
    with torch.no_grad():
        knowing._init_weights(module)


def _untie_head(model: PreTrainedModel) -> None:
    if has_own_head(model):
        return
    weight = model.get_parameter(HEAD)
    model.get_output_embeddings().weight = nn.Parameter(torch.empty_like(weight))
    # transformers ties again wherever this mapping says so (to_empty, resize, save).
    model.all_tied_weights_keys.pop(HEAD, None)


def has_own_head(model: PreTrainedModel) -> bool:
    """Whether the output head is another tensor than the input embedding."""
    return model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def unique_state_dict(model: nn.Module) -> StateDict:
    """The model's parameters and persistent buffers by name, a shared one once, by its first."""
    stored = set(model.state_dict())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in stored}


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


def check_new_model(options: ModelConfig) -> None:
    """Of a model without `options.name`: what no tokenizer, thus no data, is needed for.

    Raises:
        UserError: unknown or ill-typed names in `model.config`.
    """
    if options.name is None:
        overrides = dict(options.config)
        model_type = overrides.pop("model_type", "t5")
        _check_names_and_types(model_type, overrides, set(overrides))


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


# What decides about the shapes of the weights: T5's names, then BART's and Pegasus'.
SHAPE_OPTIONS = (
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "vocab_size",
    "feed_forward_proj", "relative_attention_num_buckets",
    "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings",
)  # fmt: skip

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


def draw_weights(spec: ModelSpec, seed: int) -> StateDict:
    """Random float32 weights of the plain model on the CPU: a function of (configuration, seed).

    As transformers draws them, except for an own output head: that gets T5X's standard deviation
    d_model ** -0.5 (its logits are not scaled down, unlike those of a tied head), so that the
    first loss is near ln(vocab).
    """
    from transformers import AutoModelForSeq2SeqLM

    with torch.random.fork_rng(devices=[]):
        seed_torch(seed, "weights")
        model = AutoModelForSeq2SeqLM.from_config(spec.config, dtype=torch.float32)
        if spec.own_head:
            _untie_head(model)
            head = model.get_output_embeddings().weight
            nn.init.normal_(head, std=spec.config.d_model**-0.5)
    return unique_state_dict(model)


def fit_adapter(
    weights: Weights, stored: LoraAdapter | None, spec: ModelSpec, seed: int
) -> Weights:
    """Weights for the model `spec`, which may have an adapter that they lack, or the reverse.

    A new adapter is drawn from `seed`; one that is not wanted is merged; an equal one stays.

    Args:
        stored: the adapter among `weights`, of the shape of that of `spec` if both are there.
    """
    if stored is None and spec.adapter is not None:
        return AdaptedWeights(weights, build_on_meta(spec), seed)
    if stored is not None and spec.adapter is None:
        return MergedWeights(weights, stored)
    return weights


def num_parameters(model: nn.Module, trained: bool = False) -> int:
    """Parameters of the whole model, a shared one counted once.

    Args:
        trained: count only those that are not frozen.
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)
