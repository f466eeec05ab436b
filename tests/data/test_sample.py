"""The bundled sample: the committed files, and what an article must be like."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from t5_fsdp.data import sample, sample_phrases

REPOSITORY = Path(__file__).resolve().parents[2]
COMMITTED = REPOSITORY / "data" / "sample"
MAX_TOTAL_BYTES = 5_000_000


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, str]]]:
    return sample.generate_articles()


@pytest.fixture(scope="module")
def articles(splits: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    return [article for split in splits.values() for article in split]


def test_committed_files_are_the_generators_output(tmp_path: Path) -> None:
    assert sample.main(["--output", str(tmp_path / "new")]) == 0
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    for name in written:
        assert (tmp_path / "new" / name).read_bytes() == (COMMITTED / name).read_bytes(), (
            f"{name} is out of date: run python -m t5_fsdp.data.sample"
        )


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in COMMITTED.glob("*.jsonl")) < MAX_TOTAL_BYTES


def test_sizes(splits: dict[str, list[dict[str, str]]]) -> None:
    sizes = {split: len(articles) for split, articles in splits.items()}
    assert sizes == sample.SPLIT_SIZES == {"train": 5000, "validation": 250, "test": 250}


@pytest.mark.parametrize("key", ["id", "title", "document", "summary"])
def test_nothing_comes_twice(articles: list[dict[str, str]], key: str) -> None:
    values = [article[key] for article in articles]
    assert len(set(values)) == len(values)


def test_every_topic_is_in_every_split(splits: dict[str, list[dict[str, str]]]) -> None:
    assert len(sample_phrases.TOPICS) >= 12
    for topic in sample_phrases.TOPICS:
        required = [step.line for step in topic.steps if step.required]
        assert required, topic.name
        pattern = re.compile(f"^{re.sub(r'{[a-z]+}', '.+', required[0])}$", re.MULTILINE)
        for split, articles in splits.items():
            share = sum(bool(pattern.search(a["summary"])) for a in articles) / len(articles)
            assert 0.03 < share < 0.13, (topic.name, split)


def test_shape_of_an_article(articles: list[dict[str, str]]) -> None:
    for article in articles:
        assert list(article) == ["id", "title", "document", "summary"]
        lines, paragraphs = article["summary"].split("\n"), article["document"].split("\n")
        assert 3 <= len(lines) == len(paragraphs) <= 6
        assert all(line.endswith(".") and line[0].isupper() for line in lines)
        assert all(text.endswith(".") and text[0].isupper() for text in paragraphs)
        assert len(set(lines)) == len(lines)
        assert article["title"].startswith("How to ")
        for text in article.values():
            assert text == text.strip() and text.isascii()
            assert not any(mark in text for mark in ("  ", "{", "}", "|", "..", ",,"))


def test_no_bold_line_stands_in_the_document(articles: list[dict[str, str]]) -> None:
    for article in articles:
        document = article["document"].lower()
        for line in article["summary"].lower().split("\n"):
            # Without its period too: it must not be a part of a longer sentence either.
            assert line.rstrip(".") not in document, article["id"]


def test_lengths(articles: list[dict[str, str]]) -> None:
    document_words = [len(article["document"].split()) for article in articles]
    summary_words = [len(article["summary"].split()) for article in articles]
    assert 75 <= sum(document_words) / len(articles) <= 130
    assert 20 <= sum(summary_words) / len(articles) <= 36
    assert min(document_words) >= 50 and max(document_words) <= 150
    vocabulary = {word.strip(".,").lower() for a in articles for word in a["document"].split()}
    assert 300 <= len(vocabulary) <= 750


def test_first_words_make_a_poor_summary(splits: dict[str, list[dict[str, str]]]) -> None:
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    scores = []
    for article in splits["test"][:100]:
        num_words = len(article["summary"].split())
        lead = " ".join(article["document"].split()[:num_words])
        scores.append(scorer.score(article["summary"], lead)["rouge1"].fmeasure)
    assert 0.25 <= sum(scores) / len(scores) <= 0.5


def test_each_slot_is_used_and_the_same_value_has_one_meaning() -> None:
    for topic in sample_phrases.TOPICS:
        lines = " ".join(step.line for step in topic.steps)
        unused = [name for name in topic.slots if f"{{{name}}}" not in lines]
        assert not unused, topic.name
        for values in topic.slots.values():
            in_document = [value.split("|")[-1] for value in values]
            assert len(set(in_document)) == len(values) >= 2, topic.name


def test_advice_says_all_that_the_line_says() -> None:
    """Every slot of a bold line is in each advice: a summary can be written from the document."""
    for topic in sample_phrases.TOPICS:
        for step in topic.steps:
            for name in topic.slots:
                slot = f"{{{name}}}"
                assert all((slot in advice) == (slot in step.line) for advice in step.advice), step


def test_advice_fits_behind_you_should() -> None:
    for topic in sample_phrases.TOPICS:
        for step in topic.steps:
            for text in (*step.advice, *step.reasons):
                assert text[0].islower() or text[0] == "{", text
                assert not text.startswith(("do not ", "never ")), text
                assert not text.endswith("."), text


def test_needs_neither_torch_nor_datasets() -> None:
    code = (
        "import sys, t5_fsdp.data.sample as s; s.generate_articles();"
        "print([m for m in ('torch', 'datasets', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
