"""Where the rows of tables come from: rectangles of a module, of the shards of a training model, of a checkpoint.

A source reads one rectangle at a time, so that no whole copy of a table is made.

Shape letters: E rows, D columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from recshard_lab.distributed.sharded_collections import ShardedCollection, unsharded_weights
from recshard_lab.distributed.state.checkpoint.files import CHECKPOINT, CheckpointError
from recshard_lab.distributed.state.checkpoint.reader import SafeReader, check_tensors, read_metadata, tensors_in
from recshard_lab.sharding import PlanError, Shard

Rect = tuple[tuple[int, int], ...]
"""For each axis its first and end index."""
Piece = tuple[Shard, Tensor]
"""A rectangle of a table and its rows ``[rows, cols]``."""


class Source(ABC):
    """The rows of the tables of one collection."""

    @abstractmethod
    def fill(self, table: str, targets: Sequence[tuple[Rect, Tensor]]) -> None:
        """Copies rectangles of a table into tensors ``[rows, cols]``."""


class Pieces(Source):
    """Tables in the memory of this process, whole or in shards.

    Args:
        tables: table -> shards that together have all of its rows and columns.
    """

    def __init__(self, tables: Mapping[str, Sequence[Piece]]) -> None:
        self.tables = tables

    @torch.no_grad()
    def fill(self, table: str, targets: Sequence[tuple[Rect, Tensor]]) -> None:
        for ((r0, r1), (c0, c1)), target in targets:
            for shard, weight in self.tables[table]:
                (s0, s1), (d0, d1) = shard.rect
                top, end, left, right = max(r0, s0), min(r1, s1), max(c0, d0), min(c1, d1)
                if top < end and left < right:
                    rows = weight[top - s0 : end - s0, left - d0 : right - d0]
                    target[top - r0 : end - r0, left - c0 : right - c0].copy_(rows)


class Checkpoint(Source):
    """Tables in a folder that `save_checkpoint` wrote, under any plan. Reads one saved shard at a time.

    Args:
        folder: the checkpoint.
        metadata: as `read_metadata` returns it, checked.
        path: module path of the collection.
        names: table -> name of its weight in the collection's state dict.

    Raises:
        CheckpointError: a table that is not in the checkpoint.
    """

    def __init__(self, folder: Path, metadata: Any, path: str, names: Mapping[str, str]) -> None:
        self.folder, self.metadata = folder, metadata
        prefix = f"{path}." if path else ""
        self.keys = {table: ("model", prefix + name) for table, name in names.items()}
        saved = tensors_in(metadata)
        for table, key in self.keys.items():
            if key not in saved:
                raise CheckpointError(
                    f"table {table!r}: {key[1]} is not in checkpoint {folder}. Fix: pass the model that was saved"
                )

    def fill(self, table: str, targets: Sequence[tuple[Rect, Tensor]]) -> None:
        read_rectangles(self.folder, self.metadata, self.keys[table], targets)


def read_rectangles(folder: Path, metadata: Any, key: tuple[str, ...], targets: Sequence[tuple[Rect, Tensor]]) -> None:
    """Copies rectangles of one saved tensor into tensors. This process reads alone.

    Raises:
        CheckpointError: the files could not be read.
    """
    entry = tensors_in(metadata)[key]
    name = next(name for name, one in metadata.state_dict_metadata.items() if one is entry)
    for rect, target in targets:
        chunk = ChunkStorageMetadata(
            offsets=torch.Size(start for start, _ in rect), sizes=torch.Size(end - start for start, end in rect)
        )
        items = create_read_items_for_chunk_list(name, entry, [chunk])
        try:
            reader = SafeReader(folder, metadata)
            reader.set_up_storage_reader(metadata, True)
            reader.read_data(LoadPlan(items), _Into(target)).wait()
        except Exception as error:  # a damaged file can raise anything
            raise CheckpointError(f"{folder}: {name} could not be read: {type(error).__name__}: {error}") from error


class _Into(LoadPlanner):
    """Fills one tensor."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by the caller")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.target.detach()
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


def open_checkpoint(path: str | Path) -> tuple[Path, Any]:
    """The folder and checked metadata of a checkpoint.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
    """
    folder = CHECKPOINT.readable(path)
    listed = CHECKPOINT.manifest_of(folder)["files"]
    CHECKPOINT.check_files(folder, listed, 0, 1)
    metadata = read_metadata(folder, [name for name in listed if name.endswith(".distcp")])
    check_tensors(metadata, folder)
    return folder, metadata


def live_source(collection: nn.Module) -> Source:
    """The rows of a collection in this process.

    Raises:
        PlanError: other ranks have some of its shards.
    """
    if isinstance(collection, ShardedCollection):
        if collection.env.pg is not None:
            raise PlanError(
                f"devices= needs all rows in this process, and {type(collection).__name__} is sharded over "
                f"{collection.env.world_size} ranks. Fix: omit devices to serve on these ranks, or save_checkpoint and "
                f"pass checkpoint="
            )
        return Pieces({name: list(shards.shards()) for name, shards in collection.table_shards().items()})
    whole = unsharded_weights(collection)
    return Pieces(
        {
            name: [(Shard(0, (0, weight.shape[0]), (0, weight.shape[1])), weight.detach())]
            for name, weight in whole.items()
        }
    )
