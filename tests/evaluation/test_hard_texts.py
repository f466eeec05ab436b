"""What ROUGE or the vocabulary can't deal with is counted and told."""

from __future__ import annotations

from pathlib import Path

from t5_fsdp.data.tokenization import Encoder, load_tokenizer
from t5_fsdp.evaluation.hard_texts import count_hard_texts, count_lost_characters, hints_of

CLEAN = {"summary_words": 9.0, "reference_words": 10.0, "repetition": 0.0, "empty": 0.0,
         "sentinels": 0.0, "cut": 0.0, "novel_2grams": 0.5}  # fmt: skip
NO_COUNTS = {"predictions_without_words": 0, "references_without_words": 0, "non_ascii_share": 0.0}


def test_texts_without_a_word_are_counted():
    predictions = ["", "...", "完全", "fine"]
    references = [["a"], ["...", "b"], ["完全", "!"], [" \n"]]
    counts = count_hard_texts(predictions, references, "default")
    assert counts["predictions_without_words"] == 3 and counts["references_without_words"] == 2
    counts = count_hard_texts(predictions, references, "unicode")
    assert counts["predictions_without_words"] == 2 and counts["references_without_words"] == 1


def test_the_share_beyond_ascii_is_that_of_letters_and_digits():
    counts = count_hard_texts(["完全 ab!", "é1 "], [["...", "_"], ["。"]], "default")
    assert counts["non_ascii_share"] == 3 / 6
    assert count_hard_texts(["..."], [[""]], "default")["non_ascii_share"] == 0


def test_characters_lost_by_the_vocabulary_are_counted(corpus: Path):
    encoder = Encoder(load_tokenizer(str(corpus / "tokenizer")))
    references = [["rice 🍎🍎"], ["rice"], ["rain", "🍎 sun ☀"]]
    counts = count_lost_characters(encoder, references)
    assert counts["references_with_lost_characters"] == 2
    assert counts["lost_characters"] == {"🍎": 3, "☀": 1}


def test_usual_summaries_get_no_hint():
    assert hints_of(NO_COUNTS, CLEAN, 10, "default") == []


def test_hints_say_in_words_what_is_unusual():
    odd = CLEAN | {"cut": 0.31, "empty": 0.02, "sentinels": 0.5, "repetition": 0.2,
                   "summary_words": 4.0, "novel_2grams": 0.01}  # fmt: skip
    counts = {"predictions_without_words": 2, "references_without_words": 1,
              "non_ascii_share": 0.875, "references_with_lost_characters": 3,
              "lost_characters": {"🍎": 3}}  # fmt: skip
    hints = hints_of(counts, odd, 1000, "default")
    text = "\n".join(hints)
    assert len(hints) == len(text.splitlines()) == 10
    for words in ("31 % of summaries were cut at evaluation.max_new_tokens", "2 of 1,000 predic",
                  "1 of 1,000 references", "88 %", "rouge_tokenizer", "3 references", "🍎",
                  "2 % of summaries are empty", "<extra_id_N>", "20 %", "4.0 words",
                  "99 %"):  # fmt: skip
        assert words in text
    assert not any("rouge_tokenizer" in hint for hint in hints_of(counts, odd, 9, "unicode"))
