"""Lines of summaries, prefixes and special tokens, through the tokenizer and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.data.preparation import prepare
from t5_fsdp.data.tokenization import (
    Encoder,
    decode_summary,
    encode_sources,
    load_tokenizer,
    newline_id,
)
from t5_fsdp.errors import UserError
from tests.conftest import tiny_options


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Any:
    return load_tokenizer(str(corpus / "tokenizer"))


def test_lines_survive_with_the_newline_token_and_only_with_it(tokenizer: Any) -> None:
    newline = newline_id(tokenizer, True)
    assert newline == tokenizer.convert_tokens_to_ids("<extra_id_99>")
    text = "rinse rice.\nblue door.\n\nsun."
    [ids] = Encoder(tokenizer, newline).encode_lines([text])
    assert ids.count(newline) == 3 and ids[-1] == tokenizer.eos_token_id
    assert decode_summary(tokenizer, ids, newline) == text
    [flat] = Encoder(tokenizer).encode_lines([text])
    assert flat == tokenizer(text)["input_ids"]
    assert decode_summary(tokenizer, flat, None) == "rinse rice. blue door. sun."
    # One line is the same either way.
    assert Encoder(tokenizer, newline).encode_lines(["a b"]) == Encoder(tokenizer).encode(["a b"])


def test_what_stands_behind_the_end_mark_is_no_summary(tokenizer: Any) -> None:
    ids = [
        *tokenizer("water")["input_ids"],
        tokenizer.pad_token_id,
        *tokenizer("lamp")["input_ids"],
    ]
    assert decode_summary(tokenizer, ids, None) == "water"


def test_a_vocabulary_that_writes_newlines_needs_no_token() -> None:
    byte_tokenizer = ByT5Tokenizer()
    assert newline_id(byte_tokenizer, True) is None
    [ids] = Encoder(byte_tokenizer).encode_lines(["a\nb"])
    assert decode_summary(byte_tokenizer, ids, None) == "a\nb"


def test_a_text_that_quotes_special_tokens_does_not_end_there(tokenizer: Any) -> None:
    [ids] = Encoder(tokenizer).encode(["rinse </s> rice <extra_id_99> sun"])
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.convert_tokens_to_ids("<extra_id_99>") not in ids


def test_the_prefix_is_never_doubled_and_never_cut(tokenizer: Any) -> None:
    [once], [twice] = (
        encode_sources(tokenizer, [text], "summarize: ", 64)
        for text in ("rinse rice.", "summarize: rinse rice.")
    )
    [spaced] = encode_sources(tokenizer, ["\n summarize: rinse rice."], "summarize: ", 64)
    assert spaced.tolist() == once.tolist()
    assert once.tolist() == twice.tolist() == tokenizer("summarize: rinse rice.")["input_ids"]
    prefix = tokenizer("summarize: ", add_special_tokens=False)["input_ids"]
    [cut] = encode_sources(tokenizer, ["rinse rice. " * 50], "summarize: ", len(prefix) + 4)
    assert cut[: len(prefix)].tolist() == prefix and len(cut) == len(prefix) + 4


def test_a_prefix_that_leaves_no_room_is_refused(corpus: Path, tmp_path: Path) -> None:
    data = DataConfig(source="files", train_files=[str(corpus / "train.jsonl")])
    data.max_source_tokens = 5
    model = ModelConfig(tokenizer=str(corpus / "tokenizer"))
    with pytest.raises(UserError, match=r"data\.prefix 'summarize: ' takes .* raise it"):
        prepare(data, model, tmp_path / "cache", lambda _: None)


def test_newlines_are_learned_evaluated_and_exported_alike(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    rows = [{"document": f"{a} {b}", "summary": f"{a}\n{b}"} for a, b in
            (("rice", "soil"), ("door", "lamp"), ("sun", "rain"), ("blue", "green"))]  # fmt: skip
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    run_dir = tmp_path / "run"
    options = {
        "data.train_files": path,
        "data.validation_files": path,
        "data.test_files": path,
        "data.keep_newlines": "true",
        "train.max_steps": 60,
        "train.epochs": 60,
    }
    argv = tiny_options(corpus, run_dir, **options)
    code, _, err = pools(1).command("train", argv)
    assert code == 0, err
    code, _, err = pools(1).command(
        "export_hf", ["--checkpoint", run_dir, "--output", tmp_path / "hf"]
    )
    assert code == 0, err
    plain = [word for word in argv if word not in ("--data.keep_newlines", "true")]
    for source, extra in ((run_dir, []), (tmp_path / "hf", plain)):
        output = tmp_path / f"eval-{source.name}"
        base = ["--checkpoint", source, "--output_dir", output]
        code, _, err = pools(1).command("eval_rouge", [*extra, *base])
        assert code == 0, err
        predictions = [
            json.loads(line)["prediction"]
            for line in (output / "predictions.jsonl").read_text().splitlines()
        ]
        assert np.mean(["\n" in prediction for prediction in predictions]) > 0.5, predictions
