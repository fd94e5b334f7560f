"""Reading torch's distributed checkpoints without running anything that a file says.

torch reads the ``.metadata`` of a checkpoint by ``pickle.load``, which runs whatever code it names, and entries that
are no tensors likewise. Here the metadata may name the dozen classes that it is made of and nothing else, entries are
read as weights only, and tensors are read from files of the checkpoint's own folder only.
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

from recshard_lab.distributed.state.checkpoint.files import CheckpointError

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
    for where in found.storage_data.values():
        if not isinstance(where, _StorageInfo) or where.relative_path not in files:
            raise CheckpointError(f"{path} names {where!r:.200}, which is no file of the checkpoint")
    return found


def check_tensors(metadata: Metadata, folder: Path, chosen: Collection[tuple[str, ...]] | None = None) -> None:
    """Refuses metadata whose chunks do not tile each tensor exactly, or claim more bytes than the files have.

    Args:
        metadata: as `read_metadata` returns it.
        folder: the checkpoint.
        chosen: key paths of the tensors to check; all when left out.

    Raises:
        CheckpointError: by the name of the tensor. Nothing has been allocated.
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
    except Exception as error:  # whatever crafted metadata happens to hold
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
            raise CheckpointError(f"{name} has {len(size)} dimensions, and one of its chunks has {len(extent)}")
        where = places.get((fqn, start)) or places.get((fqn, ()))
        if where is None:
            raise CheckpointError(f"{name} has a chunk at {list(start)} that no file holds")
        needed = 0 if _is_transformed(where) else prod(extent) * dtype.itemsize
        if where.offset < 0 or where.length < needed:
            raise CheckpointError(f"{name} has a chunk {list(extent)} of {dtype} in {where.length:,} bytes")
        held, end = (folder / where.relative_path).stat().st_size, where.offset + where.length
        if end > held:
            raise CheckpointError(f"{where.relative_path} is truncated: {held:,} bytes, {name} ends at byte {end:,}")
        spans.append(tuple(zip(start, extent, strict=True)))
    if not tiles(size, spans):
        raise CheckpointError(f"the chunks of {name} do not cover {' x '.join(map(str, size))} numbers exactly once")


def _is_transformed(where: Any) -> bool:
    """Whether another writer compressed the chunk."""
    return bool(getattr(where, "transform_descriptors", None))


def tiles(size: Sequence[int], chunks: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether chunks cover every cell of a box exactly once, and nothing else.

    Args:
        size: of the box, by axis.
        chunks: by axis (start, extent).

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
    active: dict[int, int] = {}  # chunk -> where it ends on this axis
    edges = sorted({0, size[0], *begins})
    for edge in edges[:-1]:
        active = {number: end for number, end in active.items() if end > edge}
        active |= {number: sum(chunks[number][0]) for number in begins.get(edge, ())}
        if not tiles(size[1:], [chunks[number][1:] for number in active]):
            return False
    return True


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


def unpacked(data: torch.Tensor, name: str) -> Any:
    """What `packed` took, tensors on the CPU.

    Raises:
        CheckpointError: the bytes are damaged, or would run code.
    """
    try:
        return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever crafted bytes happen to mean
        raise CheckpointError(f"{name} in the checkpoint is damaged: {type(error).__name__}: {error}") from None
