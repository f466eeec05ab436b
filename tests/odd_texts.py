"""Strings that text programs stumble over."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

odd_text = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from("aAbsing 19.!?\n\r\té。\u2028\x00\ud800"), max_size=60),
    st.lists(st.sampled_from(["cats", "cat.", "Ran", "running", "e.g.", "\n"])).map(" ".join),
)


def some_pairs(count: int) -> tuple[list[str], list[str]]:
    """So many predictions and references of a few words."""
    generator = np.random.default_rng(0)
    words = ["wash", "the", "slicing", "apples.", "Then", "runners", "open,", "close", "it!", "7"]
    texts = [
        [" ".join(generator.choice(words, generator.integers(1, 20))) for _ in range(count)]
        for _ in range(2)
    ]
    return texts[0], texts[1]
