"""The options of a run: one dataclass a section.

Names, meanings and defaults live here and nowhere else; `--help` is made from them. What values
no run could use, `config_problems` says. This module imports neither torch nor jsonargparse, so
that a command can answer `--help` at once and a library user can build a `Config` in Python.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5_fsdp.errors import UserError

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the output head


class _Options:
    """Takes no attribute that is no option: a misspelt one would be lost silently."""

    if not TYPE_CHECKING:  # else a type checker would take any name

        def __setattr__(self, name: str, value: Any) -> None:
            known = [field.name for field in dataclasses.fields(self)]
            if name not in known:
                raise UserError(_unknown_attribute(type(self).__name__, name, known))
            super().__setattr__(name, value)


def _unknown_attribute(owner: str, name: str, known: list[str]) -> str:
    section = owner.removesuffix("Config").lower()
    dotted = f"{section}.{name}" if section else name
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"unknown option {dotted}; did you mean {dotted.removesuffix(name)}{near[0]}?"
    return f"unknown option {dotted}; {section or 'a configuration'} has {', '.join(known)}"


@dataclass
class ModelConfig(_Options):
    """Which T5 and which tokenizer."""

    name: str | None = "google-t5/t5-small"
    """Hub id, Hugging Face folder, or a checkpoint of ours (weights only: a warm start)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null: the default branch."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained: the weights of `name`; random: fresh weights, drawn from `seed`."""
    config: dict[str, Any] = field(default_factory=dict)
    """T5 configuration values to override, e.g. {"dropout_rate": 0.0}. With init random and name
    null it describes the whole model; vocab_size (the tokenizer's size rounded up to 128), pad,
    eos and decoder start come from the tokenizer unless given. On the command line
    --model.config.d_model 64 changes one value, and --model.config '{...}' replaces all that a
    file says."""
    tokenizer: str | None = None
    """null: as `name`; a folder or Hub id; or train: a SentencePiece vocabulary learned from the
    training split."""
    tokenizer_vocab_size: int = 8000
    """Pieces of a trained tokenizer, special tokens included; read only with tokenizer: train."""
    attention: Literal["sdpa", "sdpa_per_layer", "eager"] = "sdpa"
    """sdpa: torch's fused attention, position bias and mask added once a stack; sdpa_per_layer: as
    transformers does it, anew in each layer; eager: plain matrix products."""
    adapter: Literal["lora"] | None = None
    """lora: freeze the model and train a pair of low-rank matrices beside its linear layers
    (docs/lora.md); null: train the model itself."""
    lora_rank: int = 16
    """lora: rank of a pair; a layer of in x out weights gets rank x (in + out) trained ones."""
    lora_alpha: float = 32.0
    """lora: the product of a pair counts lora_alpha / lora_rank times."""
    lora_dropout: float = 0.0
    """lora: dropout on the input of a pair while training, below 1."""
    lora_targets: list[str] | str = "all-linear"
    """lora: the layers that get a pair, by the ends of their names, e.g. [q, v]; all-linear: every
    linear layer but the output head."""


@dataclass
class DataConfig(_Options):
    """Where the documents and summaries come from and how long they may be."""

    source: Literal["wikihow", "files", "hub", "saved", "sample"] = "wikihow"
    """wikihow: the official CSV; files: your own; hub: a dataset of the Hugging Face Hub; saved: a
    folder of datasets' save_to_disk; sample: the bundled how-tos. Naming a dataset means hub."""
    path: str = "data/wikihow"
    """wikihow: folder with wikihowAll.csv and, if at hand, all_{train,val,test}.txt."""
    wikihow_version: Literal["all", "sep"] = "all"
    """wikihow: all: a row an article (wikihowAll.csv); sep: a row a step (wikihowSep.csv)."""
    wikihow_rules: Literal["official", "repair"] = "official"
    """wikihow: official: as published results; repair: also mends the joints and titles that the
    official rules miss."""
    dataset: str | None = None
    """hub: dataset id, or one of wikihow, cnn_dailymail, xsum, samsum, whose columns are known;
    saved: the folder."""
    subset: str | None = None
    """hub: configuration name of the dataset."""
    train_split: str = "train"
    """hub, saved: name of the training split."""
    validation_split: str | None = "validation"
    """hub, saved: name of the validation split; null: none."""
    test_split: str | None = "test"
    """hub, saved: name of the test split; null: none."""
    train_files: list[str] | str = field(default_factory=list)
    """files: csv, jsonl, json (each also .gz) or parquet; a path, a folder, a pattern such as
    part-*.jsonl, or a list of them."""
    validation_files: list[str] | str = field(default_factory=list)
    """files: as train_files, for the validation split."""
    test_files: list[str] | str = field(default_factory=list)
    """files: as train_files, for the test split."""
    document_column: str = "document"
    """Column (files, hub, saved) that holds the text to summarize."""
    summary_column: str = "summary"
    """Column (files, hub, saved) that holds the reference summary; a list of texts is joined by
    newlines."""
    on_bad_row: Literal["strict", "tolerant"] = "strict"
    """strict: a malformed row stops everything, with its file and number; tolerant: it is left out
    and counted."""
    prefix: str = "summarize: "
    """Text put before each document that does not begin with it, as T5 was trained with."""
    keep_newlines: bool = False
    """Teach the lines of the summaries: a newline becomes a reserved token of the vocabulary (T5's
    cannot write newlines) and again a newline in predictions."""
    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Several sources at once: a list of mappings, each with options of this section that differ
    (source, files, columns, prefix ...), a name, and a weight: its share of the examples of an
    epoch relative to the others' (left out everywhere: each example once)."""
    streaming: bool = False
    """Read the training files (or the Hub) while training, without preparing them: for data larger
    than the disk. Needs train.max_steps; docs/data.md says what it gives up."""
    shuffle_buffer: int = 10000
    """streaming: examples from which the next one is drawn at random."""
    max_source_tokens: int = 512
    """Longest source in tokens, prefix and end mark included; longer ones are cut."""
    max_target_tokens: int = 150
    """Longest target in tokens, end mark included; longer ones are cut."""
    max_train_examples: int | None = None
    """Use only the first so many examples of the training split; null: all."""
    max_validation_examples: int | None = None
    """As max_train_examples, for the validation split."""
    max_test_examples: int | None = None
    """As max_train_examples, for the test split."""
    cache_dir: str | None = None
    """Where prepared (tokenized) data is kept; null: .cache beside run_dir."""


@dataclass
class ParallelConfig(_Options):
    """How the model is spread over devices."""

    engine: Literal["fsdp2", "fsdp1", "ddp"] = "fsdp2"
    """fsdp2: torch's fully_shard; fsdp1: FullyShardedDataParallel; ddp: a whole copy on every
    rank."""
    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] | None = None
    """full_shard: parameters, gradients and optimizer state; shard_grad_op: parameters stay
    gathered between forward and backward; hybrid_shard: sharded within replicas; no_shard: whole
    copies. null: full_shard for fsdp1 and fsdp2, no_shard for ddp."""
    wrap: Literal["block", "size"] = "block"
    """What is gathered together, a unit: block: each block of the stacks, as the model names them
    (one that names none is wrapped by size); size: the smallest modules with enough parameters of
    their own."""
    wrap_min_parameters: int = 1_000_000
    """wrap: size: a module becomes a unit when it has so many parameters that are in no smaller
    unit; what is left over stays gathered throughout the step."""
    num_replicas: int | None = None
    """hybrid_shard: groups that hold a whole copy; null: one a node."""
    param_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of forward and backward; master weights stay float32. fp16: with dynamic loss
    scaling; pretrained T5s overflow it."""
    reduce_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    """Precision of the gradient reduction between ranks."""
    initial_loss_scale: float = 65536.0
    """fp16: factor on the loss in the backward pass at step 1, a power of two; it is halved when a
    gradient overflows (the step is skipped), doubled after 2000 steps without, and resumed."""
    tf32: bool = False
    """Compute float32 matrix products in TF32 on GPUs: 10 bits of mantissa, up to 8 times as fast;
    without a GPU it changes nothing."""
    activation_checkpointing: Literal["none", "selective", "full"] = "full"
    """full: recompute T5 blocks in the backward pass instead of keeping their activations;
    selective: keep their matrix products and attention outputs, recompute the rest."""
    activation_checkpointing_stack: Literal["both", "encoder", "decoder"] = "both"
    """Which stack's blocks are recomputed."""
    activation_checkpointing_every: int = 1
    """Recompute every n-th block of a stack only."""
    cpu_offload: bool = False
    """Keep shards in host memory between uses."""
    reshard_after_forward: bool | int | None = None
    """fsdp2: free the gathered parameters after the forward pass of a block; a number: keep them
    sharded over so many ranks. null: as the sharding says."""
    forward_prefetch: int = 0
    """Blocks whose parameters are gathered ahead, in forward and backward (fsdp1: 0 or 1, forward
    only); 0: the engine's own order."""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    """fsdp1: gather the next block before or after the gradients of the current one, or never."""
    limit_all_gathers: bool = True
    """fsdp1: let the host run at most two blocks ahead of the device."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of the last one only: more communication,
    but no unsharded float32 gradients in memory between micro-batches (large models)."""
    compile: bool = False
    """torch.compile the T5 blocks (needs a C++ compiler on a CPU); see train.width_multiple."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: generated kernels; aot_eager: torch's own ones, to find out what compiling breaks.
    """
    explain: bool = False
    """Say which units the model is sharded by: parameters, and bytes of them on a rank."""

    @property
    def uses_fp16(self) -> bool:
        """Whether gradients pass through fp16, so that they have to be scaled."""
        return "fp16" in (self.param_dtype, self.reduce_dtype)

    @property
    def frees_units(self) -> bool:
        """Whether the gathered parameters of a unit are freed after its forward pass."""
        if self.engine == "ddp" or self.sharding in ("shard_grad_op", "no_shard"):
            return False
        return self.reshard_after_forward is not False


@dataclass
class OptimizerConfig(_Options):
    """The optimizer."""

    name: Literal["adamw", "adafactor"] = "adamw"
    """adamw: 8 more bytes a parameter; adafactor: T5's own (T5X's defaults): next to none, and lr
    is relative to a parameter's root mean square. T5's recipe: adafactor, lr 1e-3, grad_clip_norm
    null, schedule.name constant."""
    lr: float = 1e-4
    """Peak learning rate."""
    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    """adamw: precision of the moments between steps. bf16: 4 bytes a parameter instead of 8,
    stochastically rounded."""
    weight_decay: float = 0.0
    """Decoupled weight decay: a step takes off learning rate x weight_decay x weight, with either
    optimizer; norms and biases get none."""
    grad_clip_norm: float | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. null: no clipping."""


@dataclass
class ScheduleConfig(_Options):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "linear"
    """Shape after warm-up; linear and cosine reach 0 behind the run's last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""


@dataclass
class TrainConfig(_Options):
    """Length of the run and shape of its batches."""

    epochs: float = 3
    """Passes over the training split; may be a fraction."""
    max_steps: int | None = None
    """Most optimizer steps; training ends at epochs or max_steps, whichever comes first."""
    global_batch_size: int = 128
    """Examples in one optimizer step, however many devices there are."""
    micro_batch_tokens: int = 8192
    """Most padded tokens on one device at a time: rows x (longest source + longest target)."""
    batching: Literal["length_grouped", "shuffled"] = "length_grouped"
    """length_grouped: examples of like length share a batch (less padding), in random order."""
    width_multiple: int | None = None
    """Widths of a micro-batch (longest source, longest target) are rounded up to a multiple of
    this, by padding; null: 32 with parallel.compile, so that compiled blocks meet few shapes, else
    1."""
    label_smoothing: float = 0.0
    """Share of each target's weight that is spread over the vocabulary; the logged loss is without
    it."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's denominator, which keeps logits small (T5X: 1e-4);
    the logged loss is without it."""
    loss_chunk_rows: int | None = None
    """Target tokens whose logits are computed together; null: as many as make 256 MiB."""
    skip_nonfinite_steps: int | None = None
    """Steps in a row whose loss or gradient is not finite that are skipped (weights and optimizer
    stay as they are, the data goes on) before the run stops; null: 0, with fp16 25."""
    collective_timeout_seconds: int = 1800
    """A rank that waits longer than this for another one fails."""


@dataclass
class CheckpointConfig(_Options):
    """When checkpoints are written, which are kept, and where the run goes on."""

    every_steps: int | None = 500
    """Steps between checkpoints; null: only at the end (and at a new best or an interruption)."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: int = 1
    """Best checkpoints (by evaluation.best_metric) that are kept as well; 0: none."""
    keep_every: int | None = None
    """Checkpoints of the multiples of so many steps are kept as well; null: none for that."""
    every_minutes: float | None = None
    """Minutes between checkpoints, beside every_steps; null: steps alone count."""
    async_save: bool = True
    """Copy the tensors to host memory and let training go on while the files are written; false:
    wait for them."""
    export_at_end: bool = False
    """When the run is done, write its best checkpoint (else its last) as a Hugging Face folder to
    run_dir/hf, as export_hf does."""
    resume: str = "auto"
    """auto: go on from the newest complete checkpoint of run_dir, if any; never: refuse when there
    is one; or a checkpoint folder to go on from."""
    accept_changed: list[Literal["data", "tokenizer"]] = field(default_factory=list)
    """What may differ from the checkpoint that a run goes on from: data, tokenizer. The place in
    the data is kept as a number of steps, so an epoch may then repeat or miss examples."""


@dataclass
class EvaluationConfig(_Options):
    """Validation during training, and how summaries are generated anywhere."""

    every_steps: int | None = 500
    """Steps between validations; null: only at the last step."""
    max_examples: int | None = 500
    """Validation examples used during training (a fixed random choice); null: all."""
    batch_tokens: int = 16384
    """Most padded source tokens x beams in one generation batch of a device."""
    num_beams: int = 4
    """Beams of the beam search; 1: greedy."""
    max_new_tokens: int = 150
    """Longest generated summary in tokens."""
    length_penalty: float = 1.0
    """Exponent on the length in beam search; above 0 favours longer summaries."""
    min_new_tokens: int = 0
    """Shortest generated summary in tokens."""
    no_repeat_ngram_size: int = 0
    """No summary holds the same so many tokens in a row twice; 0: they may."""
    do_sample: bool = False
    """Draw tokens at random (seeded) instead of taking the likeliest."""
    temperature: float = 1.0
    """With do_sample: below 1 likelier tokens are favoured more."""
    top_k: int = 0
    """With do_sample: only the so many likeliest tokens are drawn from; 0: all."""
    top_p: float = 1.0
    """With do_sample: only the likeliest tokens of so much probability together are drawn from."""
    batch_examples: int | None = None
    """Most examples in one generation batch of a device; null: as batch_tokens allows."""
    generation_mode: Literal["auto", "gather", "sharded"] = "auto"
    """gather: each rank gets the whole model once and decodes by itself; sharded: a block's weights
    are gathered for every token, which is slow but fits; auto: gather where the whole model fits
    into what memory is free."""
    best_metric: str = "rougeLsum"
    """What makes a checkpoint the best: highest ROUGE (rouge1, rouge2, rougeL, rougeLsum), lowest
    validation loss (loss), or the highest of a metric of one's own (docs/library.md)."""
    early_stopping_patience: int | None = None
    """Validations in a row without a new best by best_metric after which the run ends; null: never
    before its last step."""
    early_stopping_min_delta: float = 0.0
    """By how much more than this a new best must be better, in the unit of best_metric (ROUGE is
    between 0 and 1)."""
    rouge_preset: Literal["default", "t5", "hf", "pegasus"] = "default"
    """default: with stemmer, ROUGE-Lsum by the lines of a text, else by its sentences; t5, hf,
    pegasus: as the T5 repository, transformers' run_summarization.py or PEGASUS score
    (docs/evaluation.md)."""
    rouge_tokenizer: Literal["default", "unicode"] = "default"
    """What ROUGE counts as words: default: rouge-score's, of a-z and 0-9 only; unicode: of any
    script, and single characters where a script has no spaces (Chinese, Japanese, Thai)."""
    references: Literal["best", "average"] = "best"
    """For examples with several references (predictions files): the best score of each metric, or
    the average."""


@dataclass
class LoggingConfig(_Options):
    """What is written about the run."""

    every_steps: int = 10
    """Steps between rows of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard events below run_dir/tensorboard."""
    wandb: bool = False
    """Log to Weights & Biases; offline, into run_dir/wandb, where this machine is not logged in
    (docs/trackers.md)."""
    mlflow: bool = False
    """Log to MLflow: to MLFLOW_TRACKING_URI, else into run_dir/mlflow."""
    trackio: bool = False
    """Log to trackio: to TRACKIO_SPACE_ID or TRACKIO_DIR, else into run_dir/trackio."""
    project: str | None = None
    """Of W&B and trackio; in MLflow the experiment. null: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME,
    else t5-fsdp."""
    run_name: str | None = None
    """How wandb, mlflow and trackio list the run; null: as its folder is called."""
    num_summaries: int = 3
    """Validation examples, always the same, that are shown with document, reference, summary and
    ROUGE at each validation, in the log and in TensorBoard; 0: none."""
    profile: list[int] = field(default_factory=list)
    """Steps, e.g. [10, 11], of each of which every rank writes a trace of torch's profiler into
    run_dir/profile, for Perfetto or chrome://tracing; not the first: it is no usual one."""
    memory_snapshot: bool = False
    """On GPUs: write snapshots of what takes up memory into run_dir/memory, after the step that
    took most and when memory runs out, for pytorch.org/memory_viz."""


@dataclass
class Config(_Options):
    """All options of a run."""

    run_dir: str = "runs/t5"
    """Folder for everything the run writes."""
    seed: int = 1
    """Seed of random weights, data order and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


BEST_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum", "loss")
# Widths of compiled blocks: a multiple of what tensor cores and fused attention like.
COMPILED_WIDTH_MULTIPLE = 32


def width_multiple(config: Config) -> int:
    """Of which number the widths of micro-batches are multiples, see `TrainConfig`."""
    if config.train.width_multiple is not None:
        return config.train.width_multiple
    return COMPILED_WIDTH_MULTIPLE if config.parallel.compile else 1


def cache_dir(config: Config) -> Path:
    """Where prepared data is kept: data.cache_dir, or .cache beside run_dir."""
    return Path(config.data.cache_dir or Path(config.run_dir).parent / ".cache")


def to_dict(config: Any) -> dict[str, Any]:
    """A (section of a) configuration as plain nested dicts, lists and scalars."""
    return dataclasses.asdict(config)


def normalize(config: Config) -> Config:
    """Turn short forms into long ones, in place: a path into a list, ~ into the home folder."""
    config.run_dir = os.path.expanduser(config.run_dir)
    if config.data.cache_dir:
        config.data.cache_dir = os.path.expanduser(config.data.cache_dir)
    if isinstance(config.model.lora_targets, str) and config.model.lora_targets != ALL_LINEAR:
        config.model.lora_targets = [config.model.lora_targets]
    _normalize_data(config.data)
    return config


def _normalize_data(data: DataConfig) -> None:
    data.path = os.path.expanduser(data.path)
    for name in ("train_files", "validation_files", "test_files"):
        value = getattr(data, name)
        if isinstance(value, str):
            setattr(data, name, [value])
    if data.dataset is not None and data.source == DataConfig.source:
        data.source = "hub"
    if data.source != "hub":
        return
    if data.dataset == "wikihow":  # the Hub's loader for it is gone
        data.source, data.dataset = "wikihow", None
    elif preset := _PRESETS.get(data.dataset or ""):
        for name, value in preset.items():
            # What the user gave wins.
            if name == "dataset" or getattr(data, name) == getattr(DataConfig, name):
                setattr(data, name, value)


# Datasets of which a user need not know the columns.
_PRESETS: dict[str, dict[str, str]] = {
    "cnn_dailymail": {
        "dataset": "abisee/cnn_dailymail",
        "subset": "3.0.0",
        "document_column": "article",
        "summary_column": "highlights",
    },
    "xsum": {"dataset": "EdinburghNLP/xsum"},
    "samsum": {"dataset": "knkarthick/samsum", "document_column": "dialogue"},
}


def leaves(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten the sections of a configuration dict to {"section.option": value}."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not prefix:
            flat.update(leaves(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def mixture_part(data: DataConfig, entry: dict[str, Any]) -> DataConfig:
    """The options of one source of a mixture: those of `data`, overridden by its own."""
    options = {name: value for name, value in entry.items() if name not in ("name", "weight")}
    own = dataclasses.replace(data, mixture=[], **options)
    _normalize_data(own)
    return own
