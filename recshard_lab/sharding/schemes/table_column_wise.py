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
from recshard_lab.sharding.schemes.base import Proposal
from recshard_lab.sharding.schemes.column_wise import (
    check_num_column_shards,
    column_counts,
    column_slices,
    max_column_shards,
    widths,
)
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import parts_of_nodes, ranks_of_one_node, usable_by_node


class TableColumnWise:
    """Column-wise inside one node, where its row norms stay too. On one node it is column-wise."""

    name = "table_column_wise"
    label = "TWCW"
    replicated = False
    on_one_node = "column_wise"

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """One shard per usable rank of a node, as far as the columns allow, then a half, a quarter, ... down to two.

        Each number of shards may be on adjacent ranks of any node. A node with a single usable rank stores one shard of
        all columns.
        """
        nodes = usable_by_node(topology, constraints)
        sizes = set(map(len, nodes))
        counts = {count for size in sizes for count in column_counts(table, size, constraints)}
        for count in sorted(counts, reverse=True):
            tiles = EvenTiling(table.num_embeddings, table.num_embeddings, widths(table, count))
            yield Proposal(self.name, tiles, parts_of_nodes(nodes, count))

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
