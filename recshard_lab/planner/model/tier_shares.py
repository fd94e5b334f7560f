"""Lookups that read host memory: of a plan, and the fewest that any split of the rows allows.

The bound is a fractional knapsack (RecShard, Sethi et al., ASPLOS 2022, chooses rows by the same curves). A row costs
its bytes of weights and optimizer state, and is worth its lookups. All ranks together have M bytes of device memory.
No plan serves more lookups from M bytes than the rows with the most lookups per byte. Curves are linear between their
edges, so whole segments in that order, and a part of the last one, are the exact solution. The bound ignores which
rank stores a row, memory for messages, and replicas. All of these only add lookups of host memory.

Shape letters: T tables, S segments of all curves, n shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.planner.model.row_hits import row_shares_of
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array, TableLoads, Workload, table_loads
from recshard_lab.sharding import ParameterConstraints, ShardingPlan, Topology
from recshard_lab.sharding.plan.row_shares import RowShares
from recshard_lab.sharding.plan.sharding_plan import Tables
from recshard_lab.sharding.plan.types import DDR


@dataclass(frozen=True)
class TierShares:
    """The share of all lookups that reads host memory.

    Attributes:
        by_table: table -> share of its lookups.
        lookups: table -> its lookups in a step, of all ranks.
        least: the least share of all lookups that any split of the rows allows.

    >>> found = TierShares({"a": 0.5, "b": 0.0}, {"a": 30.0, "b": 10.0}, least=0.3)
    >>> found.share, round(found.gap, 3)
    (0.375, 0.075)
    """

    by_table: Mapping[str, float]
    lookups: Mapping[str, float]
    least: float

    @property
    def share(self) -> float:
        """The share of all lookups."""
        slow = sum(share * self.lookups[name] for name, share in self.by_table.items())
        return slow / (sum(self.lookups.values()) or 1.0)

    @property
    def gap(self) -> float:
        """`share` less `least`: a proved upper bound of what a better split could save, in shares of the lookups."""
        return max(0.0, self.share - self.least)


@names_wrong_arguments
def tier_shares(
    plan: ShardingPlan,
    tables: Tables,
    topology: Topology,
    workload: Workload,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> TierShares:
    """The predicted share of lookups that reads host memory under `plan`, and the least share that is possible.

    Args:
        plan: the plan. Shards may be omitted as in `ShardingPlan.resolved`.
        tables: their configs, or module path -> configs.
        topology: the ranks. Their device memory bounds the least share.
        workload: the training step. Its `access`, `zipf_alpha` and `frequency_ordered` give the use of each row.
        constraints: table -> constraints; their `row_shares` are used.

    Raises:
        PlanError: tables and plan do not name the same tables, or curves of another number of rows.

    >>> from recshard_lab.embedding.configs import BaseEmbeddingConfig
    >>> from recshard_lab.sharding import ParameterSharding, Shard
    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=1000, embedding_dim=16, feature_names=["movie"])
    >>> shards = [Shard(0, (0, 100), (0, 16)), Shard(0, (100, 1000), (0, 16), "ddr")]
    >>> plan = ShardingPlan({"": {"movies": ParameterSharding("row_wise", shards=shards)}})
    >>> sorted_ids = Workload(64, zipf_alpha=1.0, frequency_ordered=True)
    >>> round(tier_shares(plan, [movies], Topology(1, "cuda"), sorted_ids).share, 2)
    0.31
    """
    pairs = plan.pairs(tables)
    configs = [config for config, _ in pairs]
    loads = table_loads(configs, topology.world_size, workload, constraints)
    curves = row_shares_of(configs, workload, constraints)
    by_table = {}
    for (config, sharding), curve in zip(pairs, curves, strict=True):
        full = sharding.resolved(config, topology.world_size, topology.local_world_size)
        even = RowShares((0.0, float(config.num_embeddings)), (0.0, 1.0))
        copies = dict.fromkeys(full.shards, 1.0)
        for shard, copy in zip(full.shards, full.replica_flags, strict=True):
            copies[shard] = 1.0 / topology.world_size if copy else 1.0
        by_table[config.name] = sum(
            copies[shard] * float((curve or even).share(*shard.rows)) * shard.num_cols / config.embedding_dim
            for shard in full.shards
            if shard.tier == DDR
        )
    room = float(topology.world_size * topology.free_memory_bytes())
    hot = hottest_rows(loads, curves, workload.optimizer, room)
    served = [
        rows / total if curve is None else float(curve.share(0.0, rows))
        for rows, total, curve in zip(hot, loads.rows, map(by_use, curves), strict=True)
    ]
    return TierShares(
        by_table,
        {config.name: float(ids) * topology.world_size for config, ids in zip(configs, loads.ids, strict=True)},
        1.0 - float(np.dot(served, loads.ids)) / (float(loads.ids.sum()) or 1.0),
    )


def hottest_rows(tables: TableLoads, curves: Sequence[RowShares | None], optimizer: str, room: float) -> Array:
    """``[T]`` rows of each table among those with the most lookups per byte that fit into `room` bytes.

    Args:
        curves: per table, the distribution of its lookups over rows, in any order; None for an even one.
        room: bytes for weights and optimizer state.
    """
    per_row, per_element = OPTIMIZER_STATE_BYTES[optimizer]
    row_bytes = tables.cols * (tables.element_bytes + per_element) + per_row
    of: list[Array] = []
    rows: list[Array] = []
    share: list[Array] = []
    for index, curve in enumerate(curves):
        wide = np.diff(curve.edges) if curve is not None else tables.rows[index : index + 1]
        held = np.diff(curve.shares) if curve is not None else np.ones(1)
        of.append(np.full(len(wide), index))
        rows.append(wide)
        share.append(held)
    table = np.concatenate(of).astype(np.intp)
    wide, lookups = np.concatenate(rows), np.concatenate(share) * tables.ids[table]
    order = np.argsort(-lookups / (wide * row_bytes[table]), kind="stable")
    nbytes = (wide * row_bytes[table])[order]
    before = np.cumsum(nbytes) - nbytes
    taken = np.clip((room - before) / nbytes, 0.0, 1.0)
    return np.asarray(np.bincount(table[order], taken * wide[order], len(tables.rows)), dtype=float)


def by_use(curve: RowShares | None) -> RowShares | None:
    """The same distribution with the segments sorted by use, the most used one first."""
    if curve is None:
        return None
    wide, held = np.diff(curve.edges), np.diff(curve.shares)
    order = np.argsort(-held / wide, kind="stable")
    return RowShares.of_curve(np.concatenate([[0.0], np.cumsum(wide[order])]), held[order])
