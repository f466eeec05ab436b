"""docs/configuration.md is what config.py makes it, and its links lead to the options."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from t5_fsdp.cli.option_reference import option_reference, page_of
from t5_fsdp.cli.options import described_sections
from tests.conftest import ROOT

PAGE = ROOT / "docs/configuration.md"
OPTIONS = [option.name for section in described_sections() for option in section.options]


def test_the_page_is_made_from_the_options() -> None:
    assert PAGE.read_text(encoding="utf-8") == option_reference(), "run `make docs`"


def test_every_option_has_a_row_of_five_cells() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == OPTIONS
    for row in re.findall(r"^\| `.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 5 and all(cell.strip() for cell in cells), row


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", "whole number from 0 to 2^63 - 1"),
        ("train.epochs", "number above 0 to 1,000,000,000"),
        ("train.label_smoothing", "number from 0 to 0.99"),
        ("optimizer.grad_clip_norm", "number above 0, `null`"),
        ("parallel.initial_loss_scale", "number from 1 to 2^32"),
        ("parallel.reshard_after_forward", "`true`, `false`, whole number, `null`"),
        ("data.train_files", "list of texts, text"),
        ("data.mixture", "list of mappings"),
        ("checkpoint.accept_changed", "list of `data`, `tokenizer`"),
    ],
)
def test_types_and_limits_are_in_words(option: str, value: str) -> None:
    assert f"\n| `{option}` | {value} |" in option_reference()


def speaks_of(page: str, option: str) -> bool:
    text = (PAGE.parent / page.partition("#")[0]).read_text(encoding="utf-8")
    name = option.rpartition(".")[2]
    return re.search(rf"(?<!\w){name}(?!\w)", text) is not None


def test_the_page_that_is_to_tell_more_speaks_of_the_option() -> None:
    assert [name for name in OPTIONS if not speaks_of(page_of(name), name)] == []


def test_the_page_is_made_without_torch() -> None:
    code = "import sys, t5_fsdp.cli.option_reference as m; m.option_reference(); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
