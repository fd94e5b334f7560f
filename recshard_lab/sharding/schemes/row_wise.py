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
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import DDR, HBM, PlanError, Shard
from recshard_lab.sharding.schemes.base import Proposal, both_memories, check_ranks, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

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
            rects = EvenTiling(table.num_embeddings, -(-table.num_embeddings // count), [table.embedding_dim])
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


def stripes_of(table: BaseEmbeddingConfig, sizes: Sequence[int], ranks: Sequence[int], named: bool) -> list[Shard]:
    """Stripes of `sizes` rows from the top down on `ranks`; a size of 0 leaves its rank without one.

    Args:
        named: the reader named the ranks, so each must have its size.

    Raises:
        PlanError: sizes that are not the whole table, or not one for each rank.
    """
    sums_to("rows", sizes, table.num_embeddings, table)
    if len(sizes) > len(ranks) or (named and len(sizes) != len(ranks)):
        raise PlanError(f"table {table.name!r}: {len(sizes)} sizes for {len(ranks)} ranks. Fix: one size per rank")
    shards, at = [], 0
    for rank, size in zip(ranks, sizes, strict=False):
        if size:
            shards.append(Shard(rank, (at, at + size), (0, table.embedding_dim)))
        at += size
    return shards


def sizes_between(table: BaseEmbeddingConfig, boundaries: Sequence[int]) -> list[int]:
    """Sizes of the stripes that begin at row 0 and at each boundary.

    Raises:
        PlanError: boundaries that do not ascend from 0 to the last row.

    >>> sizes_between(BaseEmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4), [2, 7])
    [2, 5, 3]
    """
    rows = table.num_embeddings
    cuts = [0, *(int(at) for at in boundaries if at not in (0, rows)), rows]
    sizes = [after - before for before, after in pairwise(cuts)]
    if min(sizes) <= 0 or len(set(boundaries)) != len(boundaries):
        raise PlanError(
            f"table {table.name!r} has {rows:,} rows, which cannot be cut at boundaries={list(boundaries)!r}. "
            f"Fix: rows between 1 and {rows - 1:,}, ascending, each once"
        )
    return sizes


def bucket_sizes(table: BaseEmbeddingConfig, num_buckets: int, count: int) -> list[int]:
    """Rows of `count` stripes of whole buckets; the first stripes have one bucket more where it does not come out even.

    Raises:
        PlanError: buckets that do not divide the rows, or fewer buckets than stripes.

    >>> bucket_sizes(BaseEmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4), 5, 4)
    [4, 2, 2, 2]
    """
    if num_buckets < count or table.num_embeddings % num_buckets:
        raise PlanError(
            f"table {table.name!r} has {table.num_embeddings:,} rows for {count} ranks, but num_buckets={num_buckets}. "
            f"Fix: a divisor of the rows that is at least {count}"
        )
    each, more = divmod(num_buckets, count)
    return [table.num_embeddings // num_buckets * (each + (i < more)) for i in range(count)]


def sums_to(what: str, sizes: Sequence[int], total: int, table: BaseEmbeddingConfig) -> None:
    """Refuses sizes that are not the whole table."""
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise PlanError(
            f"table {table.name!r} has {total:,} {what}, but the sizes {list(sizes)} sum to {sum(sizes):,}. "
            f"Fix: sizes that sum to {total:,}"
        )
