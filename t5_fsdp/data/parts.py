"""The splits of a dataset, and the sources that a mixture has its rows from."""

from __future__ import annotations

from dataclasses import dataclass

from t5_fsdp.config import DataConfig, mixture_part

SPLITS = ("train", "validation", "test")


def prepared_splits(data: DataConfig) -> tuple[str, ...]:
    """The splits that are read and tokenized before training: not one that is streamed."""
    return SPLITS[1:] if data.streaming else SPLITS


@dataclass(frozen=True)
class Part:
    """One source of a mixture, or the only one.

    Attributes:
        name: for messages and the audit.
        weight: its share of an epoch relative to the other parts'; None: as many as it has rows.
        data: its options; `mixture` is empty.
    """

    name: str
    weight: float | None
    data: DataConfig


def parts_of(data: DataConfig) -> list[Part]:
    """The sources that `data` names, each with its own options: those of `data`, overridden."""
    if not data.mixture:
        return [Part(data.source, None, data)]
    parts = []
    for number, entry in enumerate(data.mixture):
        own = mixture_part(data, entry)
        name = str(entry.get("name") or f"{number}: {own.source}")
        parts.append(Part(name, entry.get("weight"), own))
    return parts


def row_limit(data: DataConfig, split: str) -> int | None:
    """How many rows of a split are used at most; None: all."""
    return getattr(data, f"max_{split}_examples")
