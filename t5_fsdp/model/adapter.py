"""LoRA: a frozen model, and trained pairs of low-rank matrices beside its linear layers.

A layer with the weight W computes W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]
(Hu et al. 2021, arXiv:2106.09685). peft puts the pairs into the model in place: it stays a T5, and
a layer's own weight is called `base_layer.weight` from then on.

Weights are renamed, merged and drawn one tensor at a time, so that a large model is never copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from t5_fsdp.config import ALL_LINEAR, ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.seeding import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

# peft's names of a pair, below the layer's own; "default" is what it calls an only adapter.
_DOWN, _UP = "lora_A.default", "lora_B.default"
_BASE = "base_layer"


@dataclass
class LoraAdapter:
    """What it takes to put the same pairs into a model again.

    Attributes:
        targets: ends of the names of the layers that get one, sorted.
    """

    rank: int
    alpha: float
    dropout: float
    targets: list[str]

    @property
    def scale(self) -> float:
        """How often B A counts."""
        return self.alpha / self.rank

    def to_json(self) -> dict[str, Any]:
        """As stored in a checkpoint."""
        return {"type": "lora", **asdict(self)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> LoraAdapter:
        """The reverse of `to_json`."""
        return cls(**{name: value for name, value in stored.items() if name != "type"})

    def peft_config(self, **more: Any) -> LoraConfig:
        """The same for peft."""
        from peft import LoraConfig  # takes seconds, which a model without adapter need not pay

        return LoraConfig(
            r=self.rank,
            lora_alpha=int(self.alpha) if float(self.alpha).is_integer() else self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=list(self.targets),
            task_type="SEQ_2_SEQ_LM",
            **more,
        )


def choose_adapter(options: ModelConfig, model: PreTrainedModel) -> LoraAdapter | None:
    """The adapter that the options ask for, its targets checked against the model.

    Args:
        model: without adapter, e.g. on the meta device.

    Raises:
        UserError: a target is no linear layer, or is the embedding or the output head.
    """
    if options.adapter is None:
        return None
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    linear = {name for name, m in modules.items() if isinstance(m, nn.Linear) and m is not head}
    known = sorted({name.rpartition(".")[2] for name in linear})
    targets = known
    if options.lora_targets != ALL_LINEAR:
        asked = options.lora_targets
        targets = sorted({asked} if isinstance(asked, str) else set(asked))
    problems = []
    for target in targets:
        found = {name for name in modules if name == target or name.endswith(f".{target}")}
        if found and found <= linear:
            continue
        why = "is no linear layer of this model"
        if any(modules[name] is head or isinstance(modules[name], nn.Embedding) for name in found):
            why = "is an embedding or the output head, which get no adapter"
        problems.append(f"model.lora_targets: {target} {why}; there are {', '.join(known)}")
    if problems:
        raise UserError(*problems)
    return LoraAdapter(options.lora_rank, options.lora_alpha, options.lora_dropout, targets)


def inject(model: nn.Module, adapter: LoraAdapter) -> None:
    """Put the pairs into a model, in place; they alone require gradients from then on."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    inject_adapter_in_model(adapter.peft_config(), model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # It would be to the dtype of A, which under FSDP1 is float32 until A is gathered.
            module.cast_input_dtype_enabled = False


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of a pair."""
    return f".{_DOWN}." in name or f".{_UP}." in name


def draw_adapter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """First float32 value of a pair's matrix, a function of (seed, name); the product is 0.

    A is uniform in +-1 / sqrt(in), B zero, as peft and the paper's authors have it.
    """
    weight = torch.zeros(shape)
    if f".{_DOWN}." in name:
        generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", name))
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    return weight


class AdaptedWeights(Mapping[str, torch.Tensor]):
    """A model's weights under the names that they have beside an adapter, and its first values.

    Args:
        base: the model's weights without adapter; read when asked for.
        model: with the adapter, on the meta device.
        seed: what A is drawn from.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], model: nn.Module, seed: int) -> None:
        self._base, self._seed = base, seed
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        renamed = {_plain_name(name): name for name in shapes if not is_adapter(name)}
        # What the model lacks keeps its name, and is refused where the weights are loaded.
        self._plain = {renamed.get(name, name): name for name in base}
        self._pairs = {name: shape for name, shape in shapes.items() if is_adapter(name)}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._pairs:
            return draw_adapter(name, self._pairs[name], self._seed)
        return self._base[self._plain[name]]

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._pairs

    def __len__(self) -> int:
        return len(self._plain) + len(self._pairs)


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of the plain model that computes the same: W + (alpha / rank) B A.

    Args:
        weights: with adapter; read when asked for.
        adapter: theirs.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], adapter: LoraAdapter) -> None:
        self._weights, self._scale = weights, adapter.scale
        self._adapted = {_plain_name(name): name for name in weights if not is_adapter(name)}
        self._pairs = {name for name in weights if is_adapter(name)}

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[self._adapted[name]]
        layer = name.removesuffix(".weight")
        down, up = f"{layer}.{_DOWN}.weight", f"{layer}.{_UP}.weight"
        if up not in self._pairs:
            return weight
        return weight + (self._weights[up] @ self._weights[down]) * self._scale

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapted)

    def __len__(self) -> int:
        return len(self._adapted)


def _plain_name(name: str) -> str:
    """A parameter's name in the model without adapter."""
    return name.replace(f".{_BASE}.", ".")


def peft_state_dict(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The pairs alone, under the names that peft writes into a file."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": weights[name].contiguous()
        for name in weights
        if is_adapter(name)
    }
