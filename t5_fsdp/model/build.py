"""The T5 itself: a model without memory, its weights, and whether it owns its output head.

Every rank builds the model without memory (meta device); rank 0 alone reads or draws the weights,
and the engine hands each rank its shard. Weights are float32 whatever the file holds.

transformers says of every T5 that its head is tied to the embedding and finds out only while
reading a checkpoint that the two differ (T5 v1.1, Flan-T5, mT5, umT5). A model built from the
configuration alone would tie them by accident, so here that fact is read off the weights, kept in
`ModelSpec.own_head` and applied to every model we build.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from t5_fsdp.errors import UserError
from t5_fsdp.model import attention as attention_module
from t5_fsdp.model.adapter import AdaptedWeights, LoraAdapter, MergedWeights, inject
from t5_fsdp.seeding import seed_torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

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


# What decides about the shapes of the weights: T5's names, then BART's and Pegasus'.
SHAPE_OPTIONS = (
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "vocab_size",
    "feed_forward_proj", "relative_attention_num_buckets",
    "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings",
)  # fmt: skip


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
