"""Reading a sharded checkpoint without running what a stranger has put into it.

torch.distributed.checkpoint reads its index, `.metadata`, and values that are no tensors by pickle,
which can call any function. Here the index may only name the classes that describe tensors and
files, and the values only what torch's `weights_only` allows. Tensors are read so by torch already.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # From Python 3.13 on pathlib is a package and its classes come from a part of it.
        known = _CLASSES.get("pathlib" if module.startswith("pathlib.") else module, ())
        if is_dtype or name in known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata asks for {module}.{name}")


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a folder, with the index read by a bounded unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the folder.

        Raises:
            pickle.UnpicklingError: it names something that no index needs.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(".metadata holds no index")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's plan for loading, with values that are no tensors read as `weights_only`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Put a value where it belongs.

        Raises:
            pickle.UnpicklingError: it holds more than tensors, numbers, texts and lists of them.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
