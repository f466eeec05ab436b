"""Tensors in safetensors files, read and written one at a time with plain reads and writes.

safetensors' own writer wants all tensors of a file in memory at once. Its reader maps the whole
file: its pages count as this process's memory as long as it is open, and a file that shrinks or a
disk that fails ends the process with a bus error. The format is eight bytes that say how long the
header is, the header in JSON, and the tensors' bytes; see https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from t5_fsdp.errors import UserError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8  # of the first tensor in a file, as safetensors has it
_BLOCK_NUMEL = 1 << 22  # of two tensors that are compared


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands.

    Attributes:
        dtype: None for one that is not read here.
        start: byte of the file at which it begins.
    """

    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU, in the file's dtype.

        Raises:
            UserError: the file can't be read, or no longer to the tensor's end.
        """
        return self.read_flat(0, self.numel).view(self.shape)

    def read_flat(self, first: int, count: int) -> torch.Tensor:
        """`count` numbers from the `first` on, one-dimensional; raises as `read`."""
        assert self.dtype is not None
        tensor = torch.empty(count, dtype=self.dtype)
        target = tensor.view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start + first * self.dtype.itemsize)
                while target:
                    done = file.readinto(target)
                    if not done:
                        raise _damaged(self.path, "it ends early")
                    target = target[done:]
        except OSError as error:
            raise _damaged(self.path, error.strerror or str(error)) from None
        return tensor


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, without their values.

    Raises:
        UserError: it is no safetensors file, or not as long as its header says.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size - 8:
                raise _damaged(path, "its header is longer than the file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise _damaged(path, f"its header is no JSON: {error}") from None
    begin = 8 + length
    try:
        ends = [begin]
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                found[name], end = _parse_entry(path, entry, begin)
                ends.append(end)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"its header is wrong: {error}") from None
    if max(ends) != size:
        raise _damaged(path, f"it has {size} bytes and should have {max(ends)}")
    return found


def _parse_entry(path: Path, entry: dict[str, Any], begin: int) -> tuple[StoredTensor, int]:
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(length) for length in entry["shape"])
    dtype = _DTYPES.get(entry["dtype"])
    if start < 0 or end < start or min(shape, default=0) < 0:
        raise ValueError("negative sizes")
    if dtype is not None and end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's bytes do not fit its shape")
    return StoredTensor(path, dtype, shape, begin + start), begin + end


def write_tensors(
    path: Path, layout: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """A file in which each tensor stands once; one of them is in memory at a time.

    Args:
        layout: shapes and dtypes by name, e.g. on the meta device.
        tensors: of these shapes and dtypes, asked for one after the other.

    Raises:
        OSError: the file can't be written.
    """
    # The widest numbers first, so that each begins at a multiple of its size.
    names = sorted(layout, key=lambda name: (-layout[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + layout[name].nbytes
        entries[name] = {
            "dtype": _NAMES[layout[name].dtype],
            "shape": list(layout[name].shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            tensor = tensors[name]
            assert (tensor.shape, tensor.dtype) == (layout[name].shape, layout[name].dtype), name
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers; little of them is in memory at a time."""
    if one.shape != other.shape:
        return False
    for first in range(0, one.numel, _BLOCK_NUMEL):
        count = min(_BLOCK_NUMEL, one.numel - first)
        blocks = (one.read_flat(first, count), other.read_flat(first, count))
        if not torch.equal(blocks[0].float(), blocks[1].float()):
            return False
    return True


class FileWeights(Mapping[str, torch.Tensor]):
    """Float32 tensors by name, read from their files whenever they are asked for."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].read().float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"the weights file {path} can't be read ({reason}); fetch it again")
