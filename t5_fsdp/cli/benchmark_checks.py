"""What `benchmark` refuses before it measures anything, and what depends on the machine."""

from __future__ import annotations

import json
import re
from typing import Any

from t5_fsdp.config import ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.files import check_writable
from t5_fsdp.packages import is_installed

REFERENCE = "bare"
# Of modes that take some. Of data so many that tokenizing outweighs starting up, and transformers'
# sampler sorts as large groups as it ever does.
EXAMPLES = {"generate": 256, "data": 10_000}
_AT_LEAST = {
    **dict.fromkeys(
        ("world_size", "global_batch_size", "micro_batch_tokens", "max_source_tokens",
         "max_target_tokens", "source_tokens", "target_tokens", "rounds", "steps", "threads",
         "examples", "num_beams", "max_new_tokens"),
        1,
    ),
    "warmup_steps": 0,
    "seed": 0,
}  # fmt: skip
_AT_MOST = {"seed": 2**32 - 1, "global_batch_size": 2**16}  # numpy's seeds; memory of random ids
_MOST_PROCESSES_A_CORE = 8
# What a mode imports beside torch and transformers, here or in a command that it starts.
_NEEDS = {
    "generate": ("accelerate", "rouge_score", "sentencex"),
    "data": ("datasets", "docstring_parser", "jsonargparse", "pyarrow"),
    "startup": ("docstring_parser", "jsonargparse", "pyarrow", "sentencepiece"),
}


def settle(options: Any, model: dict[str, Any]) -> None:
    """Fill in what was left out and depends on the machine: device, ranks, threads, contestants.

    Args:
        options: as parsed; gets `model`, and `contestants` as a list.
        model: what --model_config changes.

    Raises:
        UserError: an option's value can't be measured with, or a package or a GPU is missing; all
            that can be told without torch at once.
    """
    if options.suite is not None and options.mode is not None:
        raise UserError(f"--suite {options.suite} takes the place of --mode; leave one out")
    options.mode = options.mode or "train"
    problems = _number_problems(options) + _suite_problems(options) + _json_problems(options, model)
    if options.suite is None:
        problems += _mode_problems(options) + _installation_problems(options)
    if problems:
        raise UserError(*problems)
    options.model = {**model, **json.loads(options.model_config)}
    if options.mode == "train" and options.suite is None:
        _settle_contestants(options)
    _settle_ranks(options)
    if options.suite is None:
        _check_model(options)
    _check_files(options)


def _number_problems(options: Any) -> list[str]:
    if options.examples is None:
        options.examples = EXAMPLES.get(options.mode)
    problems = []
    for name, least in _AT_LEAST.items():
        value, most = getattr(options, name), _AT_MOST.get(name)
        if value is not None and value < least:
            problems.append(f"--{name} is {value}; give a whole number from {least} on")
        elif value is not None and most is not None and value > most:
            problems.append(f"--{name} is {value}; give {most} at most")
    return problems


def _suite_problems(options: Any) -> list[str]:
    from t5_fsdp.benchmark.gpu_suite import chosen_rows

    if options.limit_seconds is not None and not options.limit_seconds > 0:
        return [f"--limit_seconds is {options.limit_seconds}; give a number above 0"]
    try:
        chosen = chosen_rows(options.only)
    except re.error as error:
        return [f"--only {options.only} is no regular expression ({error}); mend it"]
    return [] if chosen else [f"--only {options.only} matches no row; run it without, to see them"]


def _json_problems(options: Any, model: dict[str, Any]) -> list[str]:
    text = options.model_config
    try:
        values = json.loads(text)
    except ValueError as error:
        return [f'--model_config {text} is no JSON ({error}); quote names, as {{"d_model": 512}}']
    if not isinstance(values, dict):
        return [f'--model_config {text} is no mapping; give e.g. {{"d_model": 512}}']
    if "model_type" in values:
        return ["--model_config has a model_type, but all contestants train a T5; leave it out"]
    vocab = values.get("vocab_size", model["vocab_size"])
    # Random ids leave out those of padding, end and the unknown mark.
    if not isinstance(vocab, int) or vocab < 8:
        return [f"vocab_size of --model_config is {vocab!r}; give a whole number above 7"]
    return []


def _mode_problems(options: Any) -> list[str]:
    """The options that a mode needs, or that belong together."""
    problems = []
    if options.mode == "data":
        if options.tokenizer is None:
            problems.append("--mode data needs --tokenizer, a folder or Hub id")
    elif options.mode == "generate":
        if options.texts is None:
            problems.append("--mode generate needs --texts, a jsonl file")
        if options.checkpoint is None and options.tokenizer is None:
            problems.append("--mode generate needs --checkpoint, or --tokenizer for random weights")
    elif (options.texts is None) != (options.tokenizer is None):
        problems.append("--texts and --tokenizer belong together; give both, or none")
    if options.checkpoint is not None and not options.checkpoint.is_dir():
        problems.append(f"--checkpoint {options.checkpoint} is no folder; export_hf writes one")
    if options.folder is not None and not options.folder.is_dir():
        problems.append(f"--folder {options.folder} is no folder; make it, or leave it out")
    return problems


def _installation_problems(options: Any) -> list[str]:
    return [
        _missing(f"--mode {options.mode}", package)
        for package in _NEEDS.get(options.mode, ())
        if not is_installed(package)
    ]


def _missing(what: str, package: str) -> str:
    return (
        f"{what} needs the package {package}, which is not installed; install it, or this package "
        "with its extra [benchmark], which has all of them"
    )


def _settle_contestants(options: Any) -> None:
    """All that are installed, or those that were named, and the reference among them."""
    from t5_fsdp.benchmark.comparison import CONTESTANTS

    text, names = options.contestants, options.contestants.split(",")
    if text == "all":
        names = [name for name, contestant in CONTESTANTS.items() if not contestant.missing()]
    for name in names:
        if name not in CONTESTANTS or names.count(name) > 1:
            raise UserError(
                f"--contestants {text}: {name!r} is unknown or there twice; choose of "
                f"{', '.join(CONTESTANTS)}"
            )
        if package := CONTESTANTS[name].missing():
            raise UserError(_missing(f"--contestants {name}", package))
    if options.reference is None:
        options.reference = REFERENCE if REFERENCE in names else names[0]
    if options.reference not in names:
        raise UserError(
            f"--reference {options.reference} is not measured; give one of {', '.join(names)}"
        )
    options.contestants = names


def _settle_ranks(options: Any) -> None:
    from t5_fsdp.evaluation.workers import num_cores

    num_gpus = 0
    if options.device != "cpu":
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.suite == "gpu":
        options.world_size = 1
    elif options.world_size is None:
        options.world_size = num_gpus or 2
    if options.device == "auto":
        options.device = "cuda" if num_gpus >= options.world_size else "cpu"
    if options.suite == "gpu" and options.device == "cpu" and not options.tiny:
        raise UserError(
            "--suite gpu trains T5-large and T5-3B, and there is no GPU here; --tiny does the same "
            "with a model for any CPU"
        )
    if options.device == "cuda" and num_gpus < options.world_size:
        raise UserError(
            f"--device cuda with {options.world_size} processes, but there are {num_gpus} GPUs; "
            "lower --world_size, or give --device cpu"
        )
    most = _MOST_PROCESSES_A_CORE * num_cores()
    for name in ("world_size", "threads"):
        value = getattr(options, name)
        if options.device == "cpu" and value is not None and value > most:
            raise UserError(
                f"--{name} is {value}, but this machine has {num_cores()} cores; give {most} at "
                "most"
            )
    if options.mode == "train" and options.global_batch_size % options.world_size:
        raise UserError(
            f"--global_batch_size is {options.global_batch_size}, which {options.world_size} ranks "
            "can't share evenly, as other trainers have to; give a multiple of --world_size"
        )
    if options.threads is None and options.device == "cpu":
        options.threads = max(1, num_cores() // options.world_size)


def _check_model(options: Any) -> None:
    """That there is such a T5, or such a checkpoint, and the tokenizer that goes with it."""
    from t5_fsdp.data.tokenization import load_tokenizer
    from t5_fsdp.model.configuration import check_model, resolve_spec
    from t5_fsdp.model.pretrained import open_pretrained
    from t5_fsdp.planning.planned_model import KnownVocabulary

    if options.mode == "data":
        load_tokenizer(options.tokenizer)
    elif options.mode == "generate" and options.checkpoint is not None:
        named = ModelConfig(name=str(options.checkpoint))
        open_pretrained(named, resolve_spec(named, load_tokenizer(str(options.checkpoint))))
    elif options.mode != "startup":
        model = options.model
        try:
            made = ModelConfig(name=None, init="random", config=model)
            check_model(resolve_spec(made, KnownVocabulary(model["vocab_size"])), "sdpa")
        except UserError as error:
            words = (text.replace("model.config.", "") for text in error.problems)
            words = (text.replace("model.config", "it") for text in words)
            raise UserError(*(f"--model_config: {text}" for text in words)) from None


def _check_files(options: Any) -> None:
    """Last, since it makes their folders."""
    files = {name: getattr(options, name) for name in ("json", "markdown")}
    if files["json"] is not None and files["json"] == files["markdown"]:
        raise UserError(f"--json and --markdown are both {files['json']}; give two files")
    for name, path in files.items():
        if path is not None:
            check_writable(path, f"--{name}")
