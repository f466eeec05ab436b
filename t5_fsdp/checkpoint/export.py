"""From a sharded checkpoint to a Hugging Face or PEFT folder or one file, on the CPU.

One process does it, tensor by tensor, so that a large model is never in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from t5_fsdp.checkpoint.exported_options import DATA_OPTIONS, GENERATION_OPTIONS, SAMPLING_OPTIONS
from t5_fsdp.checkpoint.format import TOKENIZER, checkpoint_digest, read_state
from t5_fsdp.checkpoint.model_card import write_card
from t5_fsdp.checkpoint.stored_weights import StoredWeights, read_weights
from t5_fsdp.checkpoint.verification import Verification, verify
from t5_fsdp.config import DataConfig, EvaluationConfig
from t5_fsdp.errors import UserError
from t5_fsdp.files import check_new, copy_files, new_folder, write_json
from t5_fsdp.model.adapter import is_adapter, peft_state_dict
from t5_fsdp.model.build import ModelSpec, StateDict, build_on_meta, fit_adapter, unique_state_dict
from t5_fsdp.model.safetensors_files import write_tensors
from t5_fsdp.parallel.common import DTYPES

_ORIGIN = "t5_fsdp.json"  # marks a folder as written here, and says from which checkpoint


def check_replaceable(output: Path, option: str) -> None:
    """Raises UserError unless there is nothing at `output`, or a folder that an export has made."""
    if not os.path.lexists(output):
        return
    ours = output.is_dir() and ((output / _ORIGIN).is_file() or not any(output.iterdir()))
    if output.is_symlink() or not ours:
        raise UserError(
            f"{option} {output} is there already and no export of this program; move it away"
        )


def is_export_of(output: Path, checkpoint: Path) -> bool:
    """Whether `output` was exported from a checkpoint."""
    try:
        origin = json.loads((output / _ORIGIN).read_text(encoding="utf-8"))
        return origin["checkpoint_digest"] == checkpoint_digest(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is written as a Hugging Face folder.

    Attributes:
        name: of the model, for its card.
        dtype: of the weights: fp32, bf16 or fp16.
        max_shard_bytes: of one file of weights.
        verify: compare the logits with the checkpoint's before the folder gets its name.
    """

    name: str
    dtype: str = "fp32"
    max_shard_bytes: int = 5 * 10**9
    verify: bool = False


def export_to_hf(
    checkpoint: Path,
    output: Path,
    config: Mapping[str, Any],
    generation: EvaluationConfig,
    data: DataConfig,
    options: ExportOptions,
    *,
    option: str = "--output",
    replace: bool = False,
) -> Verification | None:
    """Write weights, configuration, generation settings, tokenizer and model card to `output`.

    An adapter is merged into the weights.

    Args:
        checkpoint: a complete one.
        output: a new or empty folder.
        config: what the run was configured with, as nested dicts, for the model card.
        generation: becomes the model's defaults for `generate`.
        data: prefix, length and keep_newlines are stored with the model.
        option: that named `output`, for messages.
        replace: `output` may be an earlier export.

    Raises:
        UserError: the checkpoint is not sound, `output` can't be written or is there already, or
            the weights do not fit the dtype.
        VerificationError: the folder computes something else than the checkpoint.
    """
    (check_replaceable if replace else check_new)(output, option)
    spec, layout, weights = _plain_weights(checkpoint, options.dtype)
    with new_folder(output, option, replace=replace) as partial:
        _write_model_files(partial, spec, options.dtype, generation, data)
        copy_files(checkpoint / TOKENIZER, partial)
        _write_shards(partial, layout, weights, options.max_shard_bytes)
        write_json(partial / _ORIGIN, {"checkpoint_digest": checkpoint_digest(checkpoint)})
        write_card(partial, options.name, checkpoint, config, generation, data, dtype=options.dtype)
        return verify(checkpoint, partial, options.dtype) if options.verify else None


def _plain_weights(
    checkpoint: Path, dtype: str
) -> tuple[ModelSpec, StateDict, Mapping[str, torch.Tensor]]:
    """The model without adapter, the shapes and dtypes of its tensors, and their values."""
    stored = read_state(checkpoint).spec
    plain = stored.without_adapter()
    weights = fit_adapter(StoredWeights(checkpoint), stored.adapter, plain, seed=0)
    to = DTYPES[dtype]
    layout = {
        name: tensor.to(to) if tensor.is_floating_point() else tensor
        for name, tensor in unique_state_dict(build_on_meta(plain)).items()
    }
    return plain, layout, _CastWeights(weights, layout)


class _CastWeights(Mapping[str, torch.Tensor]):
    """Weights in the dtypes of a layout, read when asked for.

    Raises:
        UserError: a weight is beyond the dtype's largest number.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], layout: StateDict) -> None:
        self._weights, self._layout = weights, layout

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, dtype = self._weights[name], self._layout[name].dtype
        cast = weight.to(dtype)
        if dtype == torch.float16 and bool((cast.isinf() & weight.isfinite()).any()):
            largest = float(weight.abs().max())
            raise UserError(
                f"--dtype fp16: {name} has a weight of size {largest:.4g}, and fp16 ends at 65504; "
                "give --dtype bf16"
            )
        return cast

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def _write_model_files(
    folder: Path, spec: ModelSpec, dtype: str, generation: EvaluationConfig, data: DataConfig
) -> None:
    """config.json and generation_config.json."""
    model = build_on_meta(spec)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(DTYPES[dtype]).removeprefix("torch.")
    # Where T5 keeps what a pipeline puts before a text.
    model.config.task_specific_params = {
        "summarization": {name: getattr(data, name) for name in DATA_OPTIONS}
    }
    names = GENERATION_OPTIONS + (SAMPLING_OPTIONS if generation.do_sample else ())
    model.generation_config.update(**{name: getattr(generation, name) for name in names})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    _state_own_head(folder / "config.json", spec.own_head)


def _write_shards(
    folder: Path, layout: StateDict, weights: Mapping[str, torch.Tensor], max_bytes: int
) -> None:
    """The weights as transformers names them: one file, or several and an index."""
    split = split_torch_state_dict_into_shards(layout, max_shard_size=max_bytes)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: layout[name] for name in names}, weights)
    if split.is_sharded:
        count = sum(tensor.numel() for tensor in layout.values())
        index = {
            "metadata": {"total_parameters": count, **split.metadata},
            "weight_map": dict(sorted(split.tensor_to_filename.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _state_own_head(config_file: Path, own_head: bool) -> None:
    # transformers writes "tied" for every T5; older releases and other programs believe it and
    # would throw the head away.
    values = json.loads(config_file.read_text(encoding="utf-8"))
    values["tie_word_embeddings"] = not own_head
    config_file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_to_file(checkpoint: Path, output: Path, dtype: str = "fp32") -> None:
    """Write all weights to one safetensors file under the model's own names, a shared one once.

    An adapter is merged into the weights.

    Args:
        checkpoint: a complete one.
        output: a new file.

    Raises:
        UserError: as `export_to_hf`.
    """
    check_new(output, "--output")
    _, layout, weights = _plain_weights(checkpoint, dtype)
    partial = output.with_name(f".{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(partial, layout, weights)
        os.replace(partial, output)
    except OSError as error:
        raise UserError(f"--output {output} can't be written ({error})") from None
    finally:
        with contextlib.suppress(OSError):  # must not hide the first error
            partial.unlink(missing_ok=True)


def export_adapter(
    checkpoint: Path,
    output: Path,
    config: Mapping[str, Any],
    generation: EvaluationConfig,
    data: DataConfig,
    name: str,
) -> None:
    """Write the adapter alone to `output`, as peft does, with the tokenizer and a model card.

    `PeftModel.from_pretrained(base, output)` loads it.

    Args:
        checkpoint: a complete one.
        output: a new or empty folder.
        config: what the run was configured with; its model is stored as the base.
        name: of the model, for its card.

    Raises:
        UserError: the checkpoint is not sound or has no adapter, or `output` can't be written or is
            there already.
    """
    check_new(output, "--output")
    adapter = read_state(checkpoint).spec.adapter
    if adapter is None:
        raise UserError(
            f"--format adapter: {checkpoint} holds no adapter; leave it out to export the model"
        )
    base = config.get("model") or {}
    peft_config = adapter.peft_config(
        base_model_name_or_path=base.get("name"),
        revision=base.get("revision"),
        inference_mode=True,
    )
    pairs = peft_state_dict(read_weights(checkpoint, is_adapter))
    with new_folder(output, "--output") as partial:
        peft_config.save_pretrained(str(partial))
        write_tensors(partial / "adapter_model.safetensors", pairs, pairs)
        copy_files(checkpoint / TOKENIZER, partial)
        write_card(partial, name, checkpoint, config, generation, data, adapter=adapter)
