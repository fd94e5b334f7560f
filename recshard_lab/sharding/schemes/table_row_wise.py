"""Table-row-wise: horizontal stripes, all on the ranks of one node.

::

    node 0                         node 1
    rank 0    rank 1               rank 2:  +-----------+ 0
    (nothing) (nothing)                     +-----------+ ceil(E/L)      L ranks a node
                                   rank 3:  +-----------+
                                            +-----------+ E
"""

from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.schemes.base import Proposal
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import adds_nothing, merged, ranks_of_one_node, usable_by_node, windows
from recshard_lab.sharding.schemes.row_wise import stripes


class TableRowWise:
    """Row-wise whose partial sums can be added up before they leave their node. On one node it is row-wise."""

    name = "table_row_wise"
    label = "TWRW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """For each node, a stripe on each of its usable ranks."""
        if adds_nothing(self.name, topology, constraints):
            return
        rows, cols = table.num_embeddings, table.embedding_dim
        nodes = tuple(usable_by_node(topology, constraints))
        if len({len(ranks) for ranks in nodes}) == 1:
            cut = EvenTiling(rows, -(-rows // len(nodes[0])), [cols])
            yield Proposal(self.name, cut, windows(nodes, 1, len(cut)))
            return
        ways = []
        for ranks in nodes:
            rects = stripes(rows, cols, len(ranks))
            ways.append((rects, ranks[: len(rects)]))
        yield from merged(self.name, ways)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """A stripe on each of `ranks`; left out, on every rank of a node drawn from the table's name.

        Raises:
            PlanError: ranks of several nodes.
        """
        usable = ranks_of_one_node(self.name, table, topology, ranks)
        rects = stripes(table.num_embeddings, table.embedding_dim, len(usable))
        return Proposal(self.name, rects).placed(usable[: len(rects)])
