"""Reads rectangles of saved tensors: only the rows that are needed, not the chunks that contain them."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from bisect import bisect_left
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from recshard_lab.saved.files import CheckpointError
from recshard_lab.saved.reader import SafeReader, tensors_in

Rect = Sequence[tuple[int, int]]
"""For each axis its first and end index."""


class SavedTensor:
    """One tensor of a checkpoint. A read needs memory for its rows only, not for the saved chunks.

    Chunks that another library compressed, or saved with other strides, are read whole.

    Args:
        folder: the checkpoint.
        metadata: as `read_metadata` returns it, checked by `check_tensors`.
        key: path of keys in the saved dictionary.
    """

    def __init__(self, folder: Path, metadata: Metadata, key: tuple[str, ...]) -> None:
        entry = tensors_in(metadata)[key]
        self._fqn = next(fqn for fqn, one in metadata.state_dict_metadata.items() if one is entry)
        self._folder, self.size, self.dtype = folder, tuple(entry.size), entry.properties.dtype
        reader = SafeReader(folder, metadata)
        places = {
            tuple(index.offset or (0,) * len(self.size)): where
            for index, where in metadata.storage_data.items()
            if index.fqn == self._fqn
        }
        chunks = [
            _Chunk(tuple(chunk.offsets), tuple(chunk.sizes), self.dtype, places[tuple(chunk.offsets)], reader)
            for chunk in entry.chunks
        ]
        self._chunks = sorted(chunks, key=lambda chunk: chunk.start)
        self._starts = [chunk.start[:1] for chunk in self._chunks]
        self._most_rows = max((chunk.extent[0] for chunk in chunks if chunk.extent), default=0)

    def read(self, rect: Rect) -> Tensor:
        """One rectangle, on the CPU.

        Raises:
            CheckpointError: the files could not be read.
        """
        out = torch.empty([end - first for first, end in rect], dtype=self.dtype)
        first, end = 0, len(self._chunks)
        if rect:
            first = bisect_left(self._starts, (rect[0][0] - self._most_rows,))
            end = bisect_left(self._starts, (rect[0][1],))
        for chunk in self._chunks[first:end]:
            shared = [
                (max(low, start), min(high, start + extent))
                for (low, high), start, extent in zip(rect, chunk.start, chunk.extent, strict=True)
            ]
            if any(low >= high for low, high in shared):
                continue
            try:
                rows = chunk.rows(self._folder, [(a - s, b - s) for (a, b), s in zip(shared, chunk.start, strict=True)])
            except Exception as error:  # a damaged file can raise anything
                raise CheckpointError(
                    f"{self._folder}: {self._fqn} could not be read: {type(error).__name__}: {error}"
                ) from error
            target = out
            for axis, ((low, high), (origin, _)) in enumerate(zip(shared, rect, strict=True)):
                target = target.narrow(axis, low - origin, high - low)
            target.copy_(rows)
        return out


class _Chunk:
    """A part of a tensor, written by `torch.save` somewhere in a file."""

    def __init__(
        self, start: tuple[int, ...], extent: tuple[int, ...], dtype: torch.dtype, where: Any, reader: SafeReader
    ) -> None:
        self.start, self.extent, self.dtype, self.where, self.reader = start, extent, dtype, where, reader
        self._first_byte: int | None = None

    def rows(self, folder: Path, rect: Rect) -> Tensor:
        """A rectangle of the chunk."""
        transforms = self.where.transform_descriptors or ()
        with (folder / self.where.relative_path).open("rb") as file:
            if not transforms and self.extent and self._first_byte is None:
                self._first_byte = _first_byte(file, self.where.offset, self.where.length, self.extent, self.dtype)
            if transforms or not self.extent or self._first_byte == _UNKNOWN:
                part = self._whole(file)
                skipped = 0
            else:
                assert self._first_byte is not None
                (low, high), row = rect[0], prod(self.extent[1:])
                file.seek(self._first_byte + low * row * self.dtype.itemsize)
                data = bytearray(file.read((high - low) * row * self.dtype.itemsize))
                part = torch.frombuffer(data, dtype=self.dtype).view(high - low, *self.extent[1:])
                skipped = low
        for axis, (low, high) in enumerate(rect):
            part = part.narrow(axis, low - (0 if axis else skipped), high - low)
        return part

    def _whole(self, file: BinaryIO) -> Tensor:
        file.seek(self.where.offset)
        data = io.BytesIO(file.read(self.where.length))
        descriptors = self.where.transform_descriptors or ()
        stream = self.reader.transforms.transform_load_stream(None, descriptors, data)  # type: ignore[arg-type]
        tensor: Tensor = torch.load(io.BytesIO(stream.read(-1)), map_location="cpu", weights_only=True)
        return tensor


_UNKNOWN = -1


def _first_byte(file: BinaryIO, offset: int, length: int, extent: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where the numbers of a chunk begin in the file, or `_UNKNOWN` if they are not rows one after the other.

    `torch.save` writes an uncompressed zip archive: a description of the tensor, and the bytes of its storage.
    """
    view = _View(file, offset, length)
    described = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    plain = isinstance(described, Tensor) and described.layout is torch.strided and described.is_contiguous()
    if not plain or described.storage_offset() or tuple(described.shape) != extent or described.dtype is not dtype:
        return _UNKNOWN
    with zipfile.ZipFile(view) as archive:
        entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
        order = archive.read(entries["byteorder"]).decode() if "byteorder" in entries else sys.byteorder
        data = entries.get("data/0")
        if data is None or data.compress_type != zipfile.ZIP_STORED or order != sys.byteorder:
            return _UNKNOWN
    view.seek(data.header_offset + 26)
    name, extra = struct.unpack("<HH", view.read(4))
    first = data.header_offset + 30 + int(name) + int(extra)
    if first + prod(extent) * dtype.itemsize > length:
        raise ValueError(f"the chunk ends after {length:,} bytes")
    return offset + first


class _View(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.place = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self.place = max(0, place + (0, self.place, self.length)[whence])
        return self.place

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.offset + self.place)
        data = self.file.read(max(0, min(len(buffer), self.length - self.place)))
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)
