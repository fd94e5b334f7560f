"""Table-column-wise: column shards, all on the ranks of one node.

::

    node 0                         node 1
    rank 0    rank 1               rank 2    rank 3
    (nothing) (nothing)            +----+    +---+
                                   |    |    |   |     E rows each, D columns in all
                                   +----+    +---+

Bytes between ranks per step: ``4 * (W - 1) * B * (N * (L + 1) + 2 * D)`` with N ranks per node, derived in
`schemes/__init__.py`. It is column-wise with N shards instead of W.
"""

from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.schemes.base import Proposal
from recshard_lab.sharding.schemes.column_wise import check_num_column_shards, column_slices, max_column_shards, widths
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import (
    grouped,
    is_redundant,
    node_groups,
    ranks_of_one_node,
    requested_by_name,
    usable_by_node,
)


class TableColumnWise:
    """Column-wise inside one node, where its row norms stay too. On one node it is column-wise."""

    name = "table_column_wise"
    label = "TWCW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """For each node, one shard per usable rank, as far as the columns allow.

        If the scheme is requested by name, also a half, a quarter, ... of these shards, down to two (column-wise
        proposes them otherwise), and one shard of all columns on each node with a single usable rank.
        """
        if is_redundant(self.name, topology, constraints):
            return
        most = max_column_shards(table.embedding_dim, constraints)
        nodes = tuple(usable_by_node(topology, constraints))
        by_name = requested_by_name(self.name, constraints)
        if len({len(ranks) for ranks in nodes}) == 1 and not by_name:
            count = min(len(nodes[0]), most)
            if count >= 2:
                tiles = EvenTiling(table.num_embeddings, table.num_embeddings, widths(table, count))
                groups = node_groups(nodes, 1, count) if 2 * count > len(nodes[0]) else None
                if groups is not None:
                    yield Proposal(self.name, tiles, groups)
                    return
        placements: list[tuple[tuple[Rect, ...], tuple[int, ...]]] = []
        for ranks in nodes:
            if len(ranks) == 1 and by_name:
                placements.append((column_slices(table, [table.embedding_dim]), ranks))
            count = min(len(ranks), most)
            while count >= 2:
                rects = column_slices(table, widths(table, count))
                placements += [(rects, ranks[at : at + count]) for at in range(0, len(ranks) - count + 1, count)]
                count = count // 2 if by_name else 0
        yield from grouped(self.name, placements)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One shard on each of `ranks`. Default: the most ranks of one node that the columns allow.

        Raises:
            PlanError: ranks of several nodes; more ranks than shards of at least four columns (one, if the dim is not
                a multiple of 4).
        """
        usable = ranks_of_one_node(self.name, table, topology, ranks)
        if ranks is None:
            usable = usable[: max_column_shards(table.embedding_dim)]
        check_num_column_shards(table, len(usable))
        return Proposal(self.name, column_slices(table, widths(table, len(usable)))).placed(usable)
