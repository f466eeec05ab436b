"""Two systems on the same examples: differences, their intervals, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.comparison import align, compare, largest_changes, shorten
from t5_fsdp.evaluation.rouge import METRICS, Scores

ROWS = [{"id": name, "reference": f"r{name}", "prediction": f"p{name}"} for name in "abc"]


def scores_of(values: np.ndarray) -> Scores:
    """The same values in each metric but the last, which gets half of them."""
    columns = np.stack([values, values, values, values / 2], axis=1)
    return Scores(columns, columns, columns)


def test_predictions_are_paired_by_id_else_by_place():
    others = [dict(row, prediction=f"o{row['id']}") for row in ROWS]
    assert align(ROWS, others[::-1], "A", "B") == ["oa", "ob", "oc"]
    without = [{k: v for k, v in row.items() if k != "id"} for row in others]
    assert align(ROWS, without, "A", "B") == ["oa", "ob", "oc"]
    numbered = [dict(row, id=number) for number, row in enumerate(ROWS)]
    as_text = [dict(row, id=str(row["id"])) for row in numbered]
    assert align(numbered, as_text, "A", "B") == ["pa", "pb", "pc"]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (ROWS[:2], "A has 3 examples and B 2"),
        ([*ROWS[:2], dict(ROWS[2], id="d")], "1 of the 3 ids of A are not in B.*'c'"),
        ([*ROWS[:2], dict(ROWS[2], reference="x")], "id 'c' has another reference in A than in B"),
        ([{"reference": "x", "prediction": ""}] * 3, "example id 'a' has another reference"),
    ],
)
def test_other_examples_are_refused(others, message):
    with pytest.raises(UserError, match=message) as caught:
        align(ROWS, others, "A", "B")
    assert "\n" not in str(caught.value)


def test_a_clear_difference_is_told_from_chance():
    generator = np.random.default_rng(0)
    base = generator.random(400)
    better = scores_of(base + 0.02 + 0.01 * generator.standard_normal(400))
    found = compare(better, scores_of(base))
    assert list(found) == list(METRICS)
    first, last = found["rouge1"], found["rougeLsum"]
    # Far narrower than the spread of the scores: each example is its own control.
    assert 0.018 < first["difference_low"] < first["difference"] < first["difference_high"] < 0.022
    assert first["difference"] == pytest.approx(first["fmeasure"] - first["baseline_fmeasure"])
    assert first["share_below_zero"] == 0.0 and last["difference"] == first["difference"] / 2
    reverse = compare(scores_of(base), better)["rouge1"]
    assert reverse["share_below_zero"] == 1.0
    assert reverse["difference_low"] == pytest.approx(-first["difference_high"], abs=1e-12)
    noise = compare(scores_of(base), scores_of(generator.permutation(base)))["rouge1"]
    assert noise["difference_low"] < 0 < noise["difference_high"]
    assert noise["difference"] == pytest.approx(0)


def test_the_interval_is_that_of_theory():
    differences = np.random.default_rng(3).normal(0.01, 0.1, 1000)
    found = compare(scores_of(differences), scores_of(np.zeros(1000)))["rouge1"]
    width = found["difference_high"] - found["difference_low"]
    assert width == pytest.approx(2 * 1.96 * differences.std() / 1000**0.5, rel=0.1)


def test_wins_ties_and_losses_are_counted():
    found = compare(scores_of(np.array([0.5, 0.2, 0.1, 0.4])),
                    scores_of(np.array([0.1, 0.2, 0.3, 0.3])))["rouge2"]  # fmt: skip
    assert (found["wins"], found["ties"], found["losses"]) == (2, 1, 1)
    same = compare(scores_of(np.full(3, 0.3)), scores_of(np.full(3, 0.3)))["rouge2"]
    assert (same["wins"], same["ties"], same["losses"]) == (0, 3, 0)
    assert same["difference"] == same["difference_low"] == same["share_below_zero"] == 0


def test_the_largest_changes_are_named():
    scores, baseline = scores_of(np.array([0.9, 0.2, 0.2])), scores_of(np.array([0.1, 0.8, 0.2]))
    rows = [dict(row, prediction=row["prediction"] + " word" * 99) for row in ROWS]
    found = largest_changes(rows, ["x", "y", "z"], scores, baseline)
    assert [change["id"] for change in found["gains"]] == ["a"]
    assert [change["id"] for change in found["losses"]] == ["b"]
    gain = found["gains"][0]
    assert (gain["fmeasure"], gain["baseline_fmeasure"]) == (0.45, 0.05)
    assert gain["reference"] == "ra" and gain["baseline_prediction"] == "x"
    assert len(gain["prediction"]) <= 300 and gain["prediction"].endswith(" ...")
    many = scores_of(np.arange(-10, 20) / 100), scores_of(np.zeros(30))
    rows = [{"id": n, "reference": "r", "prediction": "p"} for n in range(30)]
    found = largest_changes(rows, ["x"] * 30, *many)
    assert [change["id"] for change in found["gains"]] == [29, 28, 27, 26, 25]
    assert [change["id"] for change in found["losses"]] == [0, 1, 2, 3, 4]
    unnamed = [{"reference": "r", "prediction": "p"}] * 3
    assert largest_changes(unnamed, ["x"] * 3, scores, baseline)["losses"][0]["id"] == 2


def test_shortened_texts_are_one_line():
    assert shorten("a\n b") == "a b"
    assert shorten("word " * 9, 12) == "word wor ..."
