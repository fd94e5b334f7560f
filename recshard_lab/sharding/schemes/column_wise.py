"""Column-wise: column shards; every rank that stores one looks up every id of the table.

::

    rank 0    rank 2    rank 1
    +----+    +----+    +---+
    |    |    |    |    |   |     E rows each, D columns in all
    +----+    +----+    +---+

Bytes between ranks per step: ``4 * (W - 1) * B * (W * (L + 1) + 2 * D)`` with a shard on every rank, derived in
`schemes/__init__.py`. Every id goes to all ranks, W times the ids of table-wise. The rows are those of table-wise.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import PlanError
from recshard_lab.sharding.schemes.base import Proposal, check_ranks, halves, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

UNIT = 4  # columns: kernels read rows in vectors of four floats, so shards use multiples of 4 if the dim allows


class ColumnWise:
    """Splits wide tables without partial sums; every shard receives the ids."""

    name = "column_wise"
    label = "CW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """One shard per usable rank, as far as the columns allow, then a half, a quarter, ... down to two.

        A single usable rank stores one shard of all columns.
        """
        ranks = len(usable_ranks(topology, constraints))
        for count in column_counts(table, ranks, constraints):
            yield Proposal(self.name, EvenTiling(table.num_embeddings, table.num_embeddings, widths(table, count)))

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One shard on each of `ranks`. Default: the most ranks that the columns allow.

        Raises:
            PlanError: more ranks than shards of at least four columns (one, if the dim is not a multiple of 4).
        """
        if ranks is None:
            ranks = range(min(max_column_shards(table.embedding_dim), topology.world_size))
        usable = check_ranks(ranks, topology.world_size)
        check_num_column_shards(table, len(usable))
        return Proposal(self.name, column_slices(table, widths(table, len(usable)))).placed(usable)


def unit_of(embedding_dim: int) -> int:
    """The number of columns of every shard is a multiple of this."""
    return UNIT if embedding_dim % UNIT == 0 else 1


def max_column_shards(embedding_dim: int, constraints: ParameterConstraints | None = None) -> int:
    """Maximum number of column shards of whole units, with at least ``min_partition`` columns."""
    unit = unit_of(embedding_dim)
    least = max(unit, (constraints.min_partition if constraints else None) or 0)
    return max(1, embedding_dim // (-(-least // unit) * unit))


def column_counts(
    table: BaseEmbeddingConfig, ranks: int, constraints: ParameterConstraints | None = None
) -> tuple[int, ...]:
    """Numbers of column shards for so many ranks; none if several ranks are usable and the columns allow one shard."""
    most = min(ranks, max_column_shards(table.embedding_dim, constraints))
    return halves(most) if most > 1 or ranks == 1 else ()


def check_num_column_shards(table: BaseEmbeddingConfig, count: int, per: str = "rank") -> None:
    """Raises a `PlanError` if the table's columns cannot be split into `count` shards."""
    most = max_column_shards(table.embedding_dim)
    if count > most:
        raise PlanError(
            f"table {table.name!r} has {table.embedding_dim} columns, which cannot be split into {count} shards (one "
            f"per {per}) of at least {unit_of(table.embedding_dim)}. Fix: use at most {most} {per}{'s' * (most > 1)}"
        )


def widths(table: BaseEmbeddingConfig, count: int) -> list[int]:
    """`count` widths in whole units that differ by at most one unit."""
    unit = unit_of(table.embedding_dim)
    base, extra = divmod(table.embedding_dim // unit, count)
    return [unit * (base + (i < extra)) for i in range(count)]


def column_slices(table: BaseEmbeddingConfig, columns: Sequence[int]) -> tuple[Rect, ...]:
    """Column slices of these widths from left to right."""
    return tuple(((0, table.num_embeddings), cols) for cols in pairwise(accumulate(columns, initial=0)))
