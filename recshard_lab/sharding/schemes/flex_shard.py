"""Flex-shard: the hottest rows on every rank, the others row-wise (FlexShard, Sethi et al. 2023: per-row replication).

Ids are assumed to be sorted by use, the most used first::

    rank 0:  +-----------+ 0      rank 1:  +-----------+ 0        the same H rows on every rank
             |  replica  |                 |  replica  |
             +-----------+ H               +-----------+ H
             +-----------+ H
             |           |                 +-----------+          the rest in row shards
             +-----------+                 |           |
                                           +-----------+ E

The source rank looks up ids of the first H rows itself. Only their gradients are exchanged.

Bytes between ranks per step, if the H hot rows serve a share h of the lookups: the formula of row-wise with (1 - h) L
ids, and that of data-parallel with h L ids: ``4 * (W - 1) * (B * ((1 - h) * L + W + 2 * W * D) + W * min(B * (h * L +
1 + D), U * (1 + D)))``, where U is the number of distinct hot rows in a rank's batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import DDR, HBM, PlanError
from recshard_lab.sharding.schemes.base import Proposal, allows_both_tiers, check_ranks, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.row_wise import first_ranks

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # shares of the lookups that hot rows serve


class FlexShard:
    """Replicates hot rows, which are then neither exchanged nor concentrated on one rank; costs memory."""

    name = "flex_shard"
    label = "FLEX"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """Hot rows that serve `SHARES` of the lookups, on all ranks; cold rows also in host memory if allowed.

        Which rows are hot is known from the constraints' `row_shares`. Without them the scheme proposes its default.
        """
        all_ranks = usable_ranks(topology, None)
        if sorted(usable_ranks(topology, constraints)) != list(all_ranks):
            return
        curve = constraints.row_shares if constraints is not None else None
        if curve is None or topology.world_size == 1:
            yield self._proposal(table, default_hot_rows(table), all_ranks)
            return
        most = table.num_embeddings // 2
        for hot in dict.fromkeys(min(most, curve.rows_for(share)) for share in SHARES):
            if hot:
                even = self._proposal(table, hot, all_ranks)
                yield even
                yield self._proposal(table, hot, all_ranks, curve.sizes(len(all_ranks), first_row=hot))
                if allows_both_tiers(topology, constraints):
                    num_cold = len(even.rects) - len(all_ranks)
                    yield replace(even, tiers=(HBM,) * len(all_ranks) + (DDR,) * num_cold)

    def _proposal(
        self, table: BaseEmbeddingConfig, hot_rows: int, ranks: tuple[int, ...], sizes: Sequence[int] | None = None
    ) -> Proposal:
        rects, rect_ranks = hot_and_cold(table, hot_rows, ranks, len(ranks), sizes)
        return Proposal(self.name, rects, first_ranks(rect_ranks, len(rect_ranks)))

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """The first 1% of the rows on every rank, one row shard of the rest on each of `ranks`. Default: all ranks."""
        usable = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        rects, rect_ranks = hot_and_cold(table, default_hot_rows(table), usable, topology.world_size)
        return Proposal(self.name, rects).placed(rect_ranks)


def default_hot_rows(table: BaseEmbeddingConfig) -> int:
    """1% of the rows, but at least 1; 0 for a table of one row."""
    return min(max(1, table.num_embeddings // 100), table.num_embeddings - 1)


def hot_and_cold(
    table: BaseEmbeddingConfig, hot_rows: int, ranks: Sequence[int], world_size: int, sizes: Sequence[int] | None = None
) -> tuple[Sequence[Rect], tuple[int, ...]]:
    """Rectangles and their ranks: rows ``[0, hot_rows)`` on every rank, row shards of the others on `ranks`.

    Args:
        sizes: rows of each row shard (0: no shard). Default: equal sizes.

    Raises:
        PlanError: `hot_rows` is negative or leaves no other rows.
    """
    rows, cols = table.num_embeddings, (0, table.embedding_dim)
    if not 0 <= hot_rows < rows:
        raise PlanError(
            f"table {table.name!r} has {rows:,} rows, so hot_rows must be from 0 to {rows - 1:,}, got {hot_rows!r}. "
            f"Fix: pass such a number, or use data_parallel to replicate all rows"
        )
    copies = world_size if hot_rows else 0
    if sizes is None:
        block = -(-(rows - hot_rows) // len(ranks))
        tiles = EvenTiling(rows, block, [table.embedding_dim], hot_rows, copies)
        return tiles, (*range(copies), *ranks[: tiles.num_row_slices])
    spans = [span for span in pairwise(accumulate(sizes, initial=hot_rows)) if span[0] < span[1]]
    cold_ranks = [rank for rank, size in zip(ranks, sizes, strict=True) if size]
    return (((0, hot_rows), cols),) * copies + tuple((span, cols) for span in spans), (*range(copies), *cold_ranks)
