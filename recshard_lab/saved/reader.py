"""Reads torch's distributed checkpoints without running code of a file.

torch reads ``.metadata`` and entries other than tensors with ``pickle.load``, which can run any code. This reader
allows only the classes of checkpoint metadata, reads entries as weights only, and reads tensors only from files in the
checkpoint's folder.
"""

import io
import pickle
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from recshard_lab.saved.files import CheckpointError

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
    """Finds only the classes of torch's checkpoint metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # enumeration members in Python before 3.11.4
            return _member
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                f"names {module}.{name}, which is not part of a checkpoint's metadata and was not loaded"
            )
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """A member of one of the enumerations above. Other attributes raise."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError(f"reads {name!r} of {kind!r}, which is not part of a checkpoint's metadata")
    return kind[name]


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """A checkpoint's metadata.

    Args:
        folder: the checkpoint.
        files: names of the files that may contain tensors.

    Raises:
        CheckpointError: missing or damaged metadata, a class that is not allowed, or a path outside the folder.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} contains a {type(metadata).__name__}, expected a checkpoint's metadata")
    for where in metadata.storage_data.values():
        if not isinstance(where, _StorageInfo) or where.relative_path not in files:
            raise CheckpointError(f"{path} names {where!r:.200}, which is not a file of the checkpoint")
    return metadata


def check_tensors(metadata: Metadata, folder: Path, chosen: Collection[tuple[str, ...]] | None = None) -> None:
    """Checks that the chunks in the metadata tile each tensor exactly, and that the files contain their bytes.

    Args:
        metadata: as `read_metadata` returns it.
        folder: the checkpoint.
        chosen: key paths of the tensors to check. Default: all.

    Raises:
        CheckpointError: an invalid tensor, by name. Allocates nothing.
    """
    path = folder / ".metadata"
    try:
        places = {(index.fqn, tuple(index.offset or ())): where for index, where in metadata.storage_data.items()}
        fqns = {id(entry): fqn for fqn, entry in metadata.state_dict_metadata.items()}
        for key, entry in tensors_in(metadata).items():
            if chosen is None or key in chosen:
                _check_tensor(".".join(key), fqns[id(entry)], entry, places, folder)
        lengths: dict[str, int] = {}
        for where in metadata.storage_data.values():
            lengths[where.relative_path] = lengths.get(where.relative_path, 0) + where.length
        for name, length in lengths.items():
            if length > (folder / name).stat().st_size:
                raise CheckpointError(f"chunks in {name} overlap")
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except Exception as error:  # crafted metadata can raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _check_tensor(
    name: str,
    fqn: str,
    entry: TensorStorageMetadata,
    places: Mapping[tuple[str, tuple[int, ...]], _StorageInfo],
    folder: Path,
) -> None:
    size, dtype = tuple(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or any(type(n) is not int or n < 0 for n in size):
        raise CheckpointError(f"{name} has no valid size or number format")
    spans = []
    for chunk in entry.chunks:
        start, extent = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(start) != len(size) or len(extent) != len(size):
            raise CheckpointError(f"{name} has {len(size)} dimensions, but one of its chunks has {len(extent)}")
        where = places.get((fqn, start)) or places.get((fqn, ()))
        if where is None:
            raise CheckpointError(f"{name} has a chunk at {list(start)} that is in no file")
        needed = 0 if _is_transformed(where) else prod(extent) * dtype.itemsize
        if where.offset < 0 or where.length < needed:
            raise CheckpointError(f"{name} has a chunk {list(extent)} of {dtype} in {where.length:,} bytes")
        file_size, end = (folder / where.relative_path).stat().st_size, where.offset + where.length
        if end > file_size:
            raise CheckpointError(
                f"{where.relative_path} is truncated: {file_size:,} bytes, {name} ends at byte {end:,}"
            )
        spans.append(tuple(zip(start, extent, strict=True)))
    if not tiles(size, spans):
        raise CheckpointError(f"the chunks of {name} do not cover {' x '.join(map(str, size))} numbers exactly once")


def _is_transformed(where: Any) -> bool:
    """Whether another writer compressed the chunk."""
    return bool(getattr(where, "transform_descriptors", None))


def tiles(size: Sequence[int], chunks: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether chunks tile a box: they cover each element exactly once and nothing outside.

    Args:
        size: size of the box per axis.
        chunks: (start, extent) per axis, for each chunk.

    >>> tiles([4, 2], [[(0, 3), (0, 2)], [(3, 1), (0, 1)], [(3, 1), (1, 1)]])
    True
    >>> tiles([4], [[(0, 3)]]), tiles([4], [[(0, 3), (2, 2)]]), tiles([4], [[(0, 5)]])
    (False, False, False)
    """
    if prod(size) == 0:
        return all(prod(extent for _, extent in chunk) == 0 for chunk in chunks)
    if not size:
        return len(chunks) == 1
    if any(start < 0 or extent < 0 or start + extent > size[0] for (start, extent), *_ in chunks):
        return False
    begins: dict[int, list[int]] = {}
    for number, ((start, extent), *_) in enumerate(chunks):
        if extent:
            begins.setdefault(start, []).append(number)
            begins.setdefault(start + extent, [])
    active: dict[int, int] = {}  # chunk -> its end on this axis
    edges = sorted({0, size[0], *begins})
    for edge in edges[:-1]:
        active = {number: end for number, end in active.items() if end > edge}
        active |= {number: sum(chunks[number][0]) for number in begins.get(edge, ())}
        if not tiles(size[1:], [chunks[number][1:] for number in active]):
            return False
    return True


def tensors_in(metadata: Metadata) -> dict[tuple[str, ...], TensorStorageMetadata]:
    """Path of keys in the saved dictionary -> size and dtype, for every tensor."""
    paths = metadata.planner_data or {}
    return {
        tuple(str(key) for key in paths.get(name, (name,))): entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class SafeReader(FileSystemReader):
    """torch's reader, with metadata that was already read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, for tensors only and without support for older names.

    torch drops sharded tensors without local shards, then misses their names and assumes the names of torch 2.3, which
    this library never wrote.
    """

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, strict=True)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is not a tensor: this library saves tensors only")


def packed(value: Any, name: str) -> torch.Tensor:
    """Plain data and tensors as bytes, ``[n]`` uint8.

    Raises:
        ValueError: a value that cannot be read without running code.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} contains values that are not plain data ({str(error).splitlines()[0]:.200}). Fix: use numbers, "
            f"strings, lists, dictionaries and tensors"
        ) from None
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(data: torch.Tensor, name: str) -> Any:
    """The value that `packed` encoded, with tensors on the CPU.

    Raises:
        CheckpointError: the bytes are damaged, or would run code.
    """
    try:
        return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:  # crafted bytes can raise anything
        raise CheckpointError(f"{name} in the checkpoint is damaged: {type(error).__name__}: {error}") from None
