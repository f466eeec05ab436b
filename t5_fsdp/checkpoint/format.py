"""The folder of a checkpoint: its name, what is in it, and whether it is whole.

A checkpoint is `<run_dir>/checkpoints/step-00000500`. It exists when its COMPLETE file does, which
holds the size and checksum of every other file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5_fsdp.errors import UserError

if TYPE_CHECKING:
    from t5_fsdp.model.build import ModelSpec

FORMAT_VERSION = 3
_BLOCK_BYTES = 1 << 22
COMPLETE, STATE, CONFIG, TOKENIZER = "COMPLETE", "state.json", "config.yaml", "tokenizer"
SCORES = "scores.json"  # of the validation after the checkpoint was written; may be missing
DAMAGED = ".damaged"
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
        weights_only: there is no optimizer state, so that no run can go on from it.
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
    weights_only: bool = False

    @property
    def spec(self) -> ModelSpec:
        # torch is slow to import, and a list of checkpoints needs none of it.
        from t5_fsdp.model.build import ModelSpec

        return ModelSpec.from_json(self.model)


class DamagedError(UserError):
    """A checkpoint that does not hold what was written; an older one may be gone on from.

    Of another format, or not readable for the moment, is another thing: that one may be sound.
    """


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, or None for another folder."""
    match = _NAME.fullmatch(folder.name)
    step = int(match.group(1)) if match else None
    return step if step is not None and folder_name(step) == folder.name else None


def step_with_damaged(folder: Path) -> int | None:
    """As `step_of`, also of a folder that was moved aside."""
    return step_of(folder.with_name(folder.name.removesuffix(DAMAGED)))


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    folders = [path for path in (run_dir / "checkpoints").glob("step-*") if step_of(path)]
    return sorted(filter(is_checkpoint, folders), key=lambda folder: step_of(folder) or 0)


def newest_sound(
    folders: Sequence[Path], warn: Callable[[str], None], content: bool = True
) -> Path | None:
    """The last of the folders that is complete and undamaged; tells which ones are not.

    Weights alone, which no run goes on from, are passed over.

    Args:
        folders: the last one is taken first.
        warn: gets a line for each that is damaged.
        content: read every file and compare its checksum, not only its size.

    Raises:
        UserError: one is of another format or can't be read, and may be sound.
    """
    for folder in reversed(folders):
        try:
            (check_content if content else check_complete)(folder)
            if not read_state(folder).weights_only:
                return folder
            warn(f"{folder} holds weights alone; taking another one")
        except DamagedError as error:
            warn(f"{error}; taking another one")
    return None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint of ours."""
    return (folder / COMPLETE).is_file()


def checkpoint_digest(folder: Path) -> str:
    """Of everything in a complete checkpoint: COMPLETE has every file's checksum."""
    content = (folder / COMPLETE).read_bytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_complete(folder: Path) -> Path:
    """The folder itself, if it is a complete checkpoint of this format.

    Raises:
        UserError: missing, incomplete, of another format, or with a file of another size.
    """
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint folder {folder}; check the path")
    if not is_checkpoint(folder):
        raise UserError(_incomplete(folder))
    for name, (size, _) in _listed_files(folder).items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long"
            raise DamagedError(
                f"the checkpoint {folder} is damaged: {name} should have {size} bytes and is "
                f"{state}; use another checkpoint"
            )
    return folder


def _incomplete(folder: Path) -> str:
    """What to say of a folder without COMPLETE."""
    if step_of(folder) is None:
        return (
            f"{folder} holds no complete checkpoint; give a checkpoint's folder, or that of a run"
        )
    complete = sorted(path for path in folder.parent.iterdir() if is_checkpoint(path))
    other = f"{complete[-1]}, which has" if complete else "a checkpoint that has"
    return f"{folder} has no COMPLETE file, so it is no finished checkpoint; give {other}"


def check_content(folder: Path) -> Path:
    """As `check_complete`, and every file's checksum; reads everything once.

    Raises:
        UserError: as `check_complete`, or a file with other content.
    """
    check_complete(folder)
    listed = _listed_files(folder)
    found = checksums(folder, list(listed))
    for name, (_, checksum) in listed.items():
        if found[name] != checksum:
            raise DamagedError(
                f"the checkpoint {folder} is damaged: {name} should have the checksum "
                f"{checksum:08x} and has {found[name]:08x}; use another checkpoint"
            )
    return folder


def _listed_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of every file, from COMPLETE."""
    marker = read_json(folder / COMPLETE)
    if not isinstance(marker, dict):
        marker = {}
    version, digest = marker.get("format_version"), marker.pop("digest", None)
    is_sound = digest == _digest_of(marker)
    if is_sound and version == FORMAT_VERSION:
        _check_name(folder, marker["step"])
        return {name: (size, checksum) for name, (size, checksum) in marker["files"].items()}
    if (is_sound or digest is None) and isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"{folder} is a checkpoint of format {version}; this version reads {FORMAT_VERSION}"
        )
    raise DamagedError(
        f"the checkpoint {folder} is damaged: COMPLETE does not have the content that it was "
        "written with; use another checkpoint"
    )


def _check_name(folder: Path, step: int) -> None:
    """Raises DamagedError when a checkpoint lies under the name of another step's."""
    if step_of(folder) not in (None, step):
        raise DamagedError(
            f"{folder} holds the checkpoint of step {step}, so its name is wrong; call it "
            f"{folder_name(step)}, or use another checkpoint"
        )


def _digest_of(marker: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def checksums(folder: Path, names: Sequence[str]) -> dict[str, int]:
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
        raise _unreadable(path, error) from None
    return value


def read_json(path: Path) -> Any:
    """Raises DamagedError when the file is missing or no JSON, UserError when it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    if isinstance(error, ValueError | RecursionError | FileNotFoundError):
        return DamagedError(f"{path} is damaged or missing ({error}); use another checkpoint")
    reason = getattr(error, "strerror", None) or error
    return UserError(
        f"{path} can't be read ({reason}); the checkpoint may be sound: mend that, or use another "
        "one (checkpoint.resume: FOLDER)"
    )


def read_state(folder: Path) -> RunState:
    """The state of a complete checkpoint.

    Raises:
        UserError: as `check_complete`.
    """
    state = read_plain_state(folder)
    try:
        _ = state.spec
    except Exception as error:  # transformers has errors of its own for a wrong configuration
        raise _wrong_state(folder, error) from None
    return state


def read_plain_state(folder: Path) -> RunState:
    """As `read_state`, without a look at the model's configuration, which takes torch.

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
                           ("skipped_in_a_row", int), ("weights_only", bool)):  # fmt: skip
            if not isinstance(getattr(state, name), kind):
                raise TypeError(f"{name} is no {kind.__name__}")
    except TypeError as error:
        raise _wrong_state(folder, error) from None
    if (scores := _read_scores(folder / SCORES)) is not None:
        state.scores = scores
    return state


def _wrong_state(folder: Path, error: Exception) -> UserError:
    return DamagedError(f"{folder / STATE} is not of this format ({error}); use another checkpoint")


def _read_scores(path: Path) -> dict[str, dict[str, float]] | None:
    """Validation figures by step; None where the file, which no checkpoint needs, is no good."""
    try:
        if not path.is_file():  # a pipe would keep its reader waiting
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(int(step)): {
                str(name): float("nan") if value is None else float(value)
                for name, value in figures.items()
            }
            for step, figures in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def files_below(folder: Path) -> list[str]:
    """Names of all files in a checkpoint's folder, relative to it."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path.relative_to(folder)) for path in found]


def write_complete(
    folder: Path, names: Sequence[str], step: int, world_size: int, known: Mapping[str, int]
) -> int:
    """Make sure that the files are on disk, then make the folder a checkpoint; bytes of all.

    Args:
        known: checksums of files that the ranks have written, and have brought to the disk.

    Raises:
        OSError: a file can't be read or written.
    """
    others = [name for name in names if name not in known]
    for name in others:
        _sync(folder / name)
    sizes = {name: (folder / name).stat().st_size for name in names}
    found = {**known, **checksums(folder, others)}
    marker = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "world_size": world_size,
        "config_digest": hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(),
        "files": {name: [sizes[name], found[name]] for name in names},
    }
    partial = folder / f".{COMPLETE}.part"
    signed = {**marker, "digest": _digest_of(marker)}
    partial.write_text(json.dumps(signed, indent=1), encoding="utf-8")
    _sync(partial)
    for subfolder in {(folder / name).parent for name in names}:
        _sync(subfolder)
    os.replace(partial, folder / COMPLETE)
    _sync(folder)
    _sync(folder.parent)
    return sum(sizes.values())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
