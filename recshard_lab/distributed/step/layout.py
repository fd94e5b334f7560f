"""From a tiling to fixed wiring: which rank gets which ids, and which columns come back from where.

Everything here is known once the plan is, is the same on every rank, and is computed once.

::

    block   one (table, feature) pair: a run of columns in the output of the collection
    lane    one (block, rectangle) pair: the ids of that feature which fall into that rectangle
    group   the lanes of a rank that one kernel serves (same number format, optimizer, backend)

    rank 0: lane (movies/liked, rows 0-500)  lane (movies/seen, rows 0-500)  lane (users/user, cols 0-8)
    rank 1: lane (movies/liked, rows 500-1000)  ...

Lanes are numbered rank by rank; on a rank, the exchanged lanes come first, then the replicated ones (every rank holds
that rectangle: a data-parallel table, or the hot rows of one that is cut otherwise). Exchanged lanes are sorted by
route, then by group, so that the lanes of a route, and of a group inside it, lie side by side.

Shape letters: B batch, D columns of a block, J blocks, L lanes of a rank, W ranks.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding, Shard


@dataclass(frozen=True)
class Block:
    """One (table, feature) pair and its columns ``[start, start + dim)`` in the output."""

    table: int
    feature: str
    key: str
    dim: int
    start: int
    mean: bool


@dataclass(frozen=True)
class ShardFeature:
    """The ids of one block that fall into one rectangle."""

    block: int
    table: int
    shard_index: int
    shard: Shard
    replicated: bool
    group: Hashable
    route: str


class Layout:
    """The wiring of one collection under one plan.

    Args:
        tables: the tables, in the collection's order.
        blocks: (table, feature) pairs in the order of the output.
        shardings: each table's rectangles.
        groups: for each table and shard, the sortable key of the kernel group that serves it.
        world_size: number of ranks W.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        blocks: Sequence[Block],
        shardings: Mapping[str, ParameterSharding],
        groups: Mapping[tuple[int, int], tuple[int, ...]],
        world_size: int,
    ) -> None:
        self.tables = list(tables)
        self.blocks = list(blocks)
        self.world_size = world_size
        self.shards = [list(shardings[table.name].shards) for table in tables]
        self.replicated = [shardings[table.name].replica_flags for table in tables]
        self.table_routes = [effective_route(table, shardings[table.name]) for table in tables]
        self.rank_features: list[list[ShardFeature]] = [[] for _ in range(world_size)]
        for index, block in enumerate(blocks):
            copies, route = self.replicated[block.table], self.table_routes[block.table]
            for number, (shard, copy) in enumerate(zip(self.shards[block.table], copies, strict=True)):
                group = groups[block.table, number]
                lane = ShardFeature(index, block.table, number, shard, copy, group, "direct" if copy else route)
                self.rank_features[shard.rank].append(lane)
        order = self._group_order(groups)
        for lanes in self.rank_features:
            lanes.sort(key=lambda lane: _place(lane, order[lane.table, lane.shard_index]))

    def _group_order(self, groups: Mapping[tuple[int, int], tuple[int, ...]]) -> dict[tuple[int, int], list[Any]]:
        """(table, shard) -> its kernel group as a sort key; of replicas, the groups of all of them by rank.

        Replicas may be in different groups, such as one in host memory. Their key is the same on every rank, so that
        replicated lanes are in the same order everywhere.
        """
        found: dict[tuple[int, int], list[Any]] = {}
        for table, (shards, copies) in enumerate(zip(self.shards, self.replicated, strict=True)):
            for number, (shard, copy) in enumerate(zip(shards, copies, strict=True)):
                same = [other for other, own in enumerate(shards) if copy and own.rows == shard.rows] or [number]
                same.sort(key=lambda other: shards[other].rank)
                found[table, number] = [groups[table, other] for other in same]
        return found

    @cached_property
    def exchanged_features(self) -> list[list[ShardFeature]]:
        """For each rank, the lanes whose pooled rows travel home."""
        return [[lane for lane in lanes if not lane.replicated] for lanes in self.rank_features]

    @cached_property
    def routes(self) -> list[str]:
        """The routes in use, in the order of their lanes: "direct" first."""
        return sorted({lane.route for lanes in self.exchanged_features for lane in lanes}, key=_route_order)

    def features_of(self, route: str) -> list[list[ShardFeature]]:
        """For each rank, the exchanged lanes of one route: a run of that rank's lanes."""
        return [[lane for lane in lanes if lane.route == route] for lanes in self.exchanged_features]

    @cached_property
    def replicated_features(self) -> list[ShardFeature]:
        """The replicated lanes, the same on every rank but for their shard's index."""
        return [lane for lane in self.rank_features[0] if lane.replicated]

    @cached_property
    def partly_replicated(self) -> frozenset[int]:
        """Blocks to which replicas and exchanged rectangles both contribute: their rows are added at home."""
        exchanged = {lane.block for lanes in self.exchanged_features for lane in lanes}
        return frozenset(lane.block for lane in self.replicated_features if lane.block in exchanged)

    @cached_property
    def output_width(self) -> int:
        """Columns of the collection's output."""
        return sum(block.dim for block in self.blocks)

    @cached_property
    def mean_blocks(self) -> list[int]:
        """Blocks that are divided by the bag's length at home."""
        return [index for index, block in enumerate(self.blocks) if block.mean]

    @cached_property
    def rows_dtype(self) -> torch.dtype:
        """The number format of looked-up rows on every rank."""
        wide = any(table.data_type is DataType.FP64 for table in self.tables)
        return torch.float64 if wide else torch.float32

    @cached_property
    def rows_fit_int32(self) -> bool:
        """Whether row numbers inside every rectangle fit a 32-bit wire."""
        return all(shard.num_rows < 2**31 for shards in self.shards for shard in shards)

    @cached_property
    def global_rows_fit_int32(self) -> bool:
        """The same for row numbers of whole tables."""
        return all(table.num_embeddings < 2**31 for table in self.tables)


def effective_route(table: BaseEmbeddingConfig, sharding: ParameterSharding) -> str:
    """The route that a table's rows take.

    "direct" for replicas, whose rows are local, and where "reduce_scatter" would have nothing to add: every rectangle
    has all rows.
    """
    if sharding.replicated:
        return "direct"
    whole = all(shard.num_rows == table.num_embeddings for shard in sharding.shards)
    return "direct" if whole and sharding.route == "reduce_scatter" else sharding.route


def _route_order(route: str) -> tuple[bool, str]:
    return route != "direct", route


def _place(lane: ShardFeature, group: list[Any]) -> tuple[Any, ...]:
    """The sort key of a lane on its rank; ``group`` is that of its kernel group."""
    return lane.replicated, _route_order(lane.route), group, lane.block, lane.shard.cols, lane.shard.rows
