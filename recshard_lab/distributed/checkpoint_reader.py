"""Reading torch's distributed checkpoints without running anything that a file says.

torch reads the ``.metadata`` of a checkpoint by ``pickle.load``, which runs whatever code it names, and entries that
are no tensors likewise. Here the metadata may name the dozen classes that it is made of and nothing else, entries are
read as weights only, and tensors are read from files of the checkpoint's own folder only.
"""

import io
import pickle
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from recshard_lab.distributed.checkpoint_files import CheckpointError

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes of torch's checkpoint metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # Python before 3.11.4 writes a member of an enumeration so
            return _member
        if (module, name) not in _ALLOWED:
            raise CheckpointError(f"names {module}.{name}, which is no part of a checkpoint's metadata: refused unread")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """A member of one of the enumerations above; no other attribute of anything."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError(f"asks for {name!r} of {kind!r}, which is no part of a checkpoint's metadata: refused")
    return kind[name]


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """A checkpoint's metadata.

    Args:
        folder: the checkpoint.
        files: names of the files from which tensors may be read.

    Raises:
        CheckpointError: it is missing, damaged, names what it must not, or points outside of the folder.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is not whole") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle fails with whatever its bytes happen to mean
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected a checkpoint's metadata")
    for index, where in found.storage_data.items():
        if getattr(where, "relative_path", None) not in files:
            raise CheckpointError(f"{path}: {index.fqn!r} lies in {where!r}, which is no file of the checkpoint")
    return found


def tensors_in(metadata: Metadata) -> dict[tuple[str, ...], TensorStorageMetadata]:
    """Path of keys in the saved dictionary -> size and number format, of every tensor."""
    paths = metadata.planner_data or {}
    return {
        tuple(str(key) for key in paths.get(name, (name,))): entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class SafeReader(FileSystemReader):
    """torch's reader, with metadata that has been read already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, for tensors only, and where names are never taken for those of an older format.

    torch drops sharded tensors of which a rank holds nothing, then misses their names and reads all names anew as
    torch 2.3 would have written them; this library never wrote those.
    """

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, strict=True)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is no tensor: this library saves nothing else")


def packed(value: Any, name: str) -> torch.Tensor:
    """Plain data and tensors as bytes ``[n]`` uint8.

    Raises:
        ValueError: what could not be read back without running code.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} holds what only code could read back: use numbers, strings, lists, dictionaries and tensors "
            f"({str(error).splitlines()[0]:.200})"
        ) from None
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(data: torch.Tensor) -> Any:
    """What `packed` took, tensors on the CPU."""
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
