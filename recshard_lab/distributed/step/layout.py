"""Turns a plan into fixed wiring: which rank gets which ids, and where the returned columns belong.

It is computed once for each plan and is the same on every rank.

::

    block           one (table, feature) pair: a range of columns in the output of the collection
    shard feature   one (block, shard) pair: the ids of that feature whose rows the shard stores
    group           the shard features of a rank that one kernel serves (same number format, optimizer, backend)

    rank 0: (movies/liked, rows 0-500)     (movies/seen, rows 0-500)  (users/user, columns 0-8)
    rank 1: (movies/liked, rows 500-1000)  ...

On each rank, exchanged shard features come first, then replicated ones. Every rank stores a replicated shard: a
data-parallel table, or the hot rows of a table that is otherwise split. Exchanged shard features are sorted by output
path, then by group, so those of a path, and of a group in it, are adjacent.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from recshard_lab.comm import Registry
from recshard_lab.distributed.state.forms import StateForm
from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding, Shard
from recshard_lab.sharding.plan.types import DISTINCT_ROWS


@dataclass(frozen=True)
class CollectionOptions:
    """Settings of a sharded collection that hold for all of its tables.

    Attributes:
        weighted: whether batches have per-sample weights.
        backend: kernel of all tables. Default: the fastest that supports each table.
        codecs: message formats of rows and gradients. Default: FP32.
        out_of_range: the out-of-range policy: ``"error"``, ``"clamp"`` or ``"ignore"``.
        batch_tables: whether similar tables share one lookup; False uses one lookup per table.
        need_indices: whether sequences have their ids as weights.
        use_index_dedup: whether a sequence collection sends each distinct id of a shard feature once.
        output_dtype: format of outputs and their gradients. Default: that of looked-up rows, FP32.
        state_form: form of the tables in state dicts: ``"sharded_tensor"`` or ``"dtensor"``. An environment with
            ``output_dtensor=True`` takes precedence.
        returns_rows: whether a forward of a managed collection also returns the rows of ids.
    """

    weighted: bool = False
    backend: str | None = None
    codecs: Registry | None = None
    out_of_range: str = "error"
    batch_tables: bool = True
    need_indices: bool = False
    use_index_dedup: bool = False
    output_dtype: torch.dtype | None = None
    state_form: StateForm = "sharded_tensor"
    returns_rows: bool = False


@dataclass(frozen=True)
class Block:
    """One (table, feature) pair and its columns ``[start, start + dim)`` in the output."""

    table: int  # its number
    feature: str
    key: str  # the feature; `feature@table` if several tables read it
    dim: int
    start: int
    mean: bool  # divided by the length of the bag, on the source rank


@dataclass(frozen=True)
class ShardFeature:
    """The ids of one block whose rows one shard stores."""

    block: int
    table: int
    shard_index: int  # in the table's shards
    shard: Shard
    replicated: bool
    group: Hashable  # of its kernel
    route: str


class Layout:
    """The wiring of one collection under one plan.

    Args:
        tables: the tables, in the collection's order.
        blocks: (table, feature) pairs in the order of the output.
        shardings: each table's shards.
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
        flags = [shardings[table.name].replica_flags for table in tables]
        #: for each table and shard, whether it is replicated; on one rank nothing is
        self.replicated = flags if world_size > 1 else [tuple(False for _ in own) for own in flags]
        self.table_routes = [effective_route(table, shardings[table.name]) for table in tables]
        # of all ranks: each rank computes from the plan what the others send
        self.rank_features: list[list[ShardFeature]] = [[] for _ in range(world_size)]
        for index, block in enumerate(blocks):
            copies, route = self.replicated[block.table], self.table_routes[block.table]
            for number, (shard, copy) in enumerate(zip(self.shards[block.table], copies, strict=True)):
                group = groups[block.table, number]
                # replicas return no rows; the path "direct" carries their gradients
                feature = ShardFeature(index, block.table, number, shard, copy, group, "direct" if copy else route)
                self.rank_features[shard.rank].append(feature)
        order = self._group_order(groups)
        for features in self.rank_features:
            features.sort(key=lambda feature: _place(feature, order[feature.table, feature.shard_index]))

    def _group_order(self, groups: Mapping[tuple[int, int], tuple[int, ...]]) -> dict[tuple[int, int], list[Any]]:
        """(table, shard) -> its kernel group as a sort key; of replicas, the groups of all of them by rank.

        Replicas may be in different groups, such as one in host memory. Their key is the same on every rank, so that
        replicated shard features have the same order everywhere.
        """
        found: dict[tuple[int, int], list[Any]] = {}
        for table, (shards, copies) in enumerate(zip(self.shards, self.replicated, strict=True)):
            for number, (shard, copy) in enumerate(zip(shards, copies, strict=True)):
                # the replicas of one row range, by rank
                same = [other for other, own in enumerate(shards) if copy and own.rows == shard.rows] or [number]
                same.sort(key=lambda other: shards[other].rank)
                found[table, number] = [groups[table, other] for other in same]
        return found

    @cached_property
    def exchanged_features(self) -> list[list[ShardFeature]]:
        """For each rank, the shard features whose rows return to other ranks."""
        return [[feature for feature in features if not feature.replicated] for features in self.rank_features]

    @cached_property
    def routes(self) -> list[str]:
        """The output paths in use, in the order of their shard features: "direct" first, "distinct_rows" last."""
        return sorted({feature.route for features in self.exchanged_features for feature in features}, key=_route_order)

    def features_of(self, route: str) -> list[list[ShardFeature]]:
        """For each rank, the exchanged shard features of one output path, which are adjacent."""
        return [[feature for feature in features if feature.route == route] for features in self.exchanged_features]

    @cached_property
    def pooled_counts(self) -> list[int]:
        """For each rank, the exchanged shard features before those of the path "distinct_rows", which are last."""
        return [sum(feature.route != DISTINCT_ROWS for feature in features) for features in self.exchanged_features]

    @cached_property
    def replicated_features(self) -> list[ShardFeature]:
        """The replicated shard features, the same on every rank except for the index of their shard."""
        return [feature for feature in self.rank_features[0] if feature.replicated]

    @cached_property
    def partly_replicated(self) -> frozenset[int]:
        """Blocks with replicated and exchanged shards, whose rows the source rank adds."""
        exchanged = {feature.block for features in self.exchanged_features for feature in features}
        return frozenset(feature.block for feature in self.replicated_features if feature.block in exchanged)

    @cached_property
    def output_width(self) -> int:
        """Columns of the collection's output."""
        return sum(block.dim for block in self.blocks)

    @cached_property
    def mean_blocks(self) -> list[int]:
        """Blocks that the source rank divides by the length of the bag."""
        return [index for index, block in enumerate(self.blocks) if block.mean]

    @cached_property
    def rows_dtype(self) -> torch.dtype:
        """The number format of looked-up rows on every rank."""
        wide = any(table.data_type is DataType.FP64 for table in self.tables)
        return torch.float64 if wide else torch.float32

    @cached_property
    def dynamic(self) -> list[bool]:
        """For each table, whether ids have any value (`DynamicEmbeddingConfig`, `ManagedEmbeddingConfig`)."""
        return [table.dynamic for table in self.tables]

    @cached_property
    def rows_fit_int32(self) -> bool:
        """Whether the ids that a rank receives fit in 32 bits."""
        return not any(self.dynamic) and all(shard.num_rows < 2**31 for shards in self.shards for shard in shards)

    @cached_property
    def global_rows_fit_int32(self) -> bool:
        """Whether ids of batches fit in 32 bits."""
        return not any(self.dynamic) and all(table.num_embeddings < 2**31 for table in self.tables)


def effective_route(table: BaseEmbeddingConfig, sharding: ParameterSharding) -> str:
    """The route that a table's rows take.

    "direct" for replicas, whose rows are local, and where "reduce_scatter" would have nothing to add: every rectangle
    has all rows.
    """
    if sharding.replicated:
        return "direct"
    whole = all(shard.num_rows == table.num_embeddings for shard in sharding.shards)
    return "direct" if whole and sharding.route == "reduce_scatter" else sharding.route


def _route_order(route: str) -> tuple[bool, bool, str]:
    # "direct" first, "distinct_rows" last, others by name
    return route != "direct", route == DISTINCT_ROWS, route


def _place(feature: ShardFeature, group: list[Any]) -> tuple[Any, ...]:
    """The sort key of a shard feature on its rank; ``group`` is that of its kernel group."""
    # kernels and messages slice this order: replicas last, then by path, then by kernel
    return feature.replicated, _route_order(feature.route), group, feature.block, feature.shard.cols, feature.shard.rows
