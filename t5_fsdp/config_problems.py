"""Which values of options no run could use, and which exclude each other: the checks that need no
file and no model.
"""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from t5_fsdp.config import (
    ALL_LINEAR,
    BEST_METRICS,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    leaves,
    mixture_part,
    to_dict,
)

# Smallest value each numeric option may take (inclusive, null always passes).
_MINIMUM: dict[str, float] = {
    "seed": 0,
    "model.tokenizer_vocab_size": 110,
    "model.lora_rank": 1,
    "model.lora_dropout": 0,
    "data.max_source_tokens": 2,
    "data.max_target_tokens": 2,
    "data.max_train_examples": 1,
    "data.max_validation_examples": 1,
    "data.max_test_examples": 1,
    "parallel.wrap_min_parameters": 1,
    "parallel.num_replicas": 1,
    "parallel.forward_prefetch": 0,
    "parallel.initial_loss_scale": 1,
    "parallel.activation_checkpointing_every": 1,
    "data.shuffle_buffer": 1,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "schedule.warmup_steps": 0,
    "train.max_steps": 1,
    "train.global_batch_size": 1,
    "train.micro_batch_tokens": 1,
    "train.width_multiple": 1,
    "train.label_smoothing": 0,
    "train.z_loss": 0,
    "train.loss_chunk_rows": 1,
    "train.skip_nonfinite_steps": 0,
    "train.collective_timeout_seconds": 1,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 1,
    "checkpoint.keep_best": 0,
    "evaluation.every_steps": 1,
    "evaluation.max_examples": 1,
    "evaluation.batch_tokens": 1,
    "evaluation.num_beams": 1,
    "evaluation.max_new_tokens": 1,
    "evaluation.min_new_tokens": 0,
    "evaluation.no_repeat_ngram_size": 0,
    "evaluation.length_penalty": -20,  # an exponent, which must not overflow
    "evaluation.temperature": 0.01,  # logits are divided by it
    "evaluation.top_k": 0,
    "evaluation.batch_examples": 1,
    "evaluation.early_stopping_patience": 1,
    "evaluation.early_stopping_min_delta": 0,
    "logging.every_steps": 1,
    "logging.num_summaries": 0,
}


_MAXIMUM: dict[str, float] = {
    "seed": 2**63 - 1,
    "train.epochs": 1e9,
    "train.width_multiple": 1024,
    "train.label_smoothing": 0.99,
    "evaluation.top_p": 1.0,
    "evaluation.length_penalty": 20,
    "parallel.initial_loss_scale": 2**32,
    "model.lora_alpha": 1e6,
    "train.z_loss": 1.0,
    "logging.num_summaries": 100,
}


_LARGEST = 2**31 - 1  # of every other whole number


# These must be larger than zero: a run with none of it does nothing.
_POSITIVE = (
    "model.lora_alpha", "optimizer.grad_clip_norm", "train.epochs", "checkpoint.every_minutes",
    "evaluation.top_p",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a numeric option may be; None: no limit of its own.

    Attributes:
        smallest: allowed itself.
        largest: likewise.
        above_zero: 0 and less are not allowed.
    """

    smallest: float | None
    largest: float | None
    above_zero: bool


def limits(name: str) -> Limits:
    """Those of an option by its dotted name."""
    return Limits(_MINIMUM.get(name), _MAXIMUM.get(name), name in _POSITIVE)


def value_problems(config: Config, own_metrics: Collection[str] | None = ()) -> list[str]:
    """Every value that no run could use, one line each; types are taken as right already.

    Args:
        own_metrics: names beside ours that evaluation.best_metric may have; None: any.
    """
    flat = leaves(to_dict(config))
    return [
        *_range_problems(flat),
        *_text_problems(flat),
        *_combination_problems(config),
        *best_metric_problems(config.evaluation, own_metrics),
    ]


def best_metric_problems(
    evaluation: EvaluationConfig, own_metrics: Collection[str] | None
) -> list[str]:
    """What is wrong with `evaluation.best_metric`; as of `value_problems`."""
    name = evaluation.best_metric
    if not name.strip():
        return [f"evaluation.best_metric is empty; give one of {', '.join(BEST_METRICS)}"]
    if own_metrics is None or name in BEST_METRICS or name in own_metrics:
        return []
    known = [*BEST_METRICS, *own_metrics]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return [f"evaluation.best_metric is {name!r}; give one of {', '.join(known)}{hint}"]


def _range_problems(flat: dict[str, Any]) -> list[str]:
    problems = []
    for name, value in flat.items():
        if isinstance(value, dict | list):
            odd = [x for x in _scalars(value) if isinstance(x, float) and not math.isfinite(x)]
            problems += [f"{name} holds {odd[0]}; give finite numbers"] if odd else []
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            problems.append(f"{name} is {value}; give a finite number")
        elif name in _MINIMUM and value < _MINIMUM[name]:
            problems.append(f"{name} is {value}; the smallest allowed value is {_MINIMUM[name]}")
        elif value > (largest := _largest(name, value)):
            problems.append(f"{name} is {value}; the largest allowed value is {largest}")
        elif name in _POSITIVE and value <= 0:
            problems.append(f"{name} is {value}; give a number above 0")
    return problems


def _scalars(value: Any) -> Iterator[Any]:
    """What is in lists and mappings, however deep, or the value itself; names included."""
    if not isinstance(value, dict | list):
        yield value
        return
    for inner in [*value, *value.values()] if isinstance(value, dict) else value:
        yield from _scalars(inner)


def _largest(name: str, value: float) -> float:
    return _MAXIMUM.get(name, _LARGEST if isinstance(value, int) else math.inf)


def _text_problems(flat: dict[str, Any]) -> list[str]:
    """Texts that can be no path, name or prefix."""
    problems = []
    for name, value in flat.items():
        for text in _scalars(value):
            if isinstance(text, str) and re.search("[\x00\ud800-\udfff]", text):
                problems.append(f"{name} is {text!r}, which holds a NUL or half a character")
    return problems


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return "null" if value is None else str(value)


def _combination_problems(config: Config) -> list[str]:
    model, data = config.model, config.data
    problems = []
    if not config.run_dir.strip():
        problems.append("run_dir is empty; give a folder, e.g. runs/my-run")
    for name in ("name", "tokenizer", "revision"):
        if getattr(model, name) == "":
            problems.append(f"model.{name} is empty; give a name, or null")
    for name in ("project", "run_name"):
        value = getattr(config.logging, name)
        if value is not None and not value.strip():
            problems.append(f"logging.{name} is empty; give a name, or null")
    if model.revision is not None and model.name is None:
        problems.append("model.revision is only with model.name; set it to null")
    if model.init == "pretrained" and model.name is None:
        problems.append(
            "model.init: pretrained needs model.name (a Hub id or folder); "
            "for fresh weights set model.init: random"
        )
    if model.name is None and model.tokenizer is None:
        problems.append(
            "model.tokenizer and model.name are both null; give model.tokenizer: a folder, a "
            "Hub id, or train"
        )
    if model.tokenizer == "train" and model.init == "pretrained":
        problems.append(
            "model.tokenizer: train with model.init: pretrained would give the pretrained weights "
            "another vocabulary; set model.init: random or model.tokenizer: null"
        )
    problems += _adapter_problems(model)
    if model.adapter is not None and config.parallel.compile and config.parallel.engine == "fsdp1":
        problems.append(
            "parallel.compile with model.adapter is not for parallel.engine: fsdp1, where the "
            "adapter's matrices are units inside compiled blocks; use parallel.engine: fsdp2"
        )
    problems += _data_problems(data)
    problems += sharding_problems(config.parallel, config.optimizer)
    problems += _generation_problems(config.evaluation)
    if data.streaming and config.train.max_steps is None:
        problems.append(
            "data.streaming needs train.max_steps: how many examples there are is not known before"
        )
    if data.streaming and model.tokenizer == "train":
        problems.append(
            "model.tokenizer: train reads all training texts first; train it in a run without "
            "data.streaming, then give its folder"
        )
    every, keep_every = config.checkpoint.every_steps, config.checkpoint.keep_every
    if keep_every is not None and every is None and config.checkpoint.every_minutes is None:
        problems.append(
            "checkpoint.keep_every needs checkpoint.every_steps (or every_minutes): without them "
            "there is only the last checkpoint; set it to null"
        )
    if keep_every is not None and every is not None and keep_every % every:
        problems.append(
            f"checkpoint.keep_every {keep_every} is no multiple of checkpoint.every_steps {every}: "
            "no checkpoint is written there; give a multiple"
        )
    problems += _early_stopping_problems(config.evaluation)
    for step in config.logging.profile:
        if step < 1:
            problems.append(f"logging.profile names step {step}; the first step is 1")
    if not config.checkpoint.resume:
        problems.append("checkpoint.resume is empty; give auto, never or a checkpoint folder")
    return problems


def _generation_problems(evaluation: EvaluationConfig) -> list[str]:
    problems = []
    if evaluation.min_new_tokens > evaluation.max_new_tokens:
        problems.append(
            f"evaluation.min_new_tokens is {evaluation.min_new_tokens}, more than "
            f"evaluation.max_new_tokens ({evaluation.max_new_tokens}); lower it"
        )
    for name in ("temperature", "top_k", "top_p"):
        value, neutral = getattr(evaluation, name), getattr(EvaluationConfig, name)
        if value != neutral and not evaluation.do_sample:
            problems.append(
                f"evaluation.{name} is only with evaluation.do_sample: true; set it to {neutral}"
            )
    return problems


def _early_stopping_problems(evaluation: EvaluationConfig) -> list[str]:
    patience, min_delta = evaluation.early_stopping_patience, evaluation.early_stopping_min_delta
    problems = []
    if patience is not None and evaluation.every_steps is None:
        problems.append(
            f"evaluation.early_stopping_patience is {patience}, but with evaluation.every_steps: "
            "null the only validation is at the last step; give every_steps a number, or set "
            "early_stopping_patience to null"
        )
    if patience is None and min_delta != EvaluationConfig.early_stopping_min_delta:
        problems.append(
            f"evaluation.early_stopping_min_delta is {min_delta}, but nothing stops early; set it "
            "to 0.0, or give evaluation.early_stopping_patience"
        )
    return problems


def validation_problems(evaluation: EvaluationConfig, parallel: ParallelConfig) -> list[str]:
    """What a training can't do in its validation; `eval_rouge` shards in its own way."""
    if evaluation.generation_mode != "sharded" or parallel.frees_units:
        return []
    if parallel.engine == "ddp":
        setting = "engine: ddp"
    elif parallel.reshard_after_forward is False:
        setting = "reshard_after_forward: false"
    else:
        setting = f"sharding: {parallel.sharding}"
    return [
        "evaluation.generation_mode: sharded saves no memory in a training with parallel."
        f"{setting}, where each rank has the whole model while it generates; use gather"
    ]


def _adapter_problems(model: ModelConfig) -> list[str]:
    problems = []
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"):
        value, default = getattr(model, name), getattr(ModelConfig, name)
        if model.adapter is None and value != default:
            problems.append(
                f"model.{name} is {_yaml(value)}, but the model gets no adapter; set it to "
                f"{_yaml(default)}, or model.adapter: lora"
            )
    if model.lora_dropout >= 1:
        problems.append(
            f"model.lora_dropout is {model.lora_dropout}, which leaves nothing to train on; give a "
            "number below 1"
        )
    targets = model.lora_targets
    if not all([targets] if isinstance(targets, str) else targets or [""]):
        problems.append(
            "model.lora_targets has no name, or an empty one; give names of linear layers, e.g. "
            f"[q, v], or {ALL_LINEAR}"
        )
    return problems


def _data_problems(data: DataConfig) -> list[str]:
    problems = []
    if data.mixture:
        problems += _mixture_problems(data)
    else:
        problems += _source_problems(data)
    if data.streaming and data.source in ("wikihow", "sample"):
        problems.append(
            f"data.streaming is for data.source files, hub or saved, not {data.source}; set it to "
            "false"
        )
    if data.streaming and data.mixture:
        problems.append("data.streaming and data.mixture exclude each other; leave one of them out")
    return problems


def _source_problems(data: DataConfig) -> list[str]:
    problems = []
    if data.source == "files" and not data.train_files:
        problems.append("data.source: files needs data.train_files")
    if data.source == "hub" and data.dataset is None:
        problems.append("data.source: hub needs data.dataset, e.g. cnn_dailymail")
    if data.source not in ("hub", "saved") and data.dataset is not None:
        problems.append("data.dataset is only for data.source: hub or saved; set it to null")
    if data.source != "hub" and data.subset is not None:
        problems.append("data.subset is only for data.source: hub; set it to null")
    if data.source in ("files", "hub", "saved"):
        problems += _column_problems(data)
    return problems


def _column_problems(data: DataConfig) -> list[str]:
    problems = []
    if data.document_column == data.summary_column:
        problems.append(
            f"data.document_column and data.summary_column are both {data.document_column!r}; give "
            "the names of two columns"
        )
    for name in ("document_column", "summary_column"):
        if getattr(data, name) in ("", "id"):
            problems.append(
                f"data.{name} is {getattr(data, name)!r}; give the name of a column with texts "
                "(id is that of the examples' names)"
            )
    return problems


# Of the options that a mixture's source may have of its own.
_MIXTURE_OPTIONS = (
    "source", "path", "wikihow_version", "wikihow_rules", "dataset", "subset", "train_split",
    "validation_split", "test_split", "train_files", "validation_files", "test_files",
    "document_column", "summary_column", "on_bad_row", "prefix", "max_train_examples",
    "max_validation_examples", "max_test_examples",
)  # fmt: skip


def _mixture_problems(data: DataConfig) -> list[str]:
    problems = []
    for number, entry in enumerate(data.mixture):
        place = f"data.mixture, source {number}"
        if not all(isinstance(name, str) for name in entry):
            problems.append(f"{place}: {list(entry)} are its options; give names")
            continue
        for name, value in entry.items():
            if name == "weight":
                number_like = isinstance(value, int | float) and not isinstance(value, bool)
                if not (number_like and 0 < value <= _LARGEST):
                    problems.append(f"{place}: weight is {value}; give a number above 0")
            elif name == "name":
                continue
            elif name not in _MIXTURE_OPTIONS:
                problems.append(
                    f"{place}: {name} is none of name, weight, {', '.join(_MIXTURE_OPTIONS)}"
                )
            elif problem := _mixture_value_problem(name, value):
                problems.append(f"{place}: {problem}")
        if not problems:
            own = mixture_part(data, entry)
            problems += [f"{place}: {problem}" for problem in _source_problems(own)]
    weights = ["weight" in entry for entry in data.mixture]
    if any(weights) and not all(weights):
        problems.append("data.mixture: give every source a weight, or none of them")
    return problems


def _mixture_value_problem(name: str, value: Any) -> str | None:
    hint = typing.get_type_hints(DataConfig)[name]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if choices:
        wanted = f"one of {', '.join(choices)}"
        good = value in choices
    elif name.endswith("_files"):
        wanted = "a path or a list of paths"
        paths = value if isinstance(value, list) else [value]
        good = all(isinstance(path, str) for path in paths)
    elif name.startswith("max_"):
        wanted = "a whole number above 0, or null"
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        good = value is None or is_count
    else:
        optional = type(None) in typing.get_args(hint)
        wanted = "a text, or null" if optional else "a text"
        good = isinstance(value, str) or (optional and value is None)
    return None if good else f"{name} is {value!r}; give {wanted}"


_SHARDINGS = {
    "fsdp2": ("full_shard", "shard_grad_op", "hybrid_shard"),
    "fsdp1": ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard"),
    "ddp": ("no_shard",),
}


# Options that only these engines read, and the value at which they change nothing.
_ENGINE_OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "wrap": (("fsdp1", "fsdp2"), "block"),
    "cpu_offload": (("fsdp1", "fsdp2"), False),
    "reshard_after_forward": (("fsdp2",), None),
    "forward_prefetch": (("fsdp1", "fsdp2"), 0),
    "backward_prefetch": (("fsdp1",), "pre"),
    "limit_all_gathers": (("fsdp1",), True),
}


@dataclass(frozen=True)
class IdleOption:
    """An option of `parallel` that the others leave without effect.

    Attributes:
        name: within its section.
        neutral: the value that it has to have.
        problem: what is said of any other.
    """

    name: str
    neutral: Any
    problem: str


def idle_options(parallel: ParallelConfig) -> list[IdleOption]:
    """Options that are set, but do nothing with the others as they are."""
    return [
        IdleOption(name, neutral, f"parallel.{name} {why}")
        for name, neutral, why in _idle(parallel)
        if getattr(parallel, name) != neutral
    ]


def _idle(parallel: ParallelConfig) -> Iterator[tuple[str, Any, str]]:
    """(name, neutral value, why it does nothing and the remedy) of all, set or not."""
    if parallel.sharding != "hybrid_shard":
        yield "num_replicas", None, "is only for parallel.sharding: hybrid_shard; set it to null"
    for name, (engines, neutral) in _ENGINE_OPTIONS.items():
        if parallel.engine not in engines:
            only = f"is only for parallel.engine: {' or '.join(engines)}"
            yield name, neutral, f"{only}; set it to {_yaml(neutral)}"
    if parallel.sharding == "shard_grad_op":
        decides = "is what parallel.sharding: shard_grad_op decides; set one of them to null"
        yield "reshard_after_forward", None, decides
    if parallel.wrap == "block":
        smallest = ParallelConfig.wrap_min_parameters
        why = f"is only for parallel.wrap: size; set it to {smallest}"
        yield "wrap_min_parameters", smallest, why
    if parallel.activation_checkpointing == "none":
        for name, neutral in (("stack", "both"), ("every", 1)):
            option = f"activation_checkpointing_{name}"
            why = f"is {getattr(parallel, option)}, but nothing is recomputed; set it to {neutral}"
            yield option, neutral, f"{why}, or parallel.activation_checkpointing: full"
    if not parallel.compile:
        backend = ParallelConfig.compile_backend
        why = f"is only with parallel.compile: true; set it to {backend}"
        yield "compile_backend", backend, why


def sharding_problems(parallel: ParallelConfig, optimizer: OptimizerConfig) -> list[str]:
    """What excludes each other in these two sections, one line each."""
    return _parallel_problems(parallel) + _optimizer_problems(optimizer, parallel)


def _parallel_problems(parallel: ParallelConfig) -> list[str]:
    problems = []
    engine, sharding = parallel.engine, parallel.sharding
    if sharding is not None and sharding not in _SHARDINGS[engine]:
        other = "ddp" if sharding == "no_shard" else "fsdp2"
        problems.append(
            f"parallel.sharding: {sharding} does not exist for parallel.engine: {engine} (it has "
            f"{', '.join(_SHARDINGS[engine])}); use parallel.engine: {other}"
        )
    problems += [option.problem for option in idle_options(parallel)]
    if parallel.compile and parallel.wrap == "size":
        problems.append(
            "parallel.compile is for parallel.wrap: block: a unit inside a compiled block would be "
            "gathered in the middle of it; set parallel.wrap: block, or parallel.compile: false"
        )
    if engine == "fsdp1" and parallel.forward_prefetch > 1:
        problems.append(
            f"parallel.forward_prefetch is {parallel.forward_prefetch}; parallel.engine: fsdp1 "
            "knows 0 and 1"
        )
    scale = parallel.initial_loss_scale
    if scale != ParallelConfig.initial_loss_scale and not parallel.uses_fp16:
        problems.append(
            f"parallel.initial_loss_scale is {scale}, but nothing is computed in fp16; leave it out"
        )
    if math.isfinite(scale) and scale >= 1 and math.frexp(scale)[0] != 0.5:
        problems.append(f"parallel.initial_loss_scale is {scale}; give a power of two, e.g. 65536")
    if engine == "ddp" and parallel.reduce_dtype != "fp32":
        problems.append("parallel.engine: ddp reduces in fp32; set parallel.reduce_dtype: fp32")
    return problems


def _optimizer_problems(optimizer: OptimizerConfig, parallel: ParallelConfig) -> list[str]:
    if optimizer.name != "adafactor":
        return []
    problems = []
    if optimizer.moments_dtype != "fp32":
        problems.append(
            f"optimizer.moments_dtype: {optimizer.moments_dtype} is only for optimizer.name: "
            "adamw; set it to fp32"
        )
    if parallel.engine == "fsdp1" and parallel.sharding != "no_shard":
        problems.append(
            "optimizer.name: adafactor needs whole rows, and parallel.engine: fsdp1 cuts matrices "
            "into flat pieces; use parallel.engine: fsdp2, or parallel.sharding: no_shard"
        )
    return problems
