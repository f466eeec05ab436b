"""Sharded checkpoints of a run: written so that a crash at any moment loses nothing older.

A checkpoint is the folder `<run_dir>/checkpoints/step-00000500`. It exists when its COMPLETE file
does: that is written last, by rank 0, after every rank's files are on disk, and removed first.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from t5_fsdp.checkpoint.format import (
    COMPLETE,
    CONFIG,
    DAMAGED,
    SCORES,
    STATE,
    TOKENIZER,
    RunState,
    checksums,
    files_below,
    folder_name,
    write_complete,
)
from t5_fsdp.checkpoint.retention import Retention, prune
from t5_fsdp.checkpoint.safe_reader import SafeReader
from t5_fsdp.checkpoint.stored_weights import load_tensors, model_tensors, with_shared_names
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError
from t5_fsdp.files import json_number, write_json


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that has got its COMPLETE.

    Attributes:
        blocked_seconds: that training waited for it.
        total_seconds: from the call of `save` until COMPLETE was there.
    """

    step: int
    blocked_seconds: float
    total_seconds: float
    num_bytes: int

    def row(self) -> dict[str, float]:
        """Its row for metrics.jsonl."""
        return {
            "blocked_seconds": self.blocked_seconds,
            "total_seconds": self.total_seconds,
            "bytes": self.num_bytes,
        }


@dataclass
class _Saving:
    """A save whose tensors are staged in host memory.

    Attributes:
        state: when the tensors were staged; its scores may be of later.
        state_json: the same as text, with the scores of then.
        done: what the saving thread does; on rank 0 (seconds, bytes).
    """

    folder: Path
    state: RunState
    state_json: str
    began: float
    blocked_seconds: float = 0.0
    is_complete: bool = False
    is_reported: bool = False
    warnings: list[str] = field(default_factory=list)
    done: Future[tuple[float, int]] = field(default_factory=Future)


class CheckpointManager:
    """Saves, loads and prunes the checkpoints of one run.

    `save` copies the tensors to host memory; a thread writes the files while training goes on. One
    save is in flight at most. Methods are collectives unless they say otherwise.

    Args:
        retention: which checkpoints are kept.
        background: return from `save` before the files are written; the same on all ranks.

    Attributes:
        on_saved: called on rank 0, in the training thread, for each complete checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        *,
        retention: Retention,
        background: bool = True,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._folder = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._world = world
        self._retention = retention
        self._background, self._warn = background, warn
        self.on_saved: Callable[[SavedCheckpoint], None] = lambda saved: None
        # A group of its own: the saving thread's collectives must not meet those of training.
        self._group = world.background_group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: _Saving | None = None
        # Kept, so that each save copies into the memory of the one before: fresh pages would double
        # the time that training waits. Safe, since the one before has ended by then.
        self._stager: DefaultStager | None = None
        self._scores_lock = threading.Lock()

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self._folder / folder_name(step)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        config_yaml: str,
        tokenizer_dir: Path,
    ) -> None:
        """Begin to write the checkpoint of `state.step`; once it is there older ones are pruned.

        Raises:
            UserError: the disk is full or the folder can't be written, now or by the save before.
        """
        began = time.perf_counter()
        self.wait()
        folder = self.path(state.step)
        self._on_main(lambda: _make_room(folder))
        state_json = json.dumps(vars(state), indent=1)
        saving = _Saving(folder, copy.deepcopy(state), state_json, began)
        try:
            written = self._write(folder, _tensors(model, optimizer))
        except (Exception, CheckpointException) as error:
            raise _save_error(folder, error) from error
        self._saving = saving
        saving.blocked_seconds = time.perf_counter() - began
        saving.done = self._thread.submit(
            self._complete, saving, written, config_yaml, tokenizer_dir
        )
        if not self._background:
            self.wait()

    def _write(self, folder: Path, tensors: dict[str, Any]) -> Callable[[], None]:
        """Write the tensors, or copy them and begin to; what to call for the end of it."""
        # Copying ahead of the writing opens a context on GPU 0 in every rank's thread.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        if not self._background:
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            return lambda: None
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        begun: Any = dcp.async_save(
            tensors, storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        return begun.result

    def _complete(
        self,
        saving: _Saving,
        end_writing: Callable[[], None],
        config_yaml: str,
        tokenizer_dir: Path,
    ) -> tuple[float, int]:
        """In the saving thread: what comes after the tensors, on rank 0; seconds and bytes."""
        try:
            end_writing()
            known = self._checksums(saving.folder)
        except (Exception, CheckpointException) as error:
            raise _save_error(saving.folder, error) from error
        num_bytes = 0
        if known is not None:
            num_bytes = self._finish(saving, config_yaml, tokenizer_dir, known)
            with self._scores_lock:
                saving.is_complete = True
                try:
                    self._apply_scores(saving.state, saving.warnings.append)
                except OSError as error:  # the checkpoint is sound without
                    saving.warnings.append(f"{SCORES} can't be written ({error})")
        return time.perf_counter() - saving.began, num_bytes

    def _checksums(self, folder: Path) -> dict[str, int] | None:
        """Of the files with tensors, each read by the rank that wrote it; on rank 0.

        Raises:
            UserError: one of them can't be read.
        """
        names = [path.name for path in folder.glob(f"__{self._world.rank}_*")]
        mine: dict[str, int] | UserError
        try:
            mine = checksums(folder, names)
        except UserError as error:  # the others wait for this rank
            mine = error
        is_main, world_size = self._world.is_main, self._world.world_size
        gathered: list[Any] | None = [None] * world_size if is_main else None
        dist.gather_object(mine, gathered, group=self._group)
        for found in gathered or [mine]:
            if isinstance(found, UserError):
                raise found
        if gathered is None:
            return None
        return {name: crc for found in gathered for name, crc in found.items()}

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failed save, which `wait` raises; no collective."""
        saving = self._saving
        return saving is not None and saving.done.done() and saving.done.exception() is not None

    def poll(self) -> None:
        """Report the save in flight if it is complete; no collective."""
        saving = self._saving
        if saving is not None and saving.done.done() and not self.has_failed:
            self._report(saving)

    def _report(self, saving: _Saving) -> None:
        if self._world.is_main and not saving.is_reported:
            saving.is_reported = True
            for warning in saving.warnings:  # here, since the saving thread must not print
                self._warn(warning)
            seconds, num_bytes = saving.done.result()
            # A save that does not run beside training blocks it to its end.
            blocked = saving.blocked_seconds if self._background else seconds
            self.on_saved(SavedCheckpoint(saving.state.step, blocked, seconds, num_bytes))

    def wait(self) -> None:
        """Wait for the save in flight, if any, and report it.

        Raises:
            UserError: it could not be written; what there is of it is deleted.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        error = saving.done.exception()

        def report() -> None:
            if error is not None:
                if not saving.is_complete:
                    # What it takes may be what the disk lacks for saying so.
                    shutil.rmtree(saving.folder, ignore_errors=True)
                raise error
            self._report(saving)

        self._on_main(report)
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save in flight, and give the memory of the copies back.

        Raises:
            UserError: as `wait`.
        """
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
                self._stager = None

    def settle(self, timeout_seconds: float) -> None:
        """On the way out after a failure: let a save in flight end if it can; no collective."""
        if self._saving is not None:
            with contextlib.suppress(BaseException):
                self._saving.done.exception(timeout_seconds)

    def _on_main(self, work: Any) -> Any:
        return self._world.on_rank_zero(work)

    def _finish(
        self, saving: _Saving, config_yaml: str, tokenizer_dir: Path, known: Mapping[str, int]
    ) -> int:
        folder = saving.folder
        try:
            (folder / STATE).write_text(saving.state_json, encoding="utf-8")
            (folder / CONFIG).write_text(config_yaml, encoding="utf-8")
            shutil.copytree(tokenizer_dir, folder / TOKENIZER, dirs_exist_ok=True)
            names = files_below(folder)
            _check_shards(folder, names)
            world_size = self._world.world_size
            return write_complete(folder, names, saving.state.step, world_size, known)
        except OSError as error:
            raise _save_error(folder, error) from error

    def record_scores(self, state: RunState) -> None:
        """Put the validation of `state.step` beside its checkpoint, then prune by it.

        While that checkpoint is being written its thread does it, once COMPLETE is there.
        """

        def record() -> None:
            saving = self._saving
            with self._scores_lock:
                if saving is not None and saving.state.step == state.step:
                    saving.state.scores = copy.deepcopy(state.scores)
                    if not saving.is_complete:
                        return
                self._apply_scores(state, self._warn)

        self._on_main(record)

    def _apply_scores(self, state: RunState, warn: Callable[[str], None]) -> None:
        if str(state.step) in state.scores:
            scores = {
                step: {name: json_number(value) for name, value in figures.items()}
                for step, figures in state.scores.items()
            }
            write_json(self.path(state.step) / SCORES, scores)
        prune(self._run_dir, self._retention, state.step, state.scores, warn)

    def load(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read a complete checkpoint into a materialized model and its optimizer, on any layout.

        Raises:
            UserError: the files can't be read or belong to another model.
        """
        state = _tensors(model, optimizer)
        # Left out of the reading: the stored options would win without a word over the
        # configuration's, and torch versions and optimizers differ in what they store there.
        groups = state["optimizer"].pop("param_groups")
        load_tensors(state, folder, no_dist=False)
        set_model_state_dict(model, with_shared_names(model, state["model"]))
        state["optimizer"]["param_groups"] = groups
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _check_shards(folder: Path, names: Sequence[str]) -> None:
    """Raises UserError when a rank has written where rank 0 does not see it."""
    stored = SafeReader(folder).read_metadata().storage_data or {}
    missing = {place.relative_path for place in stored.values()} - set(names)
    if missing:
        raise UserError(
            f"the checkpoint {folder} lacks {sorted(missing)[0]}, which another rank wrote; give a "
            "run_dir on a file system that all nodes share"
        )


def _make_room(folder: Path) -> None:
    # What is in the way has no COMPLETE or is damaged; it goes when its successor is sound.
    damaged = folder.with_name(folder.name + DAMAGED)
    try:
        if folder.exists():
            shutil.rmtree(damaged, ignore_errors=True)
            if not folder.is_symlink():  # what lies behind a link is another run's
                (folder / COMPLETE).unlink(missing_ok=True)
            os.replace(folder, damaged)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _save_error(folder, error) from error


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": model_tensors(model),
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


def _save_error(folder: Path, error: BaseException) -> UserError:
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return UserError(
            f"the checkpoint {folder} can't be copied into host memory; set "
            "checkpoint.async_save: false, which writes it from where it is"
        )
    if "inline_container" in str(error):  # torch's, when a write stops half-way
        return UserError(
            f"the checkpoint {folder} can't be written (it was cut off, as on a full disk); free "
            "disk space or give another run_dir; older checkpoints are untouched"
        )
    reason = next((line for line in str(error).splitlines() if "rror" in line), str(error))
    return UserError(
        f"the checkpoint {folder} can't be written ({reason.strip()[:200]}); free disk space or "
        "give another run_dir; older checkpoints are untouched"
    )
