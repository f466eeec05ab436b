"""Sharded checkpoints of a run: written so that a crash at any moment loses nothing older.

A checkpoint is the folder `<run_dir>/checkpoints/step-00000500`. It exists when its COMPLETE file
does: that is written last, by rank 0, after every rank's files are on disk, and removed first.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError
from t5_fsdp.files import write_json
from t5_fsdp.model.build import ModelSpec, StateDict, build_on_meta, unique_state_dict
from t5_fsdp.parallel.common import clean_name

FORMAT_VERSION = 2
_BLOCK_BYTES = 1 << 22
COMPLETE, STATE, CONFIG, TOKENIZER = "COMPLETE", "state.json", "config.yaml", "tokenizer"
SCORES = "scores.json"  # of the validation after the checkpoint was written; may be missing
_DAMAGED = ".damaged"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass
class RunState:
    """What a checkpoint holds beside the tensors; no random state, see `seeding`.

    Attributes:
        step: finished optimizer steps; training goes on at step + 1.
        model: the model's `ModelSpec` as JSON.
        data_hash: of the training split's token ids, in order.
        tokenizer_hash: of the tokenizer's vocabulary.
        plan: the options that decide which examples a step holds.
        window: sums of the metrics row that is still open.
        scores: validation figures by step, for best checkpoints.
        versions: of the libraries.
        branched_from: the checkpoint that the run was told to go on from (`checkpoint.resume`).
        place: where a stream of training data goes on.
        prepared: folder of the prepared data, which evaluation uses again if it is there.
        loss_scale: of fp16, see `training.loss_scale`.
        skipped_in_a_row: steps up to this one that were skipped, not being finite.
    """

    step: int
    model: dict[str, Any]
    data_hash: str
    tokenizer_hash: str
    plan: dict[str, Any]
    window: dict[str, Any]
    scores: dict[str, dict[str, float]]
    versions: dict[str, str]
    prepared: str
    branched_from: str | None = None
    place: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    skipped_in_a_row: int = 0

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_json(self.model)


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, or None for another folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    folders = [path for path in (run_dir / "checkpoints").glob("step-*") if step_of(path)]
    return sorted((f for f in folders if (f / COMPLETE).is_file()), key=lambda f: step_of(f) or 0)


def newest_sound(
    folders: Sequence[Path], warn: Callable[[str], None], content: bool = True
) -> Path | None:
    """The last of the folders that is complete and undamaged; tells which ones are not.

    Args:
        folders: in the order of steps.
        warn: gets a line for each that is damaged.
        content: read every file and compare its checksum, not only its size.
    """
    for folder in reversed(folders):
        try:
            (check_content if content else check_complete)(folder)
            read_state(folder)
            return folder
        except UserError as error:
            warn(f"{error}; taking the one before it")
    return None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint of ours."""
    return (folder / COMPLETE).is_file()


def check_complete(folder: Path) -> Path:
    """The folder itself, if it is a complete checkpoint of this format.

    Raises:
        UserError: missing, incomplete, of another format, or with a file of another size.
    """
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint folder {folder}; check the path")
    if not is_checkpoint(folder):
        raise UserError(
            f"{folder} has no COMPLETE file, so it is no finished checkpoint; give one of "
            f"{folder.parent} that has, or the run's folder"
        )
    for name, (size, _) in _listed_files(folder).items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long"
            raise UserError(
                f"the checkpoint {folder} is damaged: {name} should have {size} bytes and is "
                f"{state}; use another checkpoint"
            )
    return folder


def check_content(folder: Path) -> Path:
    """As `check_complete`, and every file's checksum; reads everything once.

    Raises:
        UserError: as `check_complete`, or a file with other content.
    """
    check_complete(folder)
    listed = _listed_files(folder)
    found = _checksums(folder, list(listed))
    for name, (_, checksum) in listed.items():
        if found[name] != checksum:
            raise UserError(
                f"the checkpoint {folder} is damaged: {name} should have the checksum "
                f"{checksum:08x} and has {found[name]:08x}; use another checkpoint"
            )
    return folder


def _listed_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of every file, from COMPLETE."""
    marker = read_json(folder / COMPLETE)
    try:
        if marker["format_version"] == FORMAT_VERSION:
            return {
                str(name): (int(size), int(crc)) for name, (size, crc) in marker["files"].items()
            }
    except (TypeError, KeyError, ValueError, AttributeError):
        pass
    raise UserError(
        f"{folder} is a checkpoint of another format, or its COMPLETE is damaged; this version "
        f"reads format {FORMAT_VERSION}"
    )


def _checksums(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """CRC-32 of files, several at a time: zlib works outside of Python's lock."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(names, pool.map(lambda name: _crc32(folder / name), names), strict=True))


def _crc32(path: Path) -> int:
    value = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise UserError(
            f"{path} can't be read ({error.strerror}); use another checkpoint"
        ) from None
    return value


def read_json(path: Path) -> Any:
    """Raises UserError when the file can't be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}); use another checkpoint") from None


def read_state(folder: Path) -> RunState:
    """The state of a complete checkpoint.

    Raises:
        UserError: as `check_complete`.
    """
    check_complete(folder)
    stored = read_json(folder / STATE)
    try:
        state = RunState(**stored)
        for name, kind in (("step", int), ("model", dict), ("window", dict), ("plan", dict),
                           ("scores", dict), ("data_hash", str), ("tokenizer_hash", str),
                           ("place", dict), ("loss_scale", dict),
                           ("skipped_in_a_row", int)):  # fmt: skip
            if not isinstance(getattr(state, name), kind):
                raise TypeError(f"{name} is no {kind.__name__}")
        _ = state.spec
    except Exception as error:  # transformers has errors of its own for a wrong configuration
        raise UserError(
            f"{folder / STATE} is not of this format ({error}); use another checkpoint"
        ) from None
    if (scores := _read_scores(folder / SCORES)) is not None:
        state.scores = scores
    return state


def _read_scores(path: Path) -> dict[str, dict[str, float]] | None:
    """Validation figures by step; None where the file, which no checkpoint needs, is no good."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(int(step)): {
                str(name): float("nan") if value is None else float(value)
                for name, value in figures.items()
            }
            for step, figures in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_weights(folder: Path) -> StateDict:
    """The full float32 weights on the CPU, by one process, without a process group.

    Raises:
        UserError: as `check_complete`, or the weights are not the model's.
    """
    spec = read_state(folder).spec
    names = unique_state_dict(build_on_meta(spec))
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in names.items()}
    _load({"model": weights}, folder, no_dist=True)
    return weights


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read a complete checkpoint's weights into a materialized model, on any layout; a collective.

    Each rank reads its own part. The optimizer's state is left alone: a warm start.

    Raises:
        UserError: the files can't be read or belong to another model.
    """
    weights = _model_tensors(model)
    _load({"model": weights}, folder, no_dist=False)
    set_model_state_dict(model, _with_shared_names(model, weights))


def _load(state: dict[str, Any], folder: Path, no_dist: bool) -> None:
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        raise UserError(
            f"the checkpoint {folder} can't be read ({reason[:200]}); use another checkpoint"
        ) from error


class CheckpointManager:
    """Saves, finds, loads and prunes the checkpoints of one run; every method is a collective."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        *,
        keep_last: int,
        keep_best: int,
        best_metric: str,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._folder = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._world = world
        self._keep_last, self._keep_best = keep_last, keep_best
        self._best_metric = best_metric
        self._warn = warn

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self._folder / f"step-{step:08d}"

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        config_yaml: str,
        tokenizer_dir: Path,
    ) -> dict[str, float]:
        """Write the checkpoint of `state.step`, then prune; the row for metrics.jsonl.

        Raises:
            UserError: the disk is full or the folder can't be written.
        """
        began = time.perf_counter()
        folder = self.path(state.step)
        try:
            size = self._write(folder, model, optimizer, state, config_yaml, tokenizer_dir)
        except UserError:
            # It is no checkpoint; what it takes may be what the disk lacks for saying so.
            if self._world.is_main:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._on_main(lambda: self.prune(state))
        seconds = time.perf_counter() - began
        return {"blocked_seconds": seconds, "total_seconds": seconds, "bytes": size}

    def _write(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        config_yaml: str,
        tokenizer_dir: Path,
    ) -> int:
        """All files, COMPLETE last; their bytes together."""
        self._on_main(lambda: _make_room(folder))
        try:
            dcp.save(_tensors(model, optimizer), checkpoint_id=folder)
        except (Exception, CheckpointException) as error:
            raise _save_error(folder, error) from error
        return self._on_main(lambda: self._finish(folder, state, config_yaml, tokenizer_dir))

    def _on_main(self, work: Any) -> Any:
        return self._world.on_rank_zero(work)

    def _finish(self, folder: Path, state: RunState, config_yaml: str, tokenizer_dir: Path) -> int:
        try:
            (folder / STATE).write_text(json.dumps(vars(state), indent=1), encoding="utf-8")
            (folder / CONFIG).write_text(config_yaml, encoding="utf-8")
            shutil.copytree(tokenizer_dir, folder / TOKENIZER, dirs_exist_ok=True)
            names = [
                str(path.relative_to(folder))
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            ]
            _check_shards(folder, names)
            for name in names:
                _sync(folder / name)
            sizes = {name: (folder / name).stat().st_size for name in names}
            checksums = _checksums(folder, names)
            marker = {
                "format_version": FORMAT_VERSION,
                "step": state.step,
                "world_size": self._world.world_size,
                "files": {name: [sizes[name], checksums[name]] for name in names},
            }
            partial = folder / f".{COMPLETE}.part"
            partial.write_text(json.dumps(marker, indent=1), encoding="utf-8")
            _sync(partial)
            os.replace(partial, folder / COMPLETE)
            _sync(folder)
        except OSError as error:
            raise _save_error(folder, error) from error
        return sum(sizes.values())

    def record_scores(self, state: RunState) -> None:
        """Put the validation of `state.step` beside its checkpoint, then prune by it."""

        def record() -> None:
            # JSON has no NaN.
            scores = {
                step: {n: v if math.isfinite(v) else None for n, v in figures.items()}
                for step, figures in state.scores.items()
            }
            write_json(self.path(state.step) / SCORES, scores)
            self.prune(state)

        self._on_main(record)

    def prune(self, state: RunState) -> None:
        """Delete what is neither among the newest nor the best, and what older steps left behind.

        The checkpoint of `state.step`, just written, stays. What can't be deleted is only warned
        of: the newest checkpoint is sound. On rank 0 only.
        """
        folders = complete_checkpoints(self._run_dir)
        kept = {state.step, *(step_of(folder) for folder in folders[-self._keep_last :])}
        kept |= set(best_steps(state.scores, self._best_metric, folders)[: self._keep_best])
        try:
            for folder in folders:
                if step_of(folder) not in kept:
                    (folder / COMPLETE).unlink()
                    shutil.rmtree(folder)
            for folder in _leftovers(self._folder, state.step):
                shutil.rmtree(folder)
        except OSError as error:
            self._warn(f"an old checkpoint can't be deleted ({error}); delete it by hand")

    def load(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read a complete checkpoint into a materialized model and its optimizer, on any layout.

        Raises:
            UserError: the files can't be read or belong to another model.
        """
        state = _tensors(model, optimizer)
        # Left out of the reading: the stored options would win without a word over the
        # configuration's, and torch versions and optimizers differ in what they store there.
        groups = state["optimizer"].pop("param_groups")
        _load(state, folder, no_dist=False)
        set_model_state_dict(model, _with_shared_names(model, state["model"]))
        state["optimizer"]["param_groups"] = groups
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _check_shards(folder: Path, names: Sequence[str]) -> None:
    """Raises UserError when a rank has written where rank 0 does not see it."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data or {}
    missing = {place.relative_path for place in stored.values()} - set(names)
    if missing:
        raise UserError(
            f"the checkpoint {folder} lacks {sorted(missing)[0]}, which another rank wrote; give a "
            "run_dir on a file system that all nodes share"
        )


def _make_room(folder: Path) -> None:
    # What is in the way has no COMPLETE or is damaged; it goes when its successor is sound.
    damaged = folder.with_name(folder.name + _DAMAGED)
    try:
        if folder.exists():
            shutil.rmtree(damaged, ignore_errors=True)
            (folder / COMPLETE).unlink(missing_ok=True)
            os.replace(folder, damaged)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _save_error(folder, error) from error


def _leftovers(folder: Path, step: int) -> list[Path]:
    """Of steps up to `step`: what an interrupted save left, and damaged ones moved aside."""
    found = []
    for path in folder.iterdir():
        of_step = step_of(path.with_name(path.name.removesuffix(_DAMAGED)))
        damaged = path.name.endswith(_DAMAGED) or not (path / COMPLETE).exists()
        if of_step is not None and of_step <= step and damaged:
            found.append(path)
    return found


def best_steps(
    scores: dict[str, dict[str, float]], metric: str, folders: list[Path] | None
) -> list[int]:
    """Steps that have a score, the best first; among equals the earliest; NaN is never best.

    Args:
        folders: only steps that have one of these checkpoints; None: all.
    """
    present = None if folders is None else {step_of(folder) for folder in folders}
    sign = 1 if metric == "loss" else -1
    ranked = [
        (sign * values[metric], int(step))
        for step, values in scores.items()
        if (present is None or int(step) in present)
        and values.get(metric) is not None
        and math.isfinite(values[metric])
    ]
    return [step for _, step in sorted(ranked)]


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": _model_tensors(model),
        "optimizer": _optimizer_state(model, optimizer),
    }


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if not optimizer.state:
        # torch makes the state by a step without gradients. It is none of the run's, whose steps
        # may all have been skipped so far.
        get_optimizer_state_dict(model, optimizer)
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
    return get_optimizer_state_dict(model, optimizer)


def _model_tensors(model: nn.Module) -> dict[str, Any]:
    """This rank's parts of parameters and persistent buffers, as torch.distributed stores them."""
    # torch lists a shared weight under all its names; one is enough.
    names = {clean_name(name) for name, _ in (*model.named_parameters(), *model.named_buffers())}
    full = get_model_state_dict(model)
    return {name: tensor for name, tensor in full.items() if name in names}


def _with_shared_names(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Put back the further names of shared weights, which torch's strict loading asks for."""
    first_name: dict[int, str] = {}
    full = dict(weights)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        clean = clean_name(name)
        original = first_name.setdefault(id(parameter), clean)
        full[clean] = weights[original]
    return full


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _save_error(folder: Path, error: BaseException) -> UserError:
    reason = next((line for line in str(error).splitlines() if "rror" in line), str(error))
    return UserError(
        f"the checkpoint {folder} can't be written ({reason.strip()[:200]}); free disk space or "
        "give another run_dir; older checkpoints are untouched"
    )
