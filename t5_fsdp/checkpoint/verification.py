"""Whether an exported folder, read by transformers, computes what the checkpoint does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from t5_fsdp.checkpoint.format import read_state
from t5_fsdp.checkpoint.stored_weights import read_weights
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import build_with_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference of logits, relative to the largest logit, that rounding the weights may make.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
_SOURCE_SHAPE, _TARGET_SHAPE = (4, 24), (4, 12)  # within the positions of the smallest BART


class VerificationError(Exception):
    """An export is not what was exported."""


@dataclass(frozen=True)
class Verification:
    """Logits of both models on the same seeded batch, computed in float32.

    Attributes:
        difference: the largest one.
        largest: the largest logit of the checkpoint's model.
        tolerance: of the difference.
    """

    difference: float
    largest: float
    tolerance: float


def verify(checkpoint: Path, folder: Path, dtype: str) -> Verification:
    """Read the folder with transformers and compare; one model is in memory at a time.

    Args:
        checkpoint: what was exported.
        dtype: of the folder's weights.

    Raises:
        UserError: rounding to `dtype` changes the logits by more than `TOLERANCE`.
        VerificationError: the folder lacks weights, or float32 ones compute something else.
    """
    expected = _checkpoint_logits(checkpoint)
    found = _folder_logits(folder)
    largest = float(expected.abs().max())
    result = Verification(
        difference=float((found - expected).abs().max()),
        largest=largest,
        tolerance=TOLERANCE[dtype] * largest,
    )
    if not result.difference <= result.tolerance:  # NaN included
        text = (
            f"the exported model's logits differ by {result.difference:.3g} from the checkpoint's, "
            f"whose largest is {largest:.3g}; allowed for {dtype} are {result.tolerance:.3g}"
        )
        if dtype == "fp32":
            raise VerificationError(text)
        raise UserError(f"{text}; give --dtype fp32, or leave out --verify")
    return result


def _checkpoint_logits(checkpoint: Path) -> torch.Tensor:
    return _logits(build_with_weights(read_state(checkpoint).spec, read_weights(checkpoint)))


def _folder_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForSeq2SeqLM

    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(what):
            raise VerificationError(f"{folder} has {what}: {sorted(map(str, report[what]))[:3]}")
    return _logits(model)


def _logits(model: PreTrainedModel) -> torch.Tensor:
    """Of random token ids, the last row's source half padding: [batch, target, vocab]."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(0, vocab, shape, generator=generator)

    mask = torch.ones(_SOURCE_SHAPE, dtype=torch.int64)
    mask[-1, _SOURCE_SHAPE[1] // 2 :] = 0
    with torch.no_grad():
        return model.eval()(
            input_ids=draw(_SOURCE_SHAPE),
            attention_mask=mask,
            decoder_input_ids=draw(_TARGET_SHAPE),
            use_cache=False,
        ).logits
