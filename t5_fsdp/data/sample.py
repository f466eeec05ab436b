"""The bundled sample: thousands of small how-to articles in WikiHow's shape.

As in WikiHow, an article is a list of steps; the summary is their bold lines, one a line, and the
document is their explanations, one paragraph a line. A bold line never stands in the document as
it is: the explanation says the same thing in other words, among reasons and remarks that a summary
has to leave out. So the first words of a document make a poor summary, and a tiny model trained
for a minute or two makes a good one.

The articles are a pure function of `SEED` and the phrases in `sample_phrases`. To write
data/sample again: `python -m t5_fsdp.data.sample`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from t5_fsdp.data import sample_phrases as phrases
from t5_fsdp.data.sample_phrases import Step, Topic

SEED = 20240229
SPLIT_SIZES: dict[str, int] = {"train": 5000, "validation": 250, "test": 250}

_DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "data" / "sample"
_NUM_STEPS = (3, 3, 3, 3, 4, 4, 4, 4, 5, 6)  # short articles are the most frequent
# Short articles explain more, so that the documents are of about the same length.
_REASON_SHARE = {3: 0.9, 4: 0.7, 5: 0.4, 6: 0.2}
_MIN_DOCUMENT_WORDS = (72, 86)  # drawn for each article; remarks fill it up
_SMALL_TITLE_WORDS = (
    "a",
    "an",
    "and",
    "at",
    "by",
    "for",
    "from",
    "in",
    "of",
    "off",
    "on",
    "the",
    "to",
    "with",
)

_T = TypeVar("_T")


def generate_articles() -> dict[str, list[dict[str, str]]]:
    """All articles by split: dictionaries with "id", "title", "document" and "summary".

    No title, document or summary comes twice, neither in a split nor in two of them.
    """
    rng = random.Random(SEED)
    titles = _titles(rng, sum(SPLIT_SIZES.values()))
    articles: list[dict[str, str]] = []
    seen: set[str] = set()
    for number, (topic, subject, title) in enumerate(titles, start=1):
        document, summary = _new_text(rng, topic, subject, seen)
        seen.update((document, summary))
        articles.append(
            {
                "id": f"sample-{number:05d}",
                "title": title,
                "document": document,
                "summary": summary,
            }
        )
    _assert_unique(articles)
    rest = iter(articles)
    return {split: [next(rest) for _ in range(size)] for split, size in SPLIT_SIZES.items()}


def write_sample(directory: Path) -> None:
    """Write train.jsonl, validation.jsonl and test.jsonl, one JSON object a line."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, articles in generate_articles().items():
        text = "".join(json.dumps(article) + "\n" for article in articles)
        # Bytes: a text file would get other line ends on Windows.
        (directory / f"{split}.jsonl").write_bytes(text.encode("ascii"))


def main(argv: list[str] | None = None) -> int:
    """Write the sample; `--output DIR` says where. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m t5_fsdp.data.sample", description="Write the bundled how-to sample."
    )
    parser.add_argument("--output", type=Path, default=_DEFAULT_DIRECTORY, metavar="DIR")
    directory = parser.parse_args(argv).output
    write_sample(directory)
    print(f"wrote {', '.join(f'{split}.jsonl' for split in SPLIT_SIZES)} to {directory}")
    return 0


# Of `random.Random` only random() promises the same numbers in every Python version.


def _pick(rng: random.Random, items: Sequence[_T]) -> _T:
    return items[int(rng.random() * len(items))]


def _shuffled(rng: random.Random, items: Sequence[_T]) -> list[_T]:
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=_draw)]


def _draw(pair: tuple[float, object]) -> float:
    return pair[0]


def _titles(rng: random.Random, count: int) -> list[tuple[Topic, str, str]]:
    """(topic, subject, title), `count` different ones, the topics equally often."""
    pools = [_shuffled(rng, list(_possible_titles(topic))) for topic in phrases.TOPICS]
    titles = [pools[index % len(pools)].pop() for index in range(count)]
    return _shuffled(rng, titles)


def _possible_titles(topic: Topic) -> Iterator[tuple[Topic, str, str]]:
    for verb, subject, *endings in product(topic.titles, topic.subjects, *topic.title_endings):
        yield topic, subject, _title_case(f"how to {verb} {subject} {' '.join(endings)}")


def _title_case(text: str) -> str:
    words = text.split()
    cased = [word if word in _SMALL_TITLE_WORDS else _capitalize(word) for word in words]
    return " ".join([_capitalize(cased[0]), *cased[1:]])


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def _new_text(rng: random.Random, topic: Topic, subject: str, seen: set[str]) -> tuple[str, str]:
    """(document, summary), neither of them in `seen`."""
    while True:
        steps = _choose_steps(rng, topic)
        values = {name: _pick(rng, values) for name, values in topic.slots.items()}
        in_summary = {name: value.split("|")[0] for name, value in values.items()}
        in_document = {name: value.split("|")[-1] for name, value in values.items()}
        lines = [step.line.format(subject=subject, **in_summary) for step in steps]
        paragraphs = _explain(rng, topic, steps, {"subject": subject, **in_document})
        document, summary = "\n".join(paragraphs), "\n".join(lines)
        if document not in seen and summary not in seen:
            return document, summary


def _choose_steps(rng: random.Random, topic: Topic) -> list[Step]:
    """Some of the topic's steps in the topic's order, the required ones among them."""
    indices = range(len(topic.steps))
    required = [index for index in indices if topic.steps[index].required]
    optional = [index for index in indices if not topic.steps[index].required]
    num_optional = _pick(rng, _NUM_STEPS) - len(required)
    chosen = required + _shuffled(rng, optional)[:num_optional]
    return [topic.steps[index] for index in sorted(chosen)]


def _explain(
    rng: random.Random, topic: Topic, steps: Sequence[Step], values: dict[str, str]
) -> list[str]:
    """One paragraph a step."""
    with_reason = iter(_shuffled(rng, phrases.FRAMES_WITH_REASON))
    without_reason = iter(_shuffled(rng, phrases.FRAMES_WITHOUT_REASON))
    paragraphs: list[list[str]] = []
    for index, step in enumerate(steps):
        frames = with_reason if rng.random() < _REASON_SHARE[len(steps)] else without_reason
        words = {
            "advice": _pick(rng, step.advice).format(**values),
            "reason": _pick(rng, step.reasons).format(**values),
            "lead": _pick(rng, _leads(index, len(steps))),
        }
        paragraphs.append([frame.format(**words) for frame in next(frames)])
    _add_remarks(rng, topic, paragraphs)
    return [" ".join(_capitalize(text) + "." for text in paragraph) for paragraph in paragraphs]


def _leads(index: int, num_steps: int) -> tuple[str, ...]:
    if index == 0:
        return phrases.FIRST_LEADS
    return phrases.LAST_LEADS if index == num_steps - 1 else phrases.MIDDLE_LEADS


def _add_remarks(rng: random.Random, topic: Topic, paragraphs: list[list[str]]) -> None:
    """Add remarks, at most one a paragraph, until the document is long enough."""
    low, high = _MIN_DOCUMENT_WORDS
    wanted = low + rng.random() * (high - low)
    remarks = _shuffled(rng, topic.remarks + phrases.REMARKS)
    for paragraph, remark in zip(_shuffled(rng, paragraphs), remarks, strict=False):
        if sum(len(text.split()) for texts in paragraphs for text in texts) >= wanted:
            return
        # In front of the advice or behind it: its place must not give it away.
        paragraph.insert(0 if rng.random() < 0.4 else len(paragraph), remark)


def _assert_unique(articles: Sequence[dict[str, str]]) -> None:
    for key in ("id", "title", "document", "summary"):
        assert len({article[key] for article in articles}) == len(articles), f"a {key} comes twice"


if __name__ == "__main__":
    raise SystemExit(main())
