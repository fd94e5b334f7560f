"""Writes torch's distributed checkpoints in blocks of rows, so that saving and loading need little memory.

torch's writer keeps a copy of every tensor that is a view or on a GPU until its file is complete, which would be all
tables. Each block is saved as one chunk, which torch's readers support.
"""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

BLOCK_BYTES = 16 * 2**20


class BlockPlanner(DefaultSavePlanner):
    """torch's planner, with large tensors split into blocks of rows."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._blocks: dict[tuple[Any, ...], Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[block for item in plan.items for block in self._split(item)])
        return self.plan

    def _split(self, item: WriteItem) -> list[WriteItem]:
        written = item.tensor_data
        assert written is not None, f"{item.index.fqn} is not a tensor"
        tensor = self.lookup_object(item.index).detach()
        count = max(1, BLOCK_BYTES * tensor.shape[0] // tensor.nbytes) if tensor.dim() and tensor.nbytes else 1
        if tensor.nbytes <= BLOCK_BYTES or count >= tensor.shape[0]:
            self._blocks[_key(item.index)] = tensor
            return [item]
        blocks = []
        for start, rows in zip(range(0, tensor.shape[0], count), tensor.split(count), strict=True):
            offsets = torch.Size([written.chunk.offsets[0] + start, *written.chunk.offsets[1:]])
            chunk = ChunkStorageMetadata(offsets, rows.shape)
            index = MetadataIndex(item.index.fqn, offsets)
            self._blocks[_key(index)] = rows
            data = TensorWriteData(chunk, written.properties, written.size)
            blocks.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return blocks

    def stage(self, plan: SavePlan) -> None:
        """Copies the blocks of a plan to the CPU and drops all references to the model."""
        kept = {_key(item.index) for item in plan.items}
        blocks = {key: block for key, block in self._blocks.items() if key in kept}
        self._blocks = {key: block.to("cpu", copy=True) for key, block in blocks.items()}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A block, once: a staged copy is freed after it is written."""
        return self._blocks.pop(_key(write_item.index))


def _key(index: MetadataIndex) -> tuple[Any, ...]:
    return index.fqn, tuple(index.offset or ())


class BlockWriter(FileSystemWriter):
    """torch's writer, which keeps one block in memory and computes checksums while it writes."""

    def write(self, plan: SavePlan, planner: BlockPlanner) -> tuple[list[WriteResult], dict[str, dict[str, Any]]]:
        """Writes this rank's file. Returns the place of each block, and name -> size and SHA-256 of the file."""
        if not plan.items:
            return [], {}
        name = f"{plan.storage_data.prefix}0.distcp"
        with (Path(self.path) / name).open("wb") as file:
            stream = _Hashed(file)
            results = [_written(item, planner, stream, name) for item in plan.items]
            file.flush()
            os.fsync(file.fileno())
        return results, {name: {"bytes": stream.size, "sha256": stream.digest.hexdigest()}}


def _written(item: WriteItem, planner: BlockPlanner, stream: "_Hashed", name: str) -> WriteResult:
    copy = planner.resolve_data(item).cpu()
    if copy.untyped_storage().nbytes() != copy.nbytes:  # torch.save writes whole storages
        copy = copy.clone()
    start = stream.size
    torch.save(copy, stream)  # type: ignore[arg-type]  # it uses only write and flush
    length = stream.size - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


class _Hashed:
    """A file that is written sequentially, with its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        count = self.file.write(data)
        self.size += count
        return count

    def flush(self) -> None:
        self.file.flush()
