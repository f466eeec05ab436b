"""Baselines take from the document what they say."""

from __future__ import annotations

import pytest

from t5_fsdp.evaluation.baselines import lead_baseline


def test_lead_baseline_takes_as_many_words_as_the_reference():
    documents = ["One two,\n three four. Five", "short", "anything"]
    assert lead_baseline(documents, ["a b\tc", "x y z", " "]) == [
        "One two, three",
        "short",
        "",
    ]
    with pytest.raises(ValueError, match="3 documents but 1 references"):
        lead_baseline(documents, ["a"])
