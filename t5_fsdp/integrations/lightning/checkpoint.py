"""What a checkpoint of Lightning's says of its run, and what may go on from it.

Beside Lightning's own entries it holds, as plain values,

    hyper_parameters   what SummarizationModule is made from, for `load_from_checkpoint`
    t5_fsdp            what a run that goes on must have the same, see `Origin`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from t5_fsdp.config import Config, normalize
from t5_fsdp.data.prepared import PreparedData
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import ModelSpec

ORIGIN = "t5_fsdp"


@dataclass(frozen=True)
class Origin:
    """The run that a checkpoint is of.

    Attributes:
        tokenizer_hash: of the tokenizer's vocabulary.
        shape: of the model's weights, by option.
        data_hash: of the training split's token ids, in order.
        plan: the other options that decide which examples a step holds, and the optimizer's name.
    """

    tokenizer_hash: str
    shape: dict[str, Any]
    data_hash: str
    plan: dict[str, Any]

    @classmethod
    def of(
        cls, config: Config, spec: ModelSpec, prepared: PreparedData, tokenizer_hash: str
    ) -> Origin:
        """Of the run that goes on now."""
        return cls(
            tokenizer_hash=tokenizer_hash,
            shape=spec.shape(),
            data_hash=prepared.content_hash["train"],
            plan={
                "seed": config.seed,
                "train.global_batch_size": config.train.global_batch_size,
                "train.batching": config.train.batching,
                "optimizer.name": config.optimizer.name,
            },
        )

    def model_differences(self, now: Origin) -> list[str]:
        """Why these weights are not for the model that the options ask for; one a line."""
        differences = _differences(self.shape, now.shape)
        if self.tokenizer_hash != now.tokenizer_hash:
            differences.insert(
                0,
                f"the tokenizer is {self.tokenizer_hash[:12]} there and "
                f"{now.tokenizer_hash[:12]} now; one that is learned follows the training data",
            )
        return differences

    def run_differences(self, now: Origin) -> list[str]:
        """Why its step says nothing about the steps of the run now, or its optimizer; one a line.

        Batches follow from the number of the step, so they have to be those of its run.
        """
        differences = _differences(self.plan, now.plan)
        if self.data_hash != now.data_hash:
            differences.insert(
                0,
                f"the training data is {self.data_hash[:12]} there and {now.data_hash[:12]} now "
                "(a hash of its token ids)",
            )
        return differences


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {there.get(name)} there and {value} now"
        for name, value in now.items()
        if there.get(name) != value
    ]


def origin_in(checkpoint: Mapping[str, Any], name: object) -> Origin:
    """The origin that a checkpoint names.

    Args:
        name: of the checkpoint, for messages.

    Raises:
        UserError: it names none.
    """
    try:
        return Origin(**checkpoint[ORIGIN])
    except (KeyError, TypeError):
        raise UserError(
            f"{name} does not say what it was trained on, so it is not of a SummarizationModule of "
            "this version; start anew"
        ) from None


def config_from(stored: Config | Mapping[str, Any]) -> Config:
    """A configuration from its plain values, as `config.to_dict` gives them.

    Raises:
        UserError: there is an option that this version does not have.
    """
    if isinstance(stored, Config):
        return stored
    try:
        sections = vars(Config())
        return normalize(
            Config(**{name: _section(sections[name], stored[name]) for name in stored})
        )
    except (KeyError, TypeError) as error:
        raise UserError(
            f"the checkpoint's configuration is of another version ({error}); give one: "
            "SummarizationModule.load_from_checkpoint(FILE, config=config)"
        ) from None


def _section(default: Any, values: Any) -> Any:
    return dataclasses.replace(default, **values) if isinstance(values, dict) else values


def spec_from(stored: ModelSpec | Mapping[str, Any] | None) -> ModelSpec | None:
    """A model's description from its plain values, as `ModelSpec.to_json` gives them."""
    return ModelSpec.from_json(dict(stored)) if isinstance(stored, Mapping) else stored
