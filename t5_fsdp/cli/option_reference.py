"""docs/configuration.md, made from config.py: every option, what it may be, what it means.

`make docs` writes the page, and a test compares it with what this module makes.
"""

from __future__ import annotations

import json
import math
import re
import sys
import types
import typing
from typing import Any, Literal

from t5_fsdp.cli.options import Option, Section, described_sections
from t5_fsdp.config_problems import limits

_HEAD = """\
# Configuration

Every option of a run. Made from `t5_fsdp/config.py` by `make docs`: change it there.

An option stands in a YAML file (`--config FILE.yaml`; of several files the later ones win), under
its section, or on the command line as `--section.option VALUE`, which wins over files:

```yaml
run_dir: runs/mine
train: {epochs: 2, global_batch_size: 64}
data:
  train_files: [part-1.jsonl, part-2.jsonl]
```

```bash
.venv/bin/python scripts/train.py --config configs/demo.yaml --train.epochs 2 --check
.venv/bin/python scripts/train.py --config configs/demo.yaml --print_config
```

- A list or a mapping on the command line is one word in JSON:
  `--data.train_files '["a.jsonl", "b.jsonl"]'`, `--model.config '{"dropout_rate": 0.0}'`. `null`
  switches an option off. An option that is true or false may go without its value: `--check`.
- `--print_config` prints all options with their values, `--help` what this page says, and what
  the command itself takes beside them.
- A name that does not exist, a value of another type or outside its limits, and options that
  contradict each other are refused before anything is done, all in one message.
- In a program: [library.md](library.md).
"""

_TABLE = """\
| option | value | default | meaning | more |
|---|---|---|---|---|
"""

# Where an option is explained; of several the longest that begins its name.
_PAGES = {
    "run_dir": "run_folder.md",
    "seed": "data.md#batches",
    "model.name": "parallelism.md#loading",
    "model.revision": "parallelism.md#loading",
    "model.init": "parallelism.md#loading",
    "model.config": "model.md#families",
    "model.tokenizer": "data.md#from-text-to-tokens",
    "model.attention": "model.md#attention",
    "model.adapter": "lora.md",
    "model.lora": "lora.md",
    "data": "data.md#sources",
    "data.path": "../data/README.md#wikihow",
    "data.wikihow": "../data/README.md#wikihow",
    "data.on_bad_row": "data.md#rows-that-are-left-out",
    "data.prefix": "data.md#from-text-to-tokens",
    "data.keep_newlines": "data.md#from-text-to-tokens",
    "data.mixture": "data.md#mixtures",
    "data.streaming": "data.md#streaming",
    "data.shuffle_buffer": "data.md#streaming",
    "data.max": "data.md#from-text-to-tokens",
    "data.max_train": "data.md#sources",
    "data.max_validation": "data.md#sources",
    "data.max_test": "data.md#sources",
    "data.cache_dir": "data.md#prepared-data",
    "parallel": "parallelism.md",
    "parallel.wrap": "parallelism.md#units",
    "parallel.explain": "parallelism.md#units",
    "parallel.param_dtype": "precision.md",
    "parallel.reduce_dtype": "precision.md",
    "parallel.initial_loss_scale": "precision.md#fp16",
    "parallel.tf32": "precision.md",
    "parallel.activation_checkpointing": "parallelism.md#less-memory-for-more-time",
    "parallel.sync_every_micro_batch": "parallelism.md#less-memory-for-more-time",
    "parallel.compile": "model.md#compilation",
    "optimizer": "optimization.md",
    "schedule": "optimization.md#schedules",
    "train": "data.md#batches",
    "train.width_multiple": "model.md#compilation",
    "train.label_smoothing": "model.md#loss",
    "train.z_loss": "model.md#loss",
    "train.loss_chunk_rows": "model.md#loss",
    "train.skip_nonfinite_steps": "precision.md#steps-that-are-not-finite",
    "train.collective_timeout_seconds": "checkpoints.md#failures",
    "checkpoint": "checkpoints.md#when-which-where",
    "checkpoint.accept_changed": "checkpoints.md#what-a-checkpoint-is",
    "evaluation": "evaluation.md#generating",
    "evaluation.every_steps": "evaluation.md#in-training",
    "evaluation.max_examples": "evaluation.md#in-training",
    "evaluation.best_metric": "evaluation.md#in-training",
    "evaluation.early_stopping": "evaluation.md#in-training",
    "evaluation.rouge": "evaluation.md#scores",
    "evaluation.references": "evaluation.md#scores",
    "logging": "trackers.md",
    "logging.every_steps": "training-log.md",
    "logging.num_summaries": "evaluation.md#in-training",
    "logging.profile": "training-log.md#traces-and-memory-snapshots",
    "logging.memory_snapshot": "training-log.md#traces-and-memory-snapshots",
}


def option_reference() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *map(_section, described_sections())])


def page_of(option: str) -> str:
    """Where an option is explained, as a link from docs/: by its dotted name."""
    return _PAGES[max((name for name in _PAGES if option.startswith(name)), key=len)]


def _section(section: Section) -> str:
    title = f"## `{section.name}`\n\n{section.meaning}" if section.name else "## The run"
    return f"{title}\n\n{_TABLE}{''.join(map(_row, section.options))}"


def _row(option: Option) -> str:
    page = page_of(option.name)
    label = page.partition("#")[0].removeprefix("../").removeprefix("docs/")
    cells = [
        f"`{option.name}`",
        _value(option),
        f"`{_default(option.default)}`",
        _markdown(option.help),
        f"[{label}]({page})",
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _default(value: Any) -> str:
    # What YAML reads as the text that it is goes without quotes.
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value):
        return value
    return json.dumps(value)


def _markdown(meaning: str) -> str:
    linked = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", meaning)
    return linked.replace("*", r"\*")


def _value(option: Option) -> str:
    """What an option may be, in words."""
    return _kind(option.type, _limits(option.name))


_WORDS = {
    int: "whole number", float: "number", str: "text", bool: "`true`, `false`", dict: "mapping",
    type(None): "`null`",
}  # fmt: skip


def _kind(kind: Any, of_numbers: str = "") -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(_kind(part, of_numbers) for part in args)
    if origin is list:
        inner = _kind(args[0])
        return f"list of {inner}" + ("s" if inner in _WORDS.values() else "")
    words = _WORDS[origin or kind]
    return words + (of_numbers if kind in (int, float) else "")


def _limits(name: str) -> str:
    found = limits(name)
    smallest = " above 0" if found.above_zero else ""
    if found.smallest is not None:
        smallest = f" from {_number(found.smallest)}"
    return smallest + (f" to {_number(found.largest)}" if found.largest is not None else "")


def _number(value: float) -> str:
    power = round(math.log2(value)) if value >= 2**31 else 0
    if power and value in (2**power, 2**power - 1):
        return f"2^{power}" + (" - 1" if value < 2**power else "")
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


if __name__ == "__main__":
    sys.stdout.write(option_reference())
