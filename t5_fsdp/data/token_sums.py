"""What the arithmetic of a batch depends on: its real tokens, and how many attend to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenSums:
    """Sums over examples with S source and T target tokens each, padding not counted.

    Attributes:
        source, target: of S, of T.
        source_pairs, target_pairs, cross_pairs: of S x S, T x T and T x S, the query-key pairs of
            the encoder's, the decoder's and the cross-attention. A mean length does not give them:
            long examples attend to more than short ones save.
    """

    source: float
    target: float
    source_pairs: float
    target_pairs: float
    cross_pairs: float

    @classmethod
    def of(cls, source: np.ndarray, target: np.ndarray) -> TokenSums:
        """Of examples with these lengths, int [examples] each."""
        s, t = source.astype(np.int64), target.astype(np.int64)
        return cls(*(int(each.sum()) for each in (s, t, s * s, t * t, t * s)))

    @classmethod
    def of_equal(cls, source: float, target: float, rows: int) -> TokenSums:
        """Of `rows` examples that are all as long."""
        s, t = source, target
        return cls(rows * s, rows * t, rows * s * s, rows * t * t, rows * t * s)
