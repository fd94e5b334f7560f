"""Sources of pretrained tables. Each returns its size and any rectangle of its rows.

Reading never runs code of a file: ``.npy`` without pickles, ``.pt`` as weights only, safetensors and checkpoints by
design.
"""

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recshard_lab.complete_folders import MANIFEST
from recshard_lab.saved.files import CHECKPOINT
from recshard_lab.saved.reader import check_tensors, read_metadata, tensors_in
from recshard_lab.saved.tensors import SavedTensor

Pretrained: TypeAlias = Tensor | np.ndarray[Any, Any] | str | Path | tuple[str | Path, str]


class Source(ABC):
    """A matrix with readable rectangles.

    Attributes:
        label: its name in errors.
        size: its shape.
        dtype: its dtype.
    """

    label: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read(self, rows: slice, cols: slice) -> Tensor:
        """One rectangle of a matrix, as a tensor on any device."""

    @abstractmethod
    def whole(self) -> Tensor:
        """All of it, of any number of dimensions."""


class TensorSource(Source):
    """A tensor in memory or mapped from a file."""

    def __init__(self, tensor: Tensor, label: str) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided:
            kind = "on the meta device: it has no rows" if tensor.is_meta else f"{tensor.layout}. Fix: make it dense"
            raise ValueError(f"{label} is {kind}")
        self.tensor, self.label = tensor.detach(), label
        self.size, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, rows: slice, cols: slice) -> Tensor:
        return self.tensor[rows, cols]

    def whole(self) -> Tensor:
        return self.tensor


class ArraySource(Source):
    """A numpy array. Of a memory-mapped array, only the requested rows are loaded."""

    def __init__(self, array: "np.ndarray[Any, Any]", label: str) -> None:
        self.array, self.label = array, label
        self.size = tuple(array.shape)
        try:
            self.dtype = self._tensor(np.empty(0, array.dtype)).dtype
        except TypeError:
            raise ValueError(f"{label} is an array of {array.dtype}, which torch does not support") from None

    def read(self, rows: slice, cols: slice) -> Tensor:
        return self._tensor(self.array[rows, cols])

    def whole(self) -> Tensor:
        return self._tensor(self.array[...])

    @staticmethod
    def _tensor(rows: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(np.array(rows, dtype=rows.dtype.newbyteorder("="), order="C"))


class SafetensorsSource(Source):
    """One tensor of an opened ``.safetensors`` file."""

    def __init__(self, file: Any, path: Path, name: str) -> None:
        self.label = f"{name!r} in {path}"
        self._file, self._name, self._slice = file, name, file.get_slice(name)
        self.size = tuple(self._slice.get_shape())
        self.dtype = self._slice[tuple(slice(0, 0) for _ in self.size)].dtype

    def read(self, rows: slice, cols: slice) -> Tensor:
        return self._slice[rows, cols]

    def whole(self) -> Tensor:
        return self._file.get_tensor(self._name)


class CheckpointSource(Source):
    """One tensor of a checkpoint in torch's distributed format, written by this library or another one."""

    def __init__(self, folder: Path, metadata: Any, key: tuple[str, ...]) -> None:
        check_tensors(metadata, folder, [key])
        self.label = f"{'.'.join(key)!r} in {folder}"
        self._saved = SavedTensor(folder, metadata, key)
        self.size, self.dtype = self._saved.size, self._saved.dtype

    def read(self, rows: slice, cols: slice) -> Tensor:
        return self._saved.read(((rows.start, rows.stop), (cols.start, cols.stop)))

    def whole(self) -> Tensor:
        return self._saved.read([(0, size) for size in self.size])


Sources: TypeAlias = dict[str, Callable[[], Source]]


def source_of(value: Pretrained, table: str, rank: int, world_size: int) -> Source:
    """Opens the source of a table without reading rows.

    Raises:
        ValueError: a file that is missing, damaged, of an unsupported format, or lacks the tensor.
    """
    if isinstance(value, Tensor):
        return TensorSource(value, f"the tensor for table {table!r}")
    if isinstance(value, np.ndarray):
        return ArraySource(value, f"the array for table {table!r}")
    name: str | None = None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        value, name = value
    if not isinstance(value, str | Path):
        raise ValueError(
            f"the source of table {table!r} is a {type(value).__name__}: expected a tensor, an array, a path, or "
            f"(path, name of the tensor)"
        )
    path = Path(value)
    if path.suffix == ".npy" and name is not None:
        raise ValueError(f"{path} contains one array without a name, not {name!r}. Fix: pass the path without a name")
    try:
        sources = sources_in(path, rank, world_size)
    except UnreadableError as error:
        raise ValueError(f"table {table!r}: {error}") from None
    return sources[_chosen(name, list(sources), table, path)]()


class UnreadableError(ValueError):
    """A path that does not exist, or a file of another kind."""


def sources_in(path: Path, rank: int = 0, world_size: int = 1) -> Sources:
    """Name -> function that opens the source, for every tensor in a file or in a checkpoint folder. Reads no rows.

    Args:
        path: as of `source_of`. The only array of a ``.npy`` file, or tensor of a ``.pt`` file, has the name ``""``.
        rank, world_size: ranks share the work of comparing checksums.

    Raises:
        ValueError: a file that is missing, damaged or of an unsupported format.
    """
    if not path.exists():
        raise UnreadableError(f"{path} does not exist")
    if path.is_dir():
        return _checkpoint(path, rank, world_size)
    if path.suffix not in _FORMATS:
        raise UnreadableError(f"{path} has an unsupported format. Supported: {', '.join(_FORMATS)}, checkpoint folders")
    return _FORMATS[path.suffix](path)


def _checkpoint(folder: Path, rank: int, world_size: int) -> Sources:
    if (folder / MANIFEST).is_file():
        listed = CHECKPOINT.manifest_of(folder)["files"]
        CHECKPOINT.check_files(folder, listed, rank, world_size)
    else:
        listed = {path.name: {} for path in folder.iterdir() if path.is_file()}
    metadata = read_metadata(folder, listed)
    return {".".join(key): partial(CheckpointSource, folder, metadata, key) for key in tensors_in(metadata)}


def _npy(path: Path) -> Sources:
    try:
        return {"": partial(ArraySource, np.load(path, mmap_mode="r", allow_pickle=False), str(path))}
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is truncated, damaged or not a plain array: {error}") from None


def _safetensors(path: Path) -> Sources:
    try:
        import safetensors
    except ImportError:
        raise ValueError(
            f'{path} needs the package safetensors. Fix: pip install "recshard-lab[safetensors]"'
        ) from None
    try:
        file = safetensors.safe_open(str(path), framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated, damaged or not a safetensors file: {error}") from None
    return {name: partial(SafetensorsSource, file, path, name) for name in file.keys()}  # noqa: SIM118


def _torch_file(path: Path) -> Sources:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is truncated, or was not written by torch.save of torch 1.6 or later")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} cannot be read as weights only: {str(error).splitlines()[0]:.200}") from None
    if isinstance(content, Tensor):
        return {"": partial(TensorSource, content, str(path))}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} contains a {type(content).__name__}, expected a tensor or a state dict")
    return {name: partial(TensorSource, tensor, f"{name!r} in {path}") for name, tensor in _flat(content, "")}


def _flat(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Dotted names of the tensors in nested dictionaries."""
    for key, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


_FORMATS: dict[str, Callable[[Path], Sources]] = {
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".pt": _torch_file,
    ".pth": _torch_file,
}


def _chosen(name: str | None, names: list[str], table: str, where: Path) -> str:
    """The tensor ``name``, otherwise the only tensor, or the only one named after the table."""
    if name is None:
        matches = [key for key in names if key == table or key.endswith((f".{table}.weight", f".{table}"))]
        matches = matches or [key for key in names if key == f"{table}.weight"]
        if len(matches) == 1 or len(names) == 1:
            return (matches or names)[0]
        raise ValueError(
            f"table {table!r}: {where} has {len(names)} tensors, {len(matches)} of them named after it "
            f"({', '.join(sorted(names)[:5])}{', ...' if len(names) > 5 else ''}). Fix: pass (path, name)"
        )
    if name not in names:
        raise ValueError(f"table {table!r}: {where} has no tensor {name!r}, but {', '.join(sorted(names)[:5])}")
    return name
