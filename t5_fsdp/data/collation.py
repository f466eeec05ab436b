"""From token ids of some examples to the padded tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from t5_fsdp.data.batch_division import round_up

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100  # torch's cross-entropy leaves these positions out


class TokenSource(Protocol):
    """What batching needs of a tokenized split; `tokenized.TokenizedSplit` is one."""

    source_lengths: np.ndarray
    target_lengths: np.ndarray

    def __len__(self) -> int: ...
    def source(self, index: int) -> np.ndarray: ...
    def target(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank.

    Attributes:
        input_ids: int64 [batch, source].
        attention_mask: int64 [batch, source], 1 at real tokens.
        decoder_input_ids: int64 [batch, target], the labels shifted right.
        labels: int64 [batch, target], -100 at padding.
        target_rows: int64 [targets], where the real ones stand in the flattened labels. Found on
            the CPU: on a GPU the host would have to wait for their number.
        target_ids: int64 [targets], the labels there.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    decoder_input_ids: torch.Tensor
    labels: torch.Tensor
    target_rows: torch.Tensor
    target_ids: torch.Tensor

    def inputs(self) -> dict[str, Any]:
        """What the model's forward takes to give logits."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "decoder_input_ids": self.decoder_input_ids,
            "use_cache": False,  # recomputation under activation checkpointing fails with a cache
        }

    def loss_inputs(self) -> dict[str, Any]:
        """What it takes to give the loss, see `model.forward`."""
        targets = {"target_rows": self.target_rows, "target_ids": self.target_ids}
        return {**self.inputs(), **targets}

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`; the copy overlaps with computing where memory is pinned."""
        pin = device.type == "cuda"
        return MicroBatch(
            **{
                name: (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)
                for name, tensor in vars(self).items()
            }
        )


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that collation needs."""

    pad: int
    decoder_start: int


def collate(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    special: SpecialIds,
    width_multiple: int = 1,
) -> MicroBatch:
    """Pad token ids to the longest source and the longest target of the micro-batch.

    Without examples it is one row of padding without a real target: every rank has to take part
    in the collectives of a forward and backward, and this one adds exactly zero to them.

    Args:
        width_multiple: both widths are rounded up to a multiple of it.
    """
    import torch

    if not sources:
        sources, targets = [np.array([special.pad])], [np.array([IGNORED_LABEL])]
    input_ids = _pad(sources, special.pad, width_multiple)
    labels = _pad(targets, IGNORED_LABEL, width_multiple)
    decoder_input_ids = np.full_like(labels, special.decoder_start)
    decoder_input_ids[:, 1:] = np.where(labels == IGNORED_LABEL, special.pad, labels)[:, :-1]
    lengths = np.array([len(source) for source in sources])
    mask = (np.arange(input_ids.shape[1])[None, :] < lengths[:, None]).astype(np.int64)
    real = np.flatnonzero(labels != IGNORED_LABEL)
    arrays = (input_ids, mask, decoder_input_ids, labels, real, labels.reshape(-1)[real])
    return MicroBatch(*map(torch.from_numpy, arrays))


def collate_rows(
    split: TokenSource, rows: np.ndarray, special: SpecialIds, width_multiple: int = 1
) -> MicroBatch:
    """`collate` of examples of a split, by their indices."""
    sources = [split.source(int(row)) for row in rows]
    targets = [split.target(int(row)) for row in rows]
    return collate(sources, targets, special, width_multiple)


def _pad(rows: Sequence[np.ndarray], value: int, width_multiple: int) -> np.ndarray:
    width = int(round_up(max(map(len, rows)), width_multiple))
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
