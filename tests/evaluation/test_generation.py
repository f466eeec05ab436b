"""What generation knows beside the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import T5Config, T5ForConditionalGeneration

from t5_fsdp.data.tokenization import load_tokenizer, newline_id, sentinel_ids
from t5_fsdp.evaluation.generation import (
    GeneratedSummary,
    GenerationSettings,
    _summary_of,
    generate,
)


def test_a_summary_knows_whether_it_was_cut_and_what_was_left_out(corpus: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    newline = newline_id(tokenizer, keep_newlines=True)
    sentinels = sentinel_ids(tokenizer)
    assert len(sentinels) == 100 and newline in sentinels
    sentinels -= {newline}
    [rice] = tokenizer("rice", add_special_tokens=False)["input_ids"]
    gap = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def read(*ids: int) -> GeneratedSummary:
        return _summary_of(list(ids), tokenizer, newline, sentinels)

    assert read(gap, rice, gap, end, pad) == GeneratedSummary("rice", cut=False, sentinels=2)
    assert read(rice, newline, rice) == GeneratedSummary("rice\nrice", cut=True, sentinels=0)
    assert read(end, pad, pad) == GeneratedSummary("", cut=False, sentinels=0)


def test_generation_tells_what_it_did(corpus: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    newline = newline_id(tokenizer, keep_newlines=True)
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                      vocab_size=len(tokenizer), decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    settings = GenerationSettings(num_beams=2, max_new_tokens=3, length_penalty=1, batch_tokens=99)

    def generate_only(token: str, newline: int | None = newline) -> GeneratedSummary:
        others = set(range(len(tokenizer))) - {tokenizer.convert_tokens_to_ids(token)}
        model.generation_config.suppress_tokens = sorted(others)
        sources = [np.array([5, 6, 1], np.int32)]
        return generate(model, tokenizer, sources, settings, newline=newline)[0]

    assert generate_only("<extra_id_5>") == GeneratedSummary("", cut=True, sentinels=3)
    assert generate_only("</s>") == GeneratedSummary("", cut=False, sentinels=0)
    assert generate_only("<extra_id_99>") == GeneratedSummary("", cut=True, sentinels=0)
    assert generate_only("<extra_id_99>", None).sentinels == 3
