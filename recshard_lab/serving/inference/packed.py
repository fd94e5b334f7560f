"""Shards of packed rows, from a trained or an already quantized table, a few megabytes at a time.

Every shard keeps the scale and bias of whole rows, so a sharded lookup reads the numbers that the unsharded one reads.

Shape letters: E rows and D columns of a table, n rows of a chunk, R bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv
from recshard_lab.embedding import BaseEmbeddingConfig, DataType
from recshard_lab.embedding.quantized.formats import pack, row_bytes, take_columns
from recshard_lab.serving.inference.sources import Source
from recshard_lab.sharding import Shard

_CHUNK_BYTES = 4 * 1024 * 1024  # of fp32 rows that are packed at a time

Chunks = Iterable[tuple[int, Tensor]]
"""First row of a chunk, and its packed rows ``[n, R]``."""


def chunk_ranges(table: BaseEmbeddingConfig) -> Iterator[tuple[int, int]]:
    """Rows ``[first, end)`` of each chunk.

    >>> list(chunk_ranges(BaseEmbeddingConfig(3_000_000, 1, "t")))
    [(0, 1048576), (1048576, 2097152), (2097152, 3000000)]
    """
    step = max(1, _CHUNK_BYTES // (4 * table.embedding_dim))
    for first in range(0, table.num_embeddings, step):
        yield first, min(table.num_embeddings, first + step)


def packed_rows(table: BaseEmbeddingConfig, source: Source) -> Iterator[tuple[int, Tensor]]:
    """Quantizes the rows of a trained table, by chunk."""
    for first, end in chunk_ranges(table):
        rows = torch.empty(end - first, table.embedding_dim)
        source.fill(table.name, [(((first, end), (0, table.embedding_dim)), rows)])
        yield first, pack(rows, table.data_type, table.name)


def packed_table(collection: Any, table: BaseEmbeddingConfig) -> Iterator[tuple[int, Tensor]]:
    """The rows of a quantized collection's table, by chunk."""
    packed = collection.packed(table.name)
    for first, end in chunk_ranges(table):
        yield first, packed[first:end]


class Tables(nn.Module):
    """A collection without rows, with tables of other number formats: what planner and sharders read of it.

    Args:
        collection: has the same tables, in any format.
        tables: the configs.
    """

    def __init__(self, collection: nn.Module, tables: Sequence[BaseEmbeddingConfig]) -> None:
        super().__init__()
        configs = list(tables)
        pooled = hasattr(collection, "embedding_bag_configs")
        setattr(self, "embedding_bag_configs" if pooled else "embedding_configs", lambda: configs)
        for name in ("is_weighted", "need_indices"):
            found = bool(getattr(collection, name, bool)())
            setattr(self, name, lambda found=found: found)
        self.out_of_range = str(getattr(collection, "out_of_range", "error"))


def from_rank_0(
    table: BaseEmbeddingConfig, chunks: Chunks, env: ShardingEnv, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """The chunks of rank 0, on every rank. Collective.

    Args:
        chunks: of this rank; only those of rank 0 are read.
        device: of the messages.
    """
    assert env.pg is not None
    own, size = iter(chunks), row_bytes(table)
    source = torch.distributed.get_global_rank(env.pg, 0)
    for first, end in chunk_ranges(table):
        if env.rank == 0:
            rows = next(own)[1].contiguous().to(device)
        else:
            rows = torch.empty(end - first, size, dtype=torch.uint8, device=device)
        torch.distributed.broadcast(rows, source, env.pg)
        yield first, rows


def fill_shards(chunks: Chunks, kind: DataType, targets: Sequence[tuple[Shard, Tensor]]) -> None:
    """Copies the rows and columns of each shard into its packed rows.

    Args:
        chunks: of the whole table.
        kind: its number format.
        targets: each shard with its rows ``[rows of the shard, R of its columns]``.
    """
    for first, rows in chunks:
        for shard, target in targets:
            start, end = max(first, shard.rows[0]), min(first + len(rows), shard.rows[1])
            if start < end:
                own = take_columns(rows[start - first : end - first], kind, *shard.cols)
                target[start - shard.rows[0] : end - shard.rows[0]].copy_(own)
