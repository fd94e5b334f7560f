"""Grid: columns over nodes, and each column slice split by rows over the ranks of its node.

::

              node 0     node 1
    rank 0:  +------+   +------+  :rank 2     0
             |      |   |      |
             +------+   +------+              ceil(E/L)      L ranks a node
    rank 1:  +------+   +------+  :rank 3
             +------+   +------+              E

Bytes between ranks per step: ``4 * (W - 1) * B * (W / N * L + W + 2 * N * D)`` with N ranks per node and columns over
all W / N nodes, derived in `schemes/__init__.py`. It has the ids of W / N column shards and the rows of N row shards.
"""

import zlib
from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.schemes.base import Proposal, check_ranks
from recshard_lab.sharding.schemes.column_wise import check_num_column_shards, column_slices, max_column_shards, widths
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import by_node, grouped, node_groups, usable_by_node
from recshard_lab.sharding.schemes.row_wise import row_slices, rows_of_shards


class GridShard:
    """Spreads one table over all ranks, but adds partial sums only inside nodes. On one node it is row-wise."""

    name = "grid_shard"
    label = "GRID"
    replicated = False
    on_one_node = "row_wise"

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """Over the most nodes that the columns allow, then a half, a quarter, ... of them, always adjacent nodes.

        Proposes nothing for several nodes if the columns cannot be split.
        """
        nodes = usable_by_node(topology, constraints)
        count = min(len(nodes), max_column_shards(table.embedding_dim, constraints))
        if len({len(ranks) for ranks in nodes}) == 1:
            rows, block = table.num_embeddings, rows_of_shards(table, len(nodes[0]))
            while count >= min(2, len(nodes)):
                tiles = EvenTiling(rows, block, widths(table, count))
                yield Proposal(self.name, tiles, node_groups(nodes, count, tiles.num_row_slices))
                count //= 2
            return
        placements = []
        while count >= min(2, len(nodes)):
            groups = (nodes[at : at + count] for at in range(0, len(nodes) - count + 1, count))
            placements += [grid_rects(table, group) for group in groups]
            count //= 2
        yield from grouped(self.name, placements)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """A column slice for each node of `ranks`, split by rows over those ranks. Default: all ranks.

        By default, fewer nodes are used if the columns do not suffice for all.

        Raises:
            PlanError: `ranks` on more nodes than possible column slices.
        """
        most = max_column_shards(table.embedding_dim)
        nodes = by_node(
            topology, check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        )
        if ranks is None and len(nodes) > most:
            first = zlib.crc32(table.name.encode()) % (len(nodes) - most + 1)
            nodes = nodes[first : first + most]
        rects, rect_ranks = grid_rects(table, nodes)
        return Proposal(self.name, rects).placed(rect_ranks)


def grid_rects(table: BaseEmbeddingConfig, nodes: Sequence[Sequence[int]]) -> tuple[tuple[Rect, ...], tuple[int, ...]]:
    """A column slice for each of `nodes`, split by rows over its ranks; and the rank of each rectangle.

    Raises:
        PlanError: more nodes than possible column slices.
    """
    check_num_column_shards(table, len(nodes), "node")
    rects: list[Rect] = []
    rect_ranks: list[int] = []
    for ranks, (_, cols) in zip(nodes, column_slices(table, widths(table, len(nodes))), strict=True):
        slices = row_slices(table, len(ranks))
        rects += [(rows, cols) for rows, _ in slices]
        rect_ranks += ranks[: len(slices)]
    return tuple(rects), tuple(rect_ranks)
