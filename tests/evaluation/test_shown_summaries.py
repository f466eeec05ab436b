"""Summaries for people: in 80 columns, and as Markdown that shows what was written."""

from __future__ import annotations

import html
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings

from t5_fsdp.evaluation.rouge import METRICS
from t5_fsdp.evaluation.shown_summaries import as_lines, as_markdown, spread
from tests.odd_texts import odd_text

ROUGE = dict.fromkeys(METRICS, 0.25)
NASTY = "# *a* <b>_x_</b> [l](u) `c` &amp; 1. one | two ~~n~~ \\ > q\n\n    code === \n- item"


def row(text: str, prediction: str | None = None) -> dict[str, Any]:
    prediction = text if prediction is None else prediction
    return {"id": "7", "document": text, "reference": text, "prediction": prediction, **ROUGE}


def columns(line: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in line)


@pytest.mark.parametrize("text", ["word " * 300, "x" * 900, "水" * 900, "水 and rice " * 90])
def test_lines_fit_a_terminal(text: str) -> None:
    lines = as_lines(row(text)).splitlines()
    assert max(map(columns, lines)) <= 80
    assert lines[0] == "example 7, ROUGE-1/2/L/Lsum 25.0 / 25.0 / 25.0 / 25.0"
    assert len(lines) < 35 and "more characters)" in "".join(lines)
    assert len(as_lines(row(text), with_document=False).splitlines()) < len(lines)


def test_control_characters_and_empty_summaries_are_shown_as_what_they_are() -> None:
    lines = as_lines(row("a\x1b[2Jb\ud800c", " \n"))
    assert "\x1b" not in lines and "\ud800" not in lines and "a\ufffd[2Jb\ufffdc" in lines
    assert "  summary     (empty)" in lines.splitlines()


@given(odd_text)
@settings(max_examples=40, deadline=None)
def test_any_text_can_be_written(text: str) -> None:
    as_lines(row(text)).encode("utf-8")
    as_markdown(row(text)).encode("utf-8")


def test_markdown_shows_the_text_itself() -> None:
    import markdown

    shown = markdown.markdown(as_markdown(row(NASTY)), extensions=["tables", "fenced_code"])
    paragraphs = [
        html.unescape(re.sub("</?(p|strong)>", "", line)) for line in shown.splitlines() if line
    ]
    plain = " ".join(NASTY.split())
    assert paragraphs[1:] == [f"{name} {plain}" for name in ("document", "reference", "summary")]


def test_rows_are_spread_and_always_the_same() -> None:
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 3) == [0, 1]
    assert spread(range(10), 0) == []
