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
from recshard_lab.sharding.schemes.nodes import node_groups, ranks_of_one_node, usable_by_node
from recshard_lab.sharding.schemes.row_wise import row_slices, rows_of_shards


class TableRowWise:
    """Row-wise inside one node, which can add partial sums before it sends them. On one node it is row-wise."""

    name = "table_row_wise"
    label = "TWRW"
    replicated = False
    on_one_node = "row_wise"

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """For each node, a row shard on each of its usable ranks."""
        nodes = usable_by_node(topology, constraints)
        for count in dict.fromkeys(map(len, nodes)):
            tiles = EvenTiling(table.num_embeddings, rows_of_shards(table, count), [table.embedding_dim])
            equal = tuple(ranks for ranks in nodes if len(ranks) == count)
            yield Proposal(self.name, tiles, node_groups(equal, 1, len(tiles)))

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """A row shard on each of `ranks`. Default: every rank of a node chosen by a hash of the table's name.

        Raises:
            PlanError: ranks of several nodes.
        """
        usable = ranks_of_one_node(self.name, table, topology, ranks)
        rects = row_slices(table, len(usable))
        return Proposal(self.name, rects).placed(usable[: len(rects)])
