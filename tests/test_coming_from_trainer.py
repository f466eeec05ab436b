"""docs/coming_from_trainer.md: every argument of theirs, and only options that are ours."""

from __future__ import annotations

import dataclasses
import re

import yaml
from transformers import GenerationConfig, Seq2SeqTrainingArguments

from t5_fsdp import load_config
from t5_fsdp.config import Config, leaves, to_dict
from tests.conftest import ROOT

PAGE = (ROOT / "docs/coming_from_trainer.md").read_text(encoding="utf-8")
THEIRS = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
OURS = set(leaves(to_dict(Config())))
ROW = re.compile(r"^\| (`[^|]+?) \|([^|]*)\|", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")
# Not in the release of transformers that Python 3.10 gets.
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}


def named_arguments() -> set[str]:
    """Of the tables' first cells, and of the last section, which has no table."""
    in_tables = {name for arguments, _ in ROW.findall(PAGE) for name in NAME.findall(arguments)}
    return in_tables | set(NAME.findall(PAGE.partition("## Of no use here")[2]))


def test_every_argument_of_theirs_has_its_place_and_no_other() -> None:
    named = named_arguments()
    assert THEIRS - named == set()
    assert named - THEIRS - NEWER == set()


def test_every_option_that_is_named_is_ours() -> None:
    in_cells = {name for _, options in ROW.findall(PAGE) for name in NAME.findall(options)}
    assert len(in_cells) > 60
    assert in_cells - OURS == set()
    sections = "|".join({name.partition(".")[0] for name in OURS if "." in name})
    anywhere = {name for name in NAME.findall(PAGE) if re.match(rf"({sections})\.\w+$", name)}
    assert anywhere - OURS == set()


def test_the_options_that_stand_for_the_example_are_a_configuration() -> None:
    block = PAGE.partition("```yaml\n")[2].partition("```")[0]
    options = yaml.safe_load(block)
    config = load_config(**options)
    example = PAGE.partition("```python\n")[2].partition("```")[0]
    arguments = dict(re.findall(r"(\w+)=([\w.-]+)", example))
    assert set(arguments) <= THEIRS
    assert config.train.global_batch_size == 8 * int(
        arguments["per_device_train_batch_size"]
    ) * int(arguments["gradient_accumulation_steps"])
    assert config.optimizer.lr == float(arguments["learning_rate"])
    assert config.evaluation.num_beams == int(arguments["generation_num_beams"])


def test_their_longest_summary_counts_the_start_token() -> None:
    """So that `generation_max_length` is one more than `evaluation.max_new_tokens`."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config).eval()
    settings = GenerationConfig(
        max_length=6, min_length=6, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    summary = model.generate(torch.tensor([[5, 6, 1]]), generation_config=settings)
    assert summary.shape[1] == 6  # with the start token: five new ones
    settings = GenerationConfig(
        max_new_tokens=5, min_new_tokens=5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    assert model.generate(torch.tensor([[5, 6, 1]]), generation_config=settings).shape[1] == 6
