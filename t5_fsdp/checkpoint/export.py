"""From a sharded checkpoint to a Hugging Face folder, in one process, on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from t5_fsdp.checkpoint.format import TOKENIZER, read_state
from t5_fsdp.checkpoint.manager import read_weights
from t5_fsdp.config import DataConfig, EvaluationConfig
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import build_with_weights

# In task_specific_params, where T5 keeps its prefix: an export is evaluated as it was trained.
_DATA_OPTIONS = ("prefix", "keep_newlines", "max_source_tokens")
_GENERATION_OPTIONS = ("num_beams", "max_new_tokens", "length_penalty")


def export_to_hf(
    checkpoint: Path, output: Path, generation: EvaluationConfig, data: DataConfig
) -> None:
    """Write float32 weights, configuration, generation settings and tokenizer to `output`.

    Args:
        checkpoint: a complete one.
        output: a new or empty folder.
        generation: becomes the model's defaults for `generate`.
        data: prefix, length and keep_newlines are stored with the model.

    Raises:
        UserError: the checkpoint is not sound, or `output` exists and is not an empty folder.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} exists and is not empty; give a new folder")
    state = read_state(checkpoint)
    model = build_with_weights(state.spec, read_weights(checkpoint))
    model.generation_config.update(
        **{name: getattr(generation, name) for name in _GENERATION_OPTIONS}
    )
    # Where T5 keeps what a pipeline puts before a text.
    model.config.task_specific_params = {
        "summarization": {name: getattr(data, name) for name in _DATA_OPTIONS}
    }
    partial = output.with_name(f".{output.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        shutil.copytree(checkpoint / TOKENIZER, partial, dirs_exist_ok=True)
        _state_own_head(partial / "config.json", state.spec.own_head)
        for path in partial.iterdir():
            shutil.copymode(partial / "config.json", path)  # safetensors writes for the owner only
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
