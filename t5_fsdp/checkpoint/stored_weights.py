"""Reading a checkpoint's tensors: by one process, or each rank its own part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from t5_fsdp.checkpoint.format import read_state
from t5_fsdp.checkpoint.safe_reader import SafePlanner, SafeReader
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import StateDict, build_on_meta, unique_state_dict
from t5_fsdp.parallel.common import clean_name


def read_weights(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> StateDict:
    """The full float32 weights on the CPU, by one process, without a process group.

    Args:
        folder: a complete checkpoint.
        wanted: whether to read a tensor, by its name.

    Raises:
        UserError: as `check_complete`, or the weights are not the model's.
    """
    stored = StoredWeights(folder)
    return stored.read([name for name in stored if wanted(name)])


class StoredWeights(Mapping[str, torch.Tensor]):
    """A complete checkpoint's full float32 weights, read by one process when they are asked for.

    Raises:
        UserError: as `read_weights`, when it is made or read from.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors = unique_state_dict(build_on_meta(read_state(folder).spec))
        self._reader = _CachedReader(folder)

    def read(self, names: Sequence[str]) -> StateDict:
        """Several at once, which is faster."""
        weights = {name: torch.empty_like(self._tensors[name], device="cpu") for name in names}
        load_tensors({"model": weights}, self._folder, no_dist=True, reader=self._reader)
        return weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _CachedReader(SafeReader):
    """Reads what the files hold once, not for each tensor anew."""

    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read a complete checkpoint's weights into a materialized model, on any layout; a collective.

    Each rank reads its own part. The optimizer's state is left alone: a warm start.

    Raises:
        UserError: the files can't be read or belong to another model.
    """
    weights = model_tensors(model)
    load_tensors({"model": weights}, folder, no_dist=False)
    set_model_state_dict(model, with_shared_names(model, weights))


def load_tensors(
    state: dict[str, Any], folder: Path, no_dist: bool, reader: dcp.StorageReader | None = None
) -> None:
    """Read a checkpoint's files into the tensors of `state`.

    Args:
        no_dist: by this process alone, not by all ranks together.
        reader: of `folder`, where one is kept for several calls.

    Raises:
        UserError: the files can't be read or belong to another model.
    """
    try:
        dcp.load(
            state,
            storage_reader=reader or SafeReader(folder),
            planner=SafePlanner(),
            no_dist=no_dist,
        )
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        raise UserError(
            f"the checkpoint {folder} can't be read ({reason[:200]}); use another checkpoint"
        ) from error


def model_tensors(model: nn.Module) -> dict[str, Any]:
    """This rank's parts of parameters and persistent buffers, as torch.distributed stores them."""
    # torch lists a shared weight under all its names; one is enough.
    names = {clean_name(name) for name, _ in (*model.named_parameters(), *model.named_buffers())}
    full = get_model_state_dict(model)
    return {name: tensor for name, tensor in full.items() if name in names}


def with_shared_names(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Put back the further names of shared weights, which torch's strict loading asks for."""
    first_name: dict[int, str] = {}
    full = dict(weights)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        clean = clean_name(name)
        original = first_name.setdefault(id(parameter), clean)
        full[clean] = weights[original]
    return full
