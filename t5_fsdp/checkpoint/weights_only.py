"""A checkpoint that holds a model's weights and no optimizer state, written by one process.

A run can start warm from it (`model.name`), each rank reading its own part; `eval_rouge`,
`summarize` and `export_hf` take it as any other checkpoint. Plain torch.distributed.checkpoint
reads it too: `dcp.load({"model": {name: parameter, ...}}, checkpoint_id=folder)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from t5_fsdp.checkpoint.format import (
    CONFIG,
    STATE,
    TOKENIZER,
    RunState,
    files_below,
    write_complete,
)
from t5_fsdp.errors import UserError
from t5_fsdp.files import copy_files, new_folder
from t5_fsdp.model.build import build_on_meta, unique_state_dict


def write_weights(
    output: Path,
    weights: Mapping[str, torch.Tensor],
    state: RunState,
    config_yaml: str,
    tokenizer_dir: Path,
    *,
    option: str = "--output",
) -> None:
    """Write the checkpoint to a new folder; torch keeps what it has written in memory until then.

    Args:
        weights: float32, all of the model in `state`; read when asked for.
        state: marked as `weights_only` in the folder.
        option: how the user gave the folder, for messages.

    Raises:
        UserError: the folder can't be written, or is not new.
    """
    state = replace(state, weights_only=True)
    tensors = {"model": unique_state_dict(build_on_meta(state.spec))}
    with new_folder(output, option) as partial:
        writer = dcp.FileSystemWriter(partial)
        try:
            dcp.save(tensors, storage_writer=writer, planner=_Planner(weights), no_dist=True)
        except CheckpointException as error:  # no Exception
            raise _cause(error, f"{option} {output}") from error
        (partial / CONFIG).write_text(config_yaml, encoding="utf-8")
        (partial / STATE).write_text(json.dumps(vars(state), indent=1), encoding="utf-8")
        copy_files(tokenizer_dir, partial / TOKENIZER)
        write_complete(partial, files_below(partial), state.step, world_size=1, known={})


def _cause(error: CheckpointException, folder: str) -> BaseException:
    """What went wrong in writing, which torch wraps: a tensor that can't be read, or the disk."""
    [cause, *_] = [failure[0] for failure in error.failures.values()]
    if isinstance(cause, UserError):
        return cause
    return UserError(f"{folder} can't be written ({cause})")


class _Planner(DefaultSavePlanner):
    """torch's plan for saving tensors on the meta device, whose values come from elsewhere."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._weights[index.fqn.removeprefix("model.")]
