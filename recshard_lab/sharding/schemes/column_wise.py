"""Column-wise: vertical stripes; every rank that holds one looks up every id of the table.

::

    rank 0    rank 2    rank 1
    +----+    +----+    +---+
    |    |    |    |    |   |     E rows each, D columns in all
    +----+    +----+    +---+
"""

from collections.abc import Iterator, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import PlanError
from recshard_lab.sharding.schemes.base import Proposal, check_ranks, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling
from recshard_lab.sharding.schemes.nodes import asked_for

UNIT = 4  # columns; kernels read rows in vectors of four floats, so pieces keep to it where the dim allows


class ColumnWise:
    """Splits wide tables without partial sums; the ids go to every piece."""

    name = "column_wise"
    label = "CW"
    replicated = False

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        """As many shards as there are ranks and columns allow, then half, a quarter ... down to two.

        One shard of all columns where a single rank may be used and the scheme is requested by name.
        """
        least = constraints.min_partition if constraints is not None else None
        usable = usable_ranks(topology, constraints)
        count = min(len(usable), most_pieces(table.embedding_dim, least))
        if len(usable) == 1 and asked_for(self.name, constraints):
            yield Proposal(self.name, EvenTiling(table.num_embeddings, table.num_embeddings, [table.embedding_dim]))
        while count >= 2:
            yield Proposal(self.name, EvenTiling(table.num_embeddings, table.num_embeddings, widths(table, count)))
            count //= 2

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """One piece on each of `ranks`; left out, on as many ranks as the columns allow.

        Raises:
            PlanError: more ranks than pieces of at least four columns (one, where the dim is no multiple of 4).
        """
        most = most_pieces(table.embedding_dim, None)
        wanted = range(min(most, topology.world_size)) if ranks is None else ranks
        usable = check_ranks(wanted, topology.world_size)
        if len(usable) > most:
            raise PlanError(
                f"table {table.name!r} has {table.embedding_dim} columns, which cannot be cut into "
                f"{len(usable)} "
                f"pieces of at least {unit_of(table.embedding_dim)}. Fix: {most} ranks or fewer"
            )
        return Proposal(self.name, pieces(table, widths(table, len(usable)))).placed(usable)


def unit_of(embedding_dim: int) -> int:
    """Columns that a piece is a multiple of."""
    return UNIT if embedding_dim % UNIT == 0 else 1


def most_pieces(embedding_dim: int, min_partition: int | None) -> int:
    """How many pieces of at least `min_partition` columns (and whole units) fit."""
    unit = unit_of(embedding_dim)
    least = max(unit, min_partition or 0)
    return max(1, embedding_dim // (-(-least // unit) * unit))


def widths(table: BaseEmbeddingConfig, count: int) -> list[int]:
    """`count` widths in whole units that differ by one unit at most."""
    unit = unit_of(table.embedding_dim)
    each, more = divmod(table.embedding_dim // unit, count)
    return [unit * (each + (i < more)) for i in range(count)]


def pieces(table: BaseEmbeddingConfig, columns: Sequence[int]) -> tuple[Rect, ...]:
    """Vertical stripes of these widths from left to right."""
    at, found = 0, []
    for width in columns:
        found.append(((0, table.num_embeddings), (at, at + width)))
        at += width
    return tuple(found)
