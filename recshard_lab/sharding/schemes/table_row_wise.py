"""Table-row-wise: row shards, all on the ranks of one node.

::

    node 0                         node 1
    rank 0    rank 1               rank 2:  +-----------+ 0
    (nothing) (nothing)                     +-----------+ ceil(E/L)      L ranks a node
                                   rank 3:  +-----------+
                                            +-----------+ E

Bytes between ranks per step: ``4 * (W - 1) * B * (L + N + 2 * N * D)`` with N ranks per node, derived in
`schemes/__init__.py`. It is row-wise with N shards instead of W.
"""

from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.schemes.base import Proposal
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import grouped, is_redundant, node_groups, ranks_of_one_node, usable_by_node
from recshard_lab.sharding.schemes.row_wise import row_slices


class TableRowWise:
    """Row-wise inside one node, which can add partial sums before it sends them. On one node it is row-wise."""

    name = "table_row_wise"
    label = "TWRW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """For each node, a row shard on each of its usable ranks."""
        if is_redundant(self.name, topology, constraints):
            return
        rows, cols = table.num_embeddings, table.embedding_dim
        nodes = tuple(usable_by_node(topology, constraints))
        if len({len(ranks) for ranks in nodes}) == 1:
            tiles = EvenTiling(rows, -(-rows // len(nodes[0])), [cols])
            yield Proposal(self.name, tiles, node_groups(nodes, 1, len(tiles)))
            return
        placements = []
        for ranks in nodes:
            rects = row_slices(rows, cols, len(ranks))
            placements.append((rects, ranks[: len(rects)]))
        yield from grouped(self.name, placements)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """A row shard on each of `ranks`. Default: every rank of a node chosen by a hash of the table's name.

        Raises:
            PlanError: ranks of several nodes.
        """
        usable = ranks_of_one_node(self.name, table, topology, ranks)
        rects = row_slices(table.num_embeddings, table.embedding_dim, len(usable))
        return Proposal(self.name, rects).placed(usable[: len(rects)])
