"""What all contestants of a comparison are given: model, token ids, batch size, precision."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5_fsdp.config import COMPILED_WIDTH_MULTIPLE
from t5_fsdp.data.tokenized import TokenizedSplit, flatten
from t5_fsdp.errors import UserError
from t5_fsdp.seeding import derive_seed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from t5_fsdp.data.collation import SpecialIds
    from t5_fsdp.model.build import ModelSpec

PAD, END = 0, 1  # T5's
PREFIX = "summarize: "
_FIRST_WORD = 3  # behind pad, end and unknown


@dataclass(frozen=True)
class Examples:
    """Sources and targets as token ids, end marks included; travels to the ranks by pickle.

    Attributes:
        sources, targets: (values int32 [tokens], offsets int32 [examples + 1]).
    """

    sources: tuple[np.ndarray, np.ndarray]
    targets: tuple[np.ndarray, np.ndarray]

    def __len__(self) -> int:
        return len(self.sources[1]) - 1

    def split(self) -> TokenizedSplit:
        """As training reads them."""
        return TokenizedSplit.from_ids(
            [ids.tolist() for ids in _rows(self.sources)],
            [ids.tolist() for ids in _rows(self.targets)],
        )

    def rows(self) -> list[dict[str, list[int]]]:
        """As transformers' collators read them."""
        pairs = zip(_rows(self.sources), _rows(self.targets), strict=True)
        return [
            {"input_ids": source.tolist(), "labels": target.tolist()} for source, target in pairs
        ]


def _rows(part: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    values, offsets = part
    return np.split(values, offsets[1:-1])


@dataclass(frozen=True)
class Workload:
    """See the module.

    Attributes:
        model: values of a T5's configuration; vocab_size among them.
        examples: what is trained on.
        global_batch_size: examples in an optimizer step, over all ranks.
        micro_batch_tokens: most padded tokens on one device at a time; `ours` and `bare`.
        max_source_tokens, max_target_tokens: to which the tutorial pads everything.
        param_dtype: bf16 or fp32, of the computation; weights are float32.
        activation_checkpointing: none, selective or full.
        device: cpu or cuda.
        seed: of weights, order and dropout.
        log_every: steps between the rows that `ours` writes.
        parallel, attention: further options of `ours`.
    """

    model: dict[str, Any]
    examples: Examples
    global_batch_size: int
    micro_batch_tokens: int
    max_source_tokens: int
    max_target_tokens: int
    param_dtype: str = "bf16"
    activation_checkpointing: str = "none"
    device: str = "cpu"
    seed: int = 1
    log_every: int = 10
    learning_rate: float = 1e-4
    parallel: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"

    def spec(self) -> ModelSpec:
        """The model, with its head tied unless the configuration says otherwise."""
        from transformers import AutoConfig

        from t5_fsdp.model.build import ModelSpec

        special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
        config = AutoConfig.for_model("t5", **special, **self.model)
        return ModelSpec(config, own_head=self.model.get("tie_word_embeddings") is False)

    @property
    def width_multiple(self) -> int:
        """As `config.width_multiple` chooses it."""
        return COMPILED_WIDTH_MULTIPLE if self.parallel.get("compile") else 1

    def check_micro_batch(self) -> None:
        """Raises UserError where an example alone has more than `micro_batch_tokens`."""
        sources, targets = (np.diff(p[1]) for p in (self.examples.sources, self.examples.targets))
        longest = int((sources + targets).max())
        if longest > self.micro_batch_tokens:
            raise UserError(
                f"--micro_batch_tokens is {self.micro_batch_tokens}, but an example has {longest} "
                f"tokens; raise it to {longest}, or lower --max_source_tokens or "
                "--max_target_tokens"
            )

    def special(self) -> SpecialIds:
        """Ids for collation."""
        from t5_fsdp.data.collation import SpecialIds

        return SpecialIds(pad=PAD, decoder_start=PAD)

    def plain_model(self, device: torch.device) -> Any:
        """transformers' own model with `sdpa`, with the weights that `ours` begins with.

        It learns in float32 and recomputes what the workload says.
        """
        from t5_fsdp.model.build import build_with_weights

        model: Any = build_with_weights(self.spec(), self.weights(device), "sdpa_per_layer")
        model.to(device)
        if self.activation_checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The random weights of all contestants, on `device`.

        For GPUs they are drawn on one, which is a hundred times faster: see `random_weight`.
        """
        from t5_fsdp.model.build import build_on_meta, draw_weights, unique_state_dict

        if self.device == "cpu":
            return draw_weights(self.spec(), self.seed)
        import torch

        drawn_on = torch.device(self.device)
        return {
            name: random_weight(name, weight.shape, self.seed, drawn_on).to(device)
            for name, weight in unique_state_dict(build_on_meta(self.spec())).items()
        }


def random_weight(
    name: str, shape: torch.Size, seed: int, device: torch.device | str
) -> torch.Tensor:
    """A whole weight of a T5, with values of about the size that transformers draws.

    A function of these alone, so that ranks of one kind of GPU draw the same without talking.
    """
    import torch

    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "benchmark", name))
    is_table = "shared" in name or "relative_attention_bias" in name
    std = 1.0 if is_table else 0.5 * shape[1] ** -0.5
    return torch.empty(shape, device=device).normal_(std=std, generator=generator)


def random_examples(
    count: int,
    vocab: int,
    *,
    source_tokens: int,
    target_tokens: int,
    max_source_tokens: int,
    max_target_tokens: int,
    seed: int,
    fixed: bool = False,
) -> Examples:
    """Random ids; lengths log-normal round their mean, as those of texts, or all the same.

    Args:
        source_tokens, target_tokens: mean lengths; with `fixed` all of them.
        max_source_tokens, max_target_tokens: longer ones are cut.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for mean, longest in ((source_tokens, max_source_tokens), (target_tokens, max_target_tokens)):
        lengths = np.full(count, mean)
        if not fixed:
            spread = 0.6
            lengths = rng.lognormal(math.log(mean) - spread**2 / 2, spread, count).astype(int)
        lengths = np.clip(lengths, 2, longest)
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values = rng.integers(_FIRST_WORD, vocab, offsets[-1], dtype=np.int32)
        values[offsets[1:] - 1] = END
        parts.append((values, offsets))
    return Examples(parts[0], parts[1])


def load_fitting_tokenizer(name: str, vocab: int) -> PreTrainedTokenizerBase:
    """As `load_tokenizer`.

    Args:
        vocab: the model's vocab_size.

    Raises:
        UserError: there is no such tokenizer, or it has more tokens than the model.
    """
    from t5_fsdp.data.tokenization import load_tokenizer

    tokenizer = load_tokenizer(name)
    if len(tokenizer) > vocab:
        raise UserError(
            f"--tokenizer {name} has {len(tokenizer)} tokens, but the model's vocab_size is "
            f"{vocab}; give --model_config '{{\"vocab_size\": {len(tokenizer)}}}'"
        )
    return tokenizer


def read_examples(
    texts: Path, tokenizer: str, vocab: int, *, max_source_tokens: int, max_target_tokens: int
) -> Examples:
    """The pairs of a jsonl file with `document` and `summary`, tokenized with T5's prefix.

    Args:
        vocab: the model's vocab_size.

    Raises:
        UserError: the file can't be read, a line has not the two texts, or the tokenizer does not
            fit the model.
    """
    from t5_fsdp.data.tokenization import Encoder, with_prefix

    encoder = Encoder(load_fitting_tokenizer(tokenizer, vocab))
    rows = read_pairs(texts)
    sources = encoder.encode([with_prefix(row["document"], PREFIX) for row in rows])
    targets = encoder.encode([row["summary"] for row in rows])
    return Examples(
        flatten([encoder.cut(ids, max_source_tokens) for ids in sources]),
        flatten([encoder.cut(ids, max_target_tokens) for ids in targets]),
    )


def read_pairs(
    path: Path, option: str = "--texts", limit: int | None = None
) -> list[dict[str, str]]:
    """Rows with `document` and `summary`.

    Raises:
        UserError: the file can't be read, or a line has not the two texts.
    """
    rows: list[dict[str, str]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and number > limit:
                    break
                row = json.loads(line)
                rows.append({name: _text(row[name]) for name in ("document", "summary")})
    except OSError as error:
        raise UserError(
            f"{option} {path} can't be read ({error.strerror}); give a jsonl file"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{option} {path}, line {len(rows) + 1}: each line must be a JSON object with texts "
            "'document' and 'summary' that are not empty; mend or delete it"
        ) from None
    if not rows:
        raise UserError(f"{option} {path} is empty; give a jsonl file with a pair a line")
    return rows


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def mean_lengths(examples: Examples) -> tuple[float, float]:
    """Tokens of a source and of a target in the mean."""
    source, target = (len(part[0]) / len(examples) for part in (examples.sources, examples.targets))
    return source, target
