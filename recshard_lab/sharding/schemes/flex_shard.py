"""Flex-shard: the hottest rows on every rank, the others row-wise (FlexShard, Sethi et al. 2023: per-row replication).

Ids are taken to be in the order of how often they are used, the most used first::

    rank 0:  +-----------+ 0      rank 1:  +-----------+ 0        the same H rows on every rank
             |  replica  |                 |  replica  |
             +-----------+ H               +-----------+ H
             +-----------+ H
             |           |                 +-----------+          the rest in stripes
             +-----------+                 |           |
                                           +-----------+ E

An id of the first H rows is looked up at home; only its gradient travels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import DDR, HBM, PlanError
from recshard_lab.sharding.schemes.base import Proposal, both_memories, check_ranks, usable_ranks
from recshard_lab.sharding.schemes.nodes import asked_for
from recshard_lab.sharding.schemes.row_wise import first_ranks, stripes

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the lookups, that the hot rows may take


class FlexShard:
    """Takes the hot rows off the wire and off the rank that would hold them all; costs memory and gradients."""

    name = "flex_shard"
    label = "FLEX"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """Hot rows to which given shares of the lookups go, where the constraints' `row_shares` say it, the others in
        the same memory or, where that is allowed, in the host's; else nothing unless it is asked for by name, for which
        rows are hot, a table does not say. Over all ranks."""
        everywhere = usable_ranks(topology, None)
        if sorted(usable_ranks(topology, constraints)) != list(everywhere):
            return
        curve = constraints.row_shares if constraints is not None else None
        if curve is None or topology.world_size == 1:
            if asked_for(self.name, constraints):
                yield self._cut(table, default_hot_rows(table), everywhere)
            return
        most = table.num_embeddings // 2
        for hot in dict.fromkeys(min(most, curve.rows_for(share)) for share in SHARES):
            if hot:
                yield self._cut(table, hot, everywhere)
                yield self._cut(table, hot, everywhere, curve.sizes(len(everywhere), first_row=hot))
                if both_memories(topology, constraints):
                    cut = self._cut(table, hot, everywhere)
                    cold = len(cut.rects) - len(everywhere)
                    yield replace(cut, tiers=(HBM,) * len(everywhere) + (DDR,) * cold)

    def _cut(
        self, table: BaseEmbeddingConfig, hot_rows: int, ranks: tuple[int, ...], sizes: Sequence[int] | None = None
    ) -> Proposal:
        rects, where = hot_and_cold(table, hot_rows, ranks, len(ranks), sizes)
        return Proposal(self.name, rects, first_ranks(where, len(where)))

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """The first hundredth of the rows on every rank, one stripe of the rest on each of `ranks` (or all)."""
        usable = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        rects, where = hot_and_cold(table, default_hot_rows(table), usable, topology.world_size)
        return Proposal(self.name, rects).placed(where)


def default_hot_rows(table: BaseEmbeddingConfig) -> int:
    """A hundredth of the rows, one at least; none of a table of a single row, which has no others."""
    return min(max(1, table.num_embeddings // 100), table.num_embeddings - 1)


def hot_and_cold(
    table: BaseEmbeddingConfig, hot_rows: int, ranks: Sequence[int], world_size: int, sizes: Sequence[int] | None = None
) -> tuple[tuple[Rect, ...], tuple[int, ...]]:
    """Rectangles and their ranks: rows ``[0, hot_rows)`` on every rank, stripes of the others on `ranks`.

    Args:
        sizes: rows of each stripe (0: none); equal blocks when left out.

    Raises:
        PlanError: no row would be hot, or none cold.
    """
    rows, cols = table.num_embeddings, (0, table.embedding_dim)
    if not 0 <= hot_rows < rows:
        raise PlanError(
            f"table {table.name!r} has {rows:,} rows, of which hot_rows={hot_rows!r} cannot lie on every rank and the "
            f"others elsewhere. Fix: a number from 0 to {rows - 1:,}, or data_parallel for all"
        )
    hot: Rect = ((0, hot_rows), cols)
    cold = stripes(rows - hot_rows, table.embedding_dim, len(ranks)) if sizes is None else _of_sizes(sizes, cols)
    below = tuple(((start + hot_rows, end + hot_rows), cols) for (start, end), _ in cold)
    owners = [rank for rank, size in zip(ranks, sizes or [1] * len(ranks), strict=False) if size][: len(below)]
    copies = world_size if hot_rows else 0
    return (hot,) * copies + below, (*range(copies), *owners)


def _of_sizes(sizes: Sequence[int], cols: tuple[int, int]) -> list[Rect]:
    found, at = [], 0
    for size in sizes:
        if size:
            found.append(((at, at + size), cols))
        at += size
    return found
