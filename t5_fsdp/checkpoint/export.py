"""From a sharded checkpoint to a Hugging Face or PEFT folder, in one process, on the CPU."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from t5_fsdp.checkpoint.format import TOKENIZER, read_state
from t5_fsdp.checkpoint.manager import StoredWeights, read_weights
from t5_fsdp.config import DataConfig, EvaluationConfig, ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.model.adapter import is_adapter, peft_state_dict
from t5_fsdp.model.build import build_with_weights, fit_adapter

# In task_specific_params, where T5 keeps its prefix: an export is evaluated as it was trained.
_DATA_OPTIONS = ("prefix", "keep_newlines", "max_source_tokens")
_GENERATION_OPTIONS = ("num_beams", "max_new_tokens", "length_penalty")


def export_to_hf(
    checkpoint: Path, output: Path, generation: EvaluationConfig, data: DataConfig
) -> None:
    """Write float32 weights, configuration, generation settings and tokenizer to `output`.

    An adapter is merged into the weights.

    Args:
        checkpoint: a complete one.
        output: a new or empty folder.
        generation: becomes the model's defaults for `generate`.
        data: prefix, length and keep_newlines are stored with the model.

    Raises:
        UserError: the checkpoint is not sound, or `output` exists and is not an empty folder.
    """
    _check_new(output)
    spec = read_state(checkpoint).spec
    plain = spec.without_adapter()
    weights = fit_adapter(StoredWeights(checkpoint), spec.adapter, plain, seed=0)
    model = build_with_weights(plain, weights)
    model.generation_config.update(
        **{name: getattr(generation, name) for name in _GENERATION_OPTIONS}
    )
    # Where T5 keeps what a pipeline puts before a text.
    model.config.task_specific_params = {
        "summarization": {name: getattr(data, name) for name in _DATA_OPTIONS}
    }
    with _whole_or_nothing(output, "config.json") as partial:
        model.save_pretrained(partial)
        shutil.copytree(checkpoint / TOKENIZER, partial, dirs_exist_ok=True)
        _state_own_head(partial / "config.json", spec.own_head)


def export_adapter(checkpoint: Path, output: Path, model: ModelConfig) -> None:
    """Write the adapter alone to `output`, as peft does, and the tokenizer.

    `PeftModel.from_pretrained(base, output)` loads it.

    Args:
        checkpoint: a complete one.
        output: a new or empty folder.
        model: its name and revision are stored as the base's.

    Raises:
        UserError: the checkpoint is not sound or has no adapter, or `output` exists and is not an
            empty folder.
    """
    _check_new(output)
    adapter = read_state(checkpoint).spec.adapter
    if adapter is None:
        raise UserError(
            f"--adapter_only: {checkpoint} holds no adapter; leave it out to export the whole model"
        )
    config = adapter.peft_config(
        base_model_name_or_path=model.name, revision=model.revision, inference_mode=True
    )
    pairs = peft_state_dict(read_weights(checkpoint, is_adapter))
    with _whole_or_nothing(output, "adapter_config.json") as partial:
        config.save_pretrained(str(partial))
        save_file(pairs, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        shutil.copytree(checkpoint / TOKENIZER, partial, dirs_exist_ok=True)


def _check_new(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} exists and is not empty; give a new folder")


@contextlib.contextmanager
def _whole_or_nothing(output: Path, written: str) -> Iterator[Path]:
    """A folder to write into, which becomes `output` when nothing went wrong.

    Args:
        written: a file in it that is written in the ordinary way, of which all take the mode.
    """
    partial = output.with_name(f".{output.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        for path in partial.iterdir():
            shutil.copymode(partial / written, path)  # safetensors writes for the owner only
        if output.exists():
            output.rmdir()
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--output {output} can't be written ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _state_own_head(config_file: Path, own_head: bool) -> None:
    # transformers writes "tied" for every T5; older releases and other programs believe it and
    # would throw the head away.
    values = json.loads(config_file.read_text(encoding="utf-8"))
    values["tie_word_embeddings"] = not own_head
    config_file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def exported_options(folder: Path) -> dict[str, dict[str, Any]]:
    """The options, by section, that `export_to_hf` stored in a folder; {} for any other."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        stored = config["task_specific_params"]["summarization"]
        return {
            "data": {name: stored[name] for name in _DATA_OPTIONS},
            "evaluation": {name: generation[name] for name in _GENERATION_OPTIONS},
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
