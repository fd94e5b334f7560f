"""Grid: columns over nodes, and each column piece split by rows over the ranks of its node.

::

              node 0     node 1
    rank 0:  +------+   +------+  :rank 2     0
             |      |   |      |
             +------+   +------+              ceil(E/L)      L ranks a node
    rank 1:  +------+   +------+  :rank 3
             +------+   +------+              E
"""

import zlib
from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import PlanError
from recshard_lab.sharding.schemes.base import Proposal, check_ranks
from recshard_lab.sharding.schemes.column_wise import most_pieces, unit_of, widths
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import adds_nothing, by_node, merged, usable_by_node, windows
from recshard_lab.sharding.schemes.row_wise import stripes


class GridShard:
    """Spreads one table over all ranks, yet adds partial sums only inside nodes. On one node it is row-wise."""

    name = "grid_shard"
    label = "GRID"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """Over as many nodes as the columns allow, then half, a quarter ... of them, next to one another.

        None where there are several nodes and the columns cannot be cut.
        """
        if adds_nothing(self.name, topology, constraints):
            return
        nodes = usable_by_node(topology, constraints)
        count = min(len(nodes), most_pieces(table.embedding_dim, constraints.min_partition if constraints else None))
        if len({len(ranks) for ranks in nodes}) == 1:
            rows, block = table.num_embeddings, -(-table.num_embeddings // len(nodes[0]))
            while count >= min(2, len(nodes)):
                cut = EvenTiling(rows, block, widths(table, count))
                yield Proposal(self.name, cut, windows(tuple(nodes), count, cut.num_stripes))
                count //= 2
            return
        ways = []
        while count >= min(2, len(nodes)):
            cuts = (nodes[at : at + count] for at in range(0, len(nodes) - count + 1, count))
            ways += [checkerboard(table, chosen) for chosen in cuts]
            count //= 2
        yield from merged(self.name, ways)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """A column piece for each node of `ranks`, its rows over those ranks; left out, on all nodes.

        Where the columns do not allow a piece for every node and no ranks are named, there are fewer pieces.

        Raises:
            PlanError: named ranks of more nodes than there can be column pieces.
        """
        most = most_pieces(table.embedding_dim, None)
        nodes = by_node(
            topology, check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        )
        if ranks is None and len(nodes) > most:
            first = zlib.crc32(table.name.encode()) % (len(nodes) - most + 1)
            nodes = nodes[first : first + most]
        rects, where = checkerboard(table, nodes)
        return Proposal(self.name, rects).placed(where)


def checkerboard(
    table: BaseEmbeddingConfig, nodes: Sequence[Sequence[int]]
) -> tuple[tuple[Rect, ...], tuple[int, ...]]:
    """A column piece for each of `nodes`, cut into a stripe for each rank of it; and the rank of each rectangle.

    Raises:
        PlanError: more nodes than there can be column pieces.
    """
    most = most_pieces(table.embedding_dim, None)
    if len(nodes) > most:
        raise PlanError(
            f"table {table.name!r} has {table.embedding_dim} columns, which cannot be cut into {len(nodes)} pieces "
            f"of at least {unit_of(table.embedding_dim)}, one a node. Fix: {most} node(s) or fewer"
        )
    rects: list[Rect] = []
    where: list[int] = []
    start = 0
    for ranks, width in zip(nodes, widths(table, len(nodes)), strict=True):
        found = stripes(table.num_embeddings, width, len(ranks))
        rects += [(rows, (start, start + width)) for rows, _ in found]
        where += ranks[: len(found)]
        start += width
    return tuple(rects), tuple(where)
