"""Where the rows of tables come from: rectangles of a module, of the shards of a training model, of files.

A source reads one rectangle at a time, so that no whole copy of a table is made.

Shape letters: E rows, D columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from recshard_lab.distributed.sharded_collections import ShardedCollection, unsharded_weights
from recshard_lab.saved.model import SavedModel
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


class Saved(Source):
    """Tables in files. Reads only the rows that are asked for.

    Args:
        saved: the files.
        tables: table -> name of its weight in the model's state dict, and its size ``(E, D)``.

    Raises:
        CheckpointError: a table that the files lack, or have in another size.
    """

    def __init__(self, saved: SavedModel, tables: Mapping[str, tuple[str, tuple[int, int]]]) -> None:
        self.tables = {table: saved.source(name, size) for table, (name, size) in tables.items()}

    def fill(self, table: str, targets: Sequence[tuple[Rect, Tensor]]) -> None:
        for (rows, cols), target in targets:
            target.copy_(self.tables[table].read(slice(*rows), slice(*cols)))


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
