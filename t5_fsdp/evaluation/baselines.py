"""Summaries that need no model: what a trained one has to beat."""

from __future__ import annotations

from collections.abc import Sequence


def lead_baseline(documents: Sequence[str], references: Sequence[str]) -> list[str]:
    """The first words of each document, as many as its reference has, joined by blanks.

    Words are what whitespace separates. What a model has to beat: it costs nothing.

    Raises:
        ValueError: the lengths differ.
    """
    if len(documents) != len(references):
        raise ValueError(
            f"{len(documents)} documents but {len(references)} references; "
            "give one reference for each document"
        )
    return [
        " ".join(document.split()[: len(reference.split())])
        for document, reference in zip(documents, references, strict=True)
    ]
