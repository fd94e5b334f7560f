"""Table-column-wise: vertical stripes, all on the ranks of one node.

::

    node 0                         node 1
    rank 0    rank 1               rank 2    rank 3
    (nothing) (nothing)            +----+    +---+
                                   |    |    |   |     E rows each, D columns in all
                                   +----+    +---+
"""

from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import PlanError
from recshard_lab.sharding.schemes.base import Proposal
from recshard_lab.sharding.schemes.column_wise import most_pieces, pieces, unit_of, widths
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import (
    adds_nothing,
    asked_for,
    merged,
    ranks_of_one_node,
    usable_by_node,
    windows,
)


class TableColumnWise:
    """Column-wise whose pieces, and their row norms, stay on one node. On one node it is column-wise."""

    name = "table_column_wise"
    label = "TWCW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """For each node, as many pieces as it has usable ranks and the columns allow.

        Requested by name also half, a quarter ... of them, down to two, which column-wise proposes otherwise; and one
        shard of all columns on each node of which a single rank may be used.
        """
        if adds_nothing(self.name, topology, constraints):
            return
        most = most_pieces(table.embedding_dim, constraints.min_partition if constraints else None)
        nodes = tuple(usable_by_node(topology, constraints))
        by_name = asked_for(self.name, constraints)
        if len({len(ranks) for ranks in nodes}) == 1 and not by_name:
            count = min(len(nodes[0]), most)
            if count >= 2:
                cut = EvenTiling(table.num_embeddings, table.num_embeddings, widths(table, count))
                fill = windows(nodes, 1, count) if 2 * count > len(nodes[0]) else None
                if fill is not None:
                    yield Proposal(self.name, cut, fill)
                    return
        ways: list[tuple[tuple[Rect, ...], tuple[int, ...]]] = []
        for ranks in nodes:
            if len(ranks) == 1 and by_name:
                ways.append((pieces(table, [table.embedding_dim]), ranks))
            count = min(len(ranks), most)
            while count >= 2:
                rects = pieces(table, widths(table, count))
                ways += [(rects, ranks[at : at + count]) for at in range(0, len(ranks) - count + 1, count)]
                count = count // 2 if by_name else 0
        yield from merged(self.name, ways)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One piece on each of `ranks`; left out, on as many ranks of one node as the columns allow.

        Raises:
            PlanError: ranks of several nodes; more ranks than pieces of at least four columns (one, where the dim is
                no multiple of 4).
        """
        most = most_pieces(table.embedding_dim, None)
        usable = ranks_of_one_node(self.name, table, topology, ranks)
        if ranks is None:
            usable = usable[:most]
        if len(usable) > most:
            raise PlanError(
                f"table {table.name!r} has {table.embedding_dim} columns, which cannot be cut into {len(usable)} "
                f"pieces of at least {unit_of(table.embedding_dim)}. Fix: {most} ranks or fewer"
            )
        return Proposal(self.name, pieces(table, widths(table, len(usable)))).placed(usable)
