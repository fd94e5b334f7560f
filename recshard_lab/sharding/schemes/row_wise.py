"""Row-wise: horizontal stripes of ``ceil(E / W)`` rows, as TorchRec cuts them.

::

    rank 0:  +-----------+ 0
             +-----------+ ceil(E/W)
    rank 1:  +-----------+
             +-----------+ 2 ceil(E/W)
    rank 2:  +-----------+          the last stripe may be shorter, and later ranks may have none
             +-----------+ E
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.constraints import ParameterConstraints
from recshard_lab.sharding.cut import Cut
from recshard_lab.sharding.plan import ParameterSharding
from recshard_lab.sharding.schemes.base import Proposal, both_memories, check_ranks, usable_ranks
from recshard_lab.sharding.shard import DDR, HBM
from recshard_lab.sharding.tiling import Rect
from recshard_lab.sharding.topology import Topology

EVENNESS = (1.0, 0.75, 0.5, 0.25)  # of lookups, beside that of rows
HOT_SHARES = (0.5, 0.75, 0.9, 0.97, 0.99)  # of the lookups, that the device's own memory may serve


class RowWise:
    """Spreads memory and lookups evenly; each rank sends a partial sum of every bag."""

    name = "row_wise"
    label = "RW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """Stripes over all usable ranks in order, then over half, a quarter ... of them, anywhere."""
        usable = usable_ranks(topology, constraints)
        count = len(usable)
        while count > 1 or count == len(usable):
            rects = Cut(table.num_embeddings, -(-table.num_embeddings // count), [table.embedding_dim])
            everywhere = first_ranks(usable, len(rects)) if count == len(usable) else None
            yield Proposal(self.name, rects, everywhere)
            count = 0 if count == 1 else count // 2
        yield from self._by_access(table, usable, constraints)
        yield from self._by_tier(table, topology, usable, constraints)

    def _by_access(
        self, table: BaseEmbeddingConfig, usable: tuple[int, ...], constraints: ParameterConstraints | None
    ) -> Iterator[Proposal]:
        """Stripes that serve equally many lookups (RecShard, Sethi et al., ASPLOS 2022), and compromises between that
        and equal rows, for where memory is short: on all usable ranks in order, then on half, a quarter ... of them."""
        curve = constraints.row_shares if constraints is not None else None
        count = len(usable) if curve is not None else 1
        while curve is not None and count > 1:
            whole, seen = count == len(usable), set()
            for evenness in EVENNESS if whole else EVENNESS[::2]:
                sizes = curve.sizes(count, evenness=evenness)
                edges = list(accumulate(sizes, initial=0))
                spans = [(span, rank) for span, rank in zip(pairwise(edges), usable, strict=False) if span[0] < span[1]]
                rects = tuple((span, (0, table.embedding_dim)) for span, _ in spans)
                if rects not in seen:
                    seen.add(rects)
                    yield Proposal(self.name, rects, (tuple(rank for _, rank in spans),) if whole else None)
            count //= 2

    def _by_tier(
        self,
        table: BaseEmbeddingConfig,
        topology: Topology,
        usable: tuple[int, ...],
        constraints: ParameterConstraints | None,
    ) -> Iterator[Proposal]:
        """Each rank's hot rows in its own memory and its cold ones in the host's, as RecShard has them, where both
        kernels are allowed: the hottest rows, cut for equal lookups, and the others, cut evenly."""
        curve = constraints.row_shares if constraints is not None else None
        if curve is None or not both_memories(topology, constraints):
            return
        rows, cols = table.num_embeddings, (0, table.embedding_dim)
        for hot in dict.fromkeys(curve.rows_for(share) for share in HOT_SHARES):
            if not 0 < hot < rows:
                continue
            edges = list(accumulate(curve.sizes(len(usable), end_row=hot), initial=0))
            fast = [(span, rank) for span, rank in zip(pairwise(edges), usable, strict=True) if span[0] < span[1]]
            cold = stripes(rows - hot, table.embedding_dim, len(usable))
            slow = [((a + hot, b + hot), rank) for ((a, b), _), rank in zip(cold, usable, strict=False)]
            tiers = (HBM,) * len(fast) + (DDR,) * len(slow)
            both = [*fast, *slow]
            yield Proposal(self.name, tuple((span, cols) for span, _ in both), (tuple(r for _, r in both),), tiers)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One stripe on each of `ranks` (all of them when left out), in that order."""
        usable = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        rects = stripes(table.num_embeddings, table.embedding_dim, len(usable))
        return Proposal(self.name, rects).placed(usable[: len(rects)])


@lru_cache(maxsize=256)
def first_ranks(ranks: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """The first `count` of `ranks`, as the one assignment that there is; the same object for all tables."""
    return (ranks[:count],)


def stripes(num_rows: int, num_cols: int, count: int) -> tuple[Rect, ...]:
    """At most `count` stripes of ``ceil(num_rows / count)`` rows; empty ones are left out.

    >>> stripes(10, 4, 4)
    (((0, 3), (0, 4)), ((3, 6), (0, 4)), ((6, 9), (0, 4)), ((9, 10), (0, 4)))
    """
    block = -(-num_rows // count)
    return tuple(((at, min(at + block, num_rows)), (0, num_cols)) for at in range(0, num_rows, block))
