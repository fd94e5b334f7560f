"""Row-wise: row shards of ``ceil(E / W)`` rows, as in TorchRec.

::

    rank 0:  +-----------+ 0
             +-----------+ ceil(E/W)
    rank 1:  +-----------+
             +-----------+ 2 ceil(E/W)
    rank 2:  +-----------+          the last shard may be shorter, and later ranks may have none
             +-----------+ E

Bytes between ranks per step: ``4 * (W - 1) * B * (L + W + 2 * W * D)``, derived in `schemes/__init__.py`. Every id
goes to one rank. Every rank sends a partial sum per sample to every other rank, W times the rows of table-wise.
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
from recshard_lab.sharding.schemes.base import Proposal, allows_both_tiers, check_ranks, halves, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

EVENNESS = (1.0, 0.75, 0.5, 0.25)  # 1: equal lookups per shard, 0: equal rows
HOT_SHARES = (0.5, 0.75, 0.9, 0.97, 0.99)  # shares of the lookups that device memory serves


class RowWise:
    """Balances memory and lookups; each rank sends a partial sum of every bag."""

    name = "row_wise"
    label = "RW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """Row shards on all usable ranks in order, then on a half, a quarter, ... of them, in any order.

        If constraints name row_wise alone and list its ranks, only the first.
        """
        usable = usable_ranks(topology, constraints)
        for count in _counts(usable, constraints):
            rects = EvenTiling(table.num_embeddings, rows_of_shards(table, count), [table.embedding_dim])
            assignments = first_ranks(usable, len(rects)) if count == len(usable) else None
            yield Proposal(self.name, rects, assignments)
        yield from self._by_access(table, usable, constraints)
        yield from self._by_tier(table, topology, usable, constraints)

    def _by_access(
        self, table: BaseEmbeddingConfig, usable: tuple[int, ...], constraints: ParameterConstraints | None
    ) -> Iterator[Proposal]:
        """Row shards that balance lookups (RecShard, Sethi et al., ASPLOS 2022), on the same ranks as in `propose`.

        If memory is short, compromises between equal lookups and equal rows apply.
        """
        curve = constraints.row_shares if constraints is not None else None
        if curve is None or len(usable) == 1:
            return
        for count in _counts(usable, constraints):
            on_all, seen = count == len(usable), set()
            for evenness in EVENNESS if on_all else EVENNESS[::2]:
                sizes = curve.sizes(count, evenness=evenness)
                edges = list(accumulate(sizes, initial=0))
                spans = [(span, rank) for span, rank in zip(pairwise(edges), usable, strict=False) if span[0] < span[1]]
                rects = tuple((span, (0, table.embedding_dim)) for span, _ in spans)
                if rects not in seen:
                    seen.add(rects)
                    yield Proposal(self.name, rects, (tuple(rank for _, rank in spans),) if on_all else None)

    def _by_tier(
        self,
        table: BaseEmbeddingConfig,
        topology: Topology,
        usable: tuple[int, ...],
        constraints: ParameterConstraints | None,
    ) -> Iterator[Proposal]:
        """Each rank's hot rows in device memory, its cold rows in host memory (RecShard), if both kernels are allowed.

        Hot rows are split for equal lookups, cold rows for equal rows.
        """
        curve = constraints.row_shares if constraints is not None else None
        if curve is None or not allows_both_tiers(topology, constraints):
            return
        rows, cols = table.num_embeddings, (0, table.embedding_dim)
        for hot in dict.fromkeys(curve.rows_for(share) for share in HOT_SHARES):
            if not 0 < hot < rows:
                continue
            edges = list(accumulate(curve.sizes(len(usable), end_row=hot), initial=0))
            fast = [(span, rank) for span, rank in zip(pairwise(edges), usable, strict=True) if span[0] < span[1]]
            cold = EvenTiling(rows - hot, -(-(rows - hot) // len(usable)), [table.embedding_dim])
            slow = [((a + hot, b + hot), rank) for ((a, b), _), rank in zip(cold, usable, strict=False)]
            tiers = (HBM,) * len(fast) + (DDR,) * len(slow)
            shards = [*fast, *slow]
            yield Proposal(self.name, tuple((span, cols) for span, _ in shards), (tuple(r for _, r in shards),), tiers)

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One row shard on each of `ranks`, in that order. Default: all ranks."""
        usable = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        rects = row_slices(table, len(usable))
        return Proposal(self.name, rects).placed(usable[: len(rects)])


def _counts(usable: Sequence[int], constraints: ParameterConstraints | None) -> tuple[int, ...]:
    """On how many ranks a table may be: on all of them if constraints name row_wise alone and list its ranks."""
    if constraints is None or constraints.ranks is None:
        return halves(len(usable))
    alone = [getattr(scheme, "value", scheme) for scheme in constraints.sharding_types or ()] == ["row_wise"]
    return (len(usable),) if alone else halves(len(usable))


@lru_cache(maxsize=256)
def first_ranks(ranks: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """The first `count` of `ranks` as the only assignment; the same object for all tables."""
    return (ranks[:count],)


def rows_of_shards(table: BaseEmbeddingConfig, count: int) -> int:
    """Rows of each of `count` row shards; the last may have fewer. ``ceil(E / count)``, in whole units of the table.

    If row shards must have equal sizes (`BaseEmbeddingConfig.least_equal_rows`), there may be fewer than `count`.

    >>> from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig
    >>> rows_of_shards(ManagedEmbeddingConfig(10, 4, "t", least_equal_rows=2), 4)
    5
    """
    if table.least_equal_rows:
        rows, least = table.num_embeddings, table.least_equal_rows
        return next((rows // n for n in range(count, 1, -1) if rows % n == 0 and rows // n >= least), rows)
    units = table.num_embeddings // table.row_unit
    return -(-units // count) * table.row_unit


def row_slices(table: BaseEmbeddingConfig, count: int) -> tuple[Rect, ...]:
    """At most `count` slices of `rows_of_shards` rows, without empty ones.

    >>> row_slices(BaseEmbeddingConfig(10, 4, "t"), 4)
    (((0, 3), (0, 4)), ((3, 6), (0, 4)), ((6, 9), (0, 4)), ((9, 10), (0, 4)))
    """
    return tuple(EvenTiling(table.num_embeddings, rows_of_shards(table, count), [table.embedding_dim]))


def shards_of_sizes(
    table: BaseEmbeddingConfig, sizes: Sequence[int], ranks: Sequence[int], one_per_rank: bool
) -> list[Shard]:
    """Consecutive row shards of `sizes` rows on `ranks`; a size of 0 makes no shard.

    Args:
        one_per_rank: whether `sizes` must be as long as `ranks`; otherwise it may be shorter.

    Raises:
        PlanError: sizes that do not sum to the table's rows, or a wrong number of sizes.
    """
    check_sizes("rows", sizes, table.num_embeddings, table)
    if len(sizes) > len(ranks) or (one_per_rank and len(sizes) != len(ranks)):
        raise PlanError(f"table {table.name!r}: {len(sizes)} sizes for {len(ranks)} ranks. Fix: pass one size per rank")
    shards, at = [], 0
    for rank, size in zip(ranks, sizes, strict=False):
        if size:
            shards.append(Shard(rank, (at, at + size), (0, table.embedding_dim)))
        at += size
    return shards


def sizes_at_boundaries(table: BaseEmbeddingConfig, boundaries: Sequence[int]) -> list[int]:
    """Sizes of the row shards that begin at row 0 and at each boundary.

    Raises:
        PlanError: boundaries that are not ascending rows of the table.

    >>> sizes_at_boundaries(BaseEmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4), [2, 7])
    [2, 5, 3]
    """
    rows = table.num_embeddings
    edges = [0, *(int(row) for row in boundaries if row not in (0, rows)), rows]
    sizes = [after - before for before, after in pairwise(edges)]
    if min(sizes) <= 0 or len(set(boundaries)) != len(boundaries):
        raise PlanError(
            f"table {table.name!r} has {rows:,} rows, which cannot be split at boundaries={list(boundaries)!r}. "
            f"Fix: pass ascending, distinct rows between 1 and {rows - 1:,}"
        )
    return sizes


def bucket_sizes(table: BaseEmbeddingConfig, num_buckets: int, count: int) -> list[int]:
    """Rows of `count` row shards of whole buckets; the first shards have one more bucket if the numbers require it.

    Raises:
        PlanError: `num_buckets` does not divide the rows, or is below `count`.

    >>> bucket_sizes(BaseEmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4), 5, 4)
    [4, 2, 2, 2]
    """
    if num_buckets < count or table.num_embeddings % num_buckets:
        raise PlanError(
            f"table {table.name!r} has {table.num_embeddings:,} rows for {count} ranks, but num_buckets={num_buckets}. "
            f"Fix: pass a divisor of the rows that is at least {count}"
        )
    base, extra = divmod(num_buckets, count)
    return [table.num_embeddings // num_buckets * (base + (i < extra)) for i in range(count)]


def check_sizes(what: str, sizes: Sequence[int], total: int, table: BaseEmbeddingConfig) -> None:
    """Raises a `PlanError` unless `sizes` are not negative and sum to `total`, the table's rows or columns."""
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise PlanError(
            f"table {table.name!r} has {total:,} {what}, but the sizes {list(sizes)} sum to {sum(sizes):,}. "
            f"Fix: pass sizes that sum to {total:,}"
        )
