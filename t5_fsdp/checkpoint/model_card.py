"""README.md of an exported model: what it is, how to use it, and the run's own figures.

The Hub reads the front matter (https://huggingface.co/docs/hub/model-cards). Every figure comes
from the checkpoint or a file of its run's folder; what is not known there is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5_fsdp.checkpoint.format import RunState, folder_name, read_state
from t5_fsdp.config import DataConfig, EvaluationConfig
from t5_fsdp.data.tokenization import NEWLINE_TOKEN, load_tokenizer, newline_id
from t5_fsdp.model.adapter import LoraAdapter

_METRICS = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
}
_SPLITS = ("test", "validation")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class _Run:
    """What is known about the run of a checkpoint; an empty mapping for what is not.

    Attributes:
        options: its configuration, as nested dicts.
        environment, audit: environment.json and data_audit.json.
        row: the `train` row of metrics.jsonl at the checkpoint's step.
        rouge: rouge.json of the checkpoint's step, by split.
    """

    state: RunState
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    audit: Mapping[str, Any]
    row: Mapping[str, Any]
    rouge: Mapping[str, Mapping[str, Any]]

    def section(self, name: str) -> Mapping[str, Any]:
        """One section of the options."""
        return _mapping(self.options.get(name))


def write_card(
    folder: Path,
    name: str,
    checkpoint: Path,
    config: Mapping[str, Any],
    generation: EvaluationConfig,
    data: DataConfig,
    *,
    dtype: str = "fp32",
    adapter: LoraAdapter | None = None,
) -> None:
    """Write README.md about `checkpoint` into an exported folder.

    Args:
        name: of the model; a repository's id, or of a folder.
        config: what the run was configured with, as nested dicts.
        generation, data: the settings with which the exported model is used.
        adapter: the folder holds it alone.
    """
    run = _read_run(checkpoint, config)
    newline = newline_id(load_tokenizer(str(folder)), data.keep_newlines) is not None
    parts = [
        f"# {name.rpartition('/')[2]}",
        _introduction(run, dtype, adapter),
        "## Use",
        _snippet(run, name, generation, data, newline, adapter),
        *_results(run),
        *_training(run),
    ]
    text = f"---\n{_front_matter(run, name, adapter)}\n---\n\n" + "\n\n".join(parts) + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _read_run(checkpoint: Path, config: Mapping[str, Any]) -> _Run:
    state, run_dir = read_state(checkpoint), checkpoint.absolute().parent.parent
    evaluation = run_dir / "evaluation" / folder_name(state.step)
    if state.step == 0:  # converted: of the configuration nothing but the model was used
        config = {"model": config.get("model")}
    if checkpoint.absolute().parent.name != "checkpoints" or state.weights_only:
        return _Run(state, config, {}, {}, {}, {})
    return _Run(
        state=state,
        options=config,
        environment=_read(run_dir / "environment.json"),
        audit=_read(run_dir / "data_audit.json"),
        row=_train_row(run_dir / "metrics.jsonl", state.step),
        rouge={split: _read(evaluation / split / "rouge.json") for split in _SPLITS},
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _train_row(path: Path, step: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = _mapping(json.loads(line))
            if row.get("kind") == "train" and row.get("step") == step:
                found = row
    except (OSError, ValueError):
        pass
    return found


# ---------------------------------------------------------------- what it is made from


def _base_on_hub(run: _Run) -> str | None:
    """The Hub id of the model that was fine-tuned, if it came from there."""
    model = run.section("model")
    name = model.get("name")
    if model.get("init") != "pretrained" or not isinstance(name, str):
        return None
    # A path of another machine looks like an id; its first folder is often here as well.
    is_path = Path(name).exists() or ("/" in name and Path(name.partition("/")[0]).exists())
    return name if _HUB_ID.fullmatch(name) and not is_path else None


def _datasets_on_hub(run: _Run) -> list[str]:
    """Their ids, each once; of a mixture those of its sources."""
    data = run.section("data")
    parts = [{**data, **_mapping(entry)} for entry in data.get("mixture") or [{}]]
    found = [part.get("dataset") for part in parts if part.get("source") == "hub"]
    return list(dict.fromkeys(str(name) for name in found if name))


def _describe_data(run: _Run, split: str = "train") -> str:
    data = run.section("data")
    mixture = data.get("mixture") or []
    if mixture:
        names = [str(_mapping(entry).get("name", "unnamed")) for entry in mixture]
        return f"a mixture of {len(names)} sources: {', '.join(names)}"
    source = data.get("source")
    if source == "hub":
        return " ".join(str(data[key]) for key in ("dataset", "subset") if data.get(key))
    if source == "wikihow":
        return f"WikiHow ({data.get('wikihow_version')})"
    if source == "sample":
        return "the sample of templated how-tos that t5_fsdp bundles"
    # Folders may say more about a machine than its owner wants to publish.
    paths = [data.get("dataset")]
    if source == "files":
        paths = data.get(f"{split}_files") or data.get("train_files") or []
    return ", ".join(Path(str(path)).name for path in paths) or str(source)


def _introduction(run: _Run, dtype: str, adapter: LoraAdapter | None) -> str:
    base, model = _base_on_hub(run), run.section("model")
    if base is not None:
        what = f"[{base}](https://huggingface.co/{base})"
    elif model.get("init") == "pretrained" and model.get("name"):
        what = f"A local model (`{Path(str(model['name'])).name}`)"
    else:
        what = f"A {run.state.model['config']['model_type']} model with random weights"
    text = f"{what}, converted by t5_fsdp without training"
    if run.state.step > 0:
        verb = "trained" if model.get("init") == "random" else "fine-tuned"
        text = (
            f"{what}, {verb} for summarization with t5_fsdp (PyTorch Fully Sharded Data Parallel). "
            f"These are the weights of step {run.state.step:,}"
        )
    if adapter is not None:
        return f"{text}: a LoRA adapter alone, which needs its base."
    return f"{text}, in {_DTYPE_NAMES[dtype]}."


def _snippet(
    run: _Run,
    name: str,
    generation: EvaluationConfig,
    data: DataConfig,
    newline: bool,
    adapter: LoraAdapter | None,
) -> str:
    lines = ["from transformers import AutoModelForSeq2SeqLM, AutoTokenizer", ""]
    loaded = f"AutoModelForSeq2SeqLM.from_pretrained({name!r})"
    if adapter is not None:
        base = _base_on_hub(run) or Path(str(run.section("model").get("name"))).name
        lines.insert(0, "from peft import PeftModel")
        lines.append(f"base = AutoModelForSeq2SeqLM.from_pretrained({base!r})")
        loaded = f"PeftModel.from_pretrained(base, {name!r})"
    settings = (
        f"num_beams={generation.num_beams}, max_new_tokens={generation.max_new_tokens}, "
        f"length_penalty={generation.length_penalty}"
    )
    lines += [
        f"model = {loaded}",
        f"tokenizer = AutoTokenizer.from_pretrained({name!r})",
        f'text = {data.prefix!r} + open("article.txt").read()',
        f"batch = tokenizer(text, max_length={data.max_source_tokens}, truncation=True, "
        'return_tensors="pt")',
        f"summary = model.generate(**batch, {settings})[0]",
    ]
    if newline:
        lines += [
            f'newline = tokenizer.convert_tokens_to_ids("{NEWLINE_TOKEN}")',
            "lines = [[]]",
            "for token in summary.tolist():",
            "    lines.append([]) if token == newline else lines[-1].append(token)",
            'print("\\n".join(tokenizer.batch_decode(lines, skip_special_tokens=True)))',
        ]
    else:
        lines.append("print(tokenizer.decode(summary, skip_special_tokens=True))")
    return "\n".join(["```python", *lines, "```"])


# ---------------------------------------------------------------- figures


def _scores(run: _Run, split: str) -> dict[str, float]:
    """ROUGE F-measures, 0 to 1, of the checkpoint's step: of its evaluation, else validation."""
    evaluated = _mapping(run.rouge.get(split, {}).get("scores"))
    scores: dict[str, Any] = {
        metric: _mapping(evaluated[metric]).get("fmeasure")
        for metric in _METRICS
        if metric in evaluated
    }
    if not scores and split == "validation":
        figures = run.state.scores.get(str(run.state.step), {})
        scores = {metric: figures.get(metric) for metric in _METRICS}
    return {name: value for name, value in scores.items() if _is_finite(value)}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _results(run: _Run) -> list[str]:
    rows = []
    for split in _SPLITS:
        if scores := _scores(run, split):
            examples = run.rouge.get(split, {}).get("examples")
            count = f"{examples:,}" if isinstance(examples, int) else ""
            rows.append((split, count, *(_points(scores.get(metric)) for metric in _METRICS)))
    if not rows:
        return []
    return [
        "## Results",
        _table(("split", "examples", *_METRICS.values()), rows),
        "F-measures of rouge-score, 0 to 100.",
    ]


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def _training(run: _Run) -> list[str]:
    if run.state.step == 0:
        return []
    return ["## Training", _table(("", ""), _training_rows(run))]


def _training_rows(run: _Run) -> list[tuple[str, str]]:
    """(what, figure) of what is known."""
    optimizer, schedule = run.section("optimizer"), run.section("schedule")
    parallel, train, model = run.section("parallel"), run.section("train"), run.section("model")
    sizes = {
        split: _mapping(figures).get("kept")
        for split, figures in _mapping(run.audit.get("splits")).items()
    }
    loss = run.state.scores.get(str(run.state.step), {}).get("loss")
    precision = parallel.get("param_dtype")
    rows: list[tuple[str, Any]] = [
        ("data", _describe_data(run)),
        ("examples", ", ".join(f"{count:,} {split}" for split, count in sizes.items()
                               if isinstance(count, int))),
        ("longest source, target", _pair(run.section("data"), "max_source_tokens",
                                         "max_target_tokens", " tokens")),
        ("steps", f"{run.state.step:,}"),
        ("epochs", _number(run.row.get("epoch"), ".4g")),
        ("examples seen", _number(run.row.get("examples_seen"), ",")),
        ("global batch size", _number(train.get("global_batch_size"), ",")),
        ("optimizer", optimizer.get("name")),
        ("peak learning rate", _number(optimizer.get("lr"), "g")),
        ("schedule", _pair(schedule, "name", "warmup_steps", " warm-up steps")),
        ("precision", precision and f"{precision} compute, float32 master weights"),
        ("sharding", _engine(parallel)),
        ("adapter", model.get("adapter") and f"lora, rank {model.get('lora_rank')}, "
                                             f"alpha {model.get('lora_alpha')}"),
        ("validation loss", f"{loss:.4f} nats a token" if _is_finite(loss) else None),
        ("hardware", _hardware(run)),
        ("software", _software(run)),
    ]  # fmt: skip
    return [(what, str(value)) for what, value in rows if value not in (None, "")]


def _engine(parallel: Mapping[str, Any]) -> str | None:
    parts = [parallel.get("engine"), parallel.get("sharding")]
    return ", ".join(str(part) for part in parts if part) or None


def _pair(section: Mapping[str, Any], first: str, second: str, unit: str) -> str | None:
    values = (section.get(first), section.get(second))
    return None if None in values else f"{values[0]}, {values[1]}{unit}"


def _number(value: Any, style: str) -> str | None:
    return format(value, style) if _is_finite(value) else None


def _hardware(run: _Run) -> str | None:
    count, device = (run.environment.get(name) for name in ("world_size", "device"))
    return f"{count} x {device}" if count and device else None


def _software(run: _Run) -> str:
    found = {"python": run.environment.get("python"), **run.state.versions}
    known = {name: version for name, version in found.items() if version}
    return ", ".join(f"{n} {v}" for n, v in known.items() if v != "not installed")


def _table(header: tuple[str, ...], rows: list[Any]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )


def _front_matter(run: _Run, name: str, adapter: LoraAdapter | None) -> str:
    """The card's YAML; the Hub shows the results that are in it."""
    from huggingface_hub import EvalResult, ModelCardData

    datasets = _datasets_on_hub(run)
    dataset = datasets[0] if len(datasets) == 1 and not run.section("data").get("mixture") else None
    base = _base_on_hub(run)
    results = [
        EvalResult(
            task_type="summarization",
            dataset_type=dataset or str(run.section("data").get("source") or "unknown"),
            dataset_name=_describe_data(run, split),
            dataset_config=run.section("data").get("subset") if dataset else None,
            dataset_split=split,
            metric_type="rouge",
            metric_name=label,
            metric_value=round(100 * scores[metric], 2),
        )
        for split in _SPLITS
        if (scores := _scores(run, split))
        for metric, label in _METRICS.items()
        if metric in scores
    ]
    card = ModelCardData(
        base_model=base,
        datasets=datasets or None,
        eval_results=results or None,
        library_name="transformers" if adapter is None else "peft",
        model_name=name.rpartition("/")[2] if results else None,  # part of the results
        pipeline_tag="summarization",
        tags=["summarization", str(run.state.model["config"]["model_type"])],
    )
    return card.to_yaml()
