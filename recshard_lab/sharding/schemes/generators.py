"""How TorchRec's users name the sharding of one table by hand: ``row_wise()``, ``grid_shard(host_indexes=[0, 1])``.

Each returns a generator: called with a table and the ranks there are, it gives that table's `ParameterSharding`.
`tiling` takes the rectangles themselves. Every one takes ``route=``: how its looked-up rows come home.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Span
from recshard_lab.sharding.plan.types import PlanError, Shard
from recshard_lab.sharding.plan.validate import check_shards
from recshard_lab.sharding.schemes import scheme_named
from recshard_lab.sharding.schemes.base import Proposal, check_ranks
from recshard_lab.sharding.schemes.column_wise import most_pieces, pieces
from recshard_lab.sharding.schemes.flex_shard import default_hot_rows, hot_and_cold
from recshard_lab.sharding.schemes.grid_shard import checkerboard
from recshard_lab.sharding.schemes.nodes import ranks_of_host
from recshard_lab.sharding.schemes.row_wise import bucket_sizes, sizes_between, stripes_of, sums_to

ParameterShardingGenerator: TypeAlias = Callable[[BaseEmbeddingConfig, Topology], ParameterSharding]
_Where: TypeAlias = Callable[[BaseEmbeddingConfig, Topology], Sequence[int]]


@checks_arguments
def table_wise(
    rank: int | None = None,
    device: str | None = None,
    compute_kernel: str | None = None,
    *,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """The whole table on `rank`; left out, on a rank drawn from the table's name.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> table_wise(rank=1)(movies, Topology(2)).shards
    (Shard(rank=1, rows=(0, 10), cols=(0, 4)),)
    """
    return _by_scheme("table_wise", None if rank is None else [rank], compute_kernel, route)


@checks_arguments
def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
    *,
    boundaries: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """A stripe of rows on each rank: equal blocks, unless sizes, boundaries or buckets say otherwise.

    Args:
        sizes_placement: rows of each stripe (0: none) and their device type, as in TorchRec.
        compute_kernel: "fused" when left out.
        num_buckets: equally many rows a bucket; no bucket is cut, and ranks differ by one bucket at most.
        boundaries: the rows at which a new stripe begins, ascending; 0 and the last row need not be named.
        sizes: rows of each stripe (0: none).
        ranks: where the stripes go, in order; ranks 0, 1, ... when left out.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> [(s.rank, s.rows) for s in row_wise(boundaries=[2], ranks=[1, 0])(movies, Topology(2)).shards]
    [(1, (0, 2)), (0, (2, 10))]
    """
    named = {"sizes_placement": sizes_placement, "num_buckets": num_buckets, "boundaries": boundaries, "sizes": sizes}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise PlanError(f"row_wise takes one of {', '.join(named)}, got {' and '.join(given)}")
    if not given:
        return _by_scheme("row_wise", ranks, compute_kernel, route)
    if sizes_placement is not None:
        sizes = sizes_placement[0]

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        where = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        if num_buckets is not None:
            wanted = bucket_sizes(table, num_buckets, len(where))
        elif boundaries is not None:
            wanted = sizes_between(table, boundaries)
        else:
            wanted = [int(size) for size in sizes or ()]
        shards = stripes_of(table, wanted, where, named=ranks is not None)
        return ParameterSharding("row_wise", compute_kernel or "fused", shards=shards, route=route)

    return generate


@checks_arguments
def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
    *,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """A stripe of columns on each of `ranks`, a rank named twice holding two.

    Args:
        ranks: where the pieces go; as many ranks as the columns allow when left out.
        size_per_rank: columns of each piece; as even as multiples of four allow when left out.
        compute_kernel: "fused" when left out.
        device_types: as in TorchRec; the same for every piece, since a plan's ranks are all of one kind.

    Raises:
        PlanError: pieces on several kinds of device.
    """
    if len(set(device_types or ())) > 1:
        raise PlanError(
            f"device_types={list(device_types or ())!r}: all ranks of a plan are of one kind. Fix: one type"
        )
    if size_per_rank is None:
        return _by_scheme("column_wise", ranks, compute_kernel, route)
    sizes = [int(size) for size in size_per_rank]

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        sums_to("columns", sizes, table.embedding_dim, table)
        where = list(range(len(sizes))) if ranks is None else list(ranks)
        if len(where) != len(sizes):
            raise PlanError(f"table {table.name!r}: {len(sizes)} sizes for {len(where)} ranks: give one size per rank")
        kept = [(rank, size) for rank, size in zip(where, sizes, strict=True) if size]
        cut = Proposal("column_wise", pieces(table, [size for _, size in kept]))
        return cut.placed([rank for rank, _ in kept], compute_kernel or "fused", route)

    return generate


@checks_arguments
def table_row_wise(
    host_index: int, compute_kernel: str | None = None, *, route: str = "direct"
) -> ParameterShardingGenerator:
    """A stripe of rows on each rank of node `host_index`.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> [s.rank for s in table_row_wise(host_index=1)(movies, Topology(4, local_world_size=2)).shards]
    [2, 3]
    """
    return _by_scheme("table_row_wise", lambda _, ranks: ranks_of_host(host_index, ranks), compute_kernel, route)


@checks_arguments
def table_column_wise(
    host_index: int,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    *,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """A stripe of columns on each rank of node `host_index`; TorchRec has the scheme, but no helper for it.

    Args:
        host_index: the node.
        size_per_rank: columns of each rank of the node (0: none); as even as multiples of four allow when left out.
        compute_kernel: "fused" when left out.
    """
    if size_per_rank is None:

        def first_ranks(table: BaseEmbeddingConfig, topology: Topology) -> Sequence[int]:
            return ranks_of_host(host_index, topology)[: most_pieces(table.embedding_dim, None)]

        return _by_scheme("table_column_wise", first_ranks, compute_kernel, route)

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        where = ranks_of_host(host_index, topology)[: len(size_per_rank)]
        made = column_wise(where, size_per_rank, compute_kernel, route=route)(table, topology)
        return ParameterSharding("table_column_wise", made.compute_kernel, shards=made.shards, route=route)

    return generate


@checks_arguments
def grid_shard(
    host_indexes: Sequence[int], compute_kernel: str | None = None, *, route: str = "direct"
) -> ParameterShardingGenerator:
    """A column piece for each node of `host_indexes`, split by rows over the ranks of that node.

    A node named twice holds two column pieces.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=8)
    >>> made = grid_shard(host_indexes=[1, 0])(movies, Topology(4, local_world_size=2))
    >>> [(s.rank, s.rows, s.cols) for s in made.shards[:2]]
    [(2, (0, 5), (0, 4)), (3, (5, 10), (0, 4))]
    """
    hosts = list(host_indexes)
    if not hosts:
        raise PlanError("host_indexes is empty. Fix: host_indexes=[0]")

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        rects, where = checkerboard(table, [ranks_of_host(host, topology) for host in hosts])
        return Proposal("grid_shard", rects).placed(where, compute_kernel or "fused", route)

    return generate


@checks_arguments
def flex_shard(
    hot_rows: int | None = None,
    compute_kernel: str | None = None,
    *,
    ranks: Sequence[int] | None = None,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """Rows ``[0, hot_rows)`` on every rank, a stripe of the others on each (FlexShard): for ids sorted by use.

    Args:
        hot_rows: how many rows are replicated, fewer than the table has; a hundredth of them when left out.
        compute_kernel: "fused" when left out.
        ranks: where the stripes go, in order; ranks 0, 1, ... when left out. Replicas lie on every rank.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> [(s.rank, s.rows) for s in flex_shard(hot_rows=2)(movies, Topology(2)).shards]
    [(0, (0, 2)), (1, (0, 2)), (0, (2, 6)), (1, (6, 10))]
    """

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        where = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        hot = default_hot_rows(table) if hot_rows is None else hot_rows
        rects, owners = hot_and_cold(table, hot, where, topology.world_size)
        return Proposal("flex_shard", rects).placed(owners, compute_kernel or "fused", route)

    return generate


def data_parallel() -> ParameterShardingGenerator:
    """A replica on every rank."""
    return _by_scheme("data_parallel", None, None, "direct")


@names_wrong_arguments
def tiling(
    rects: Iterable[Shard | tuple[int, Span | None, Span | None]],
    compute_kernel: str | None = None,
    *,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """A tiling drawn by hand: any rectangles that together are the table.

    Args:
        rects: shards, or ``(rank, rows, cols)`` with half-open spans; None is all rows, all columns. The same rows,
            whole, on every rank are replicas.
        compute_kernel: "fused" when left out.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=8)
    >>> tiling([(0, (0, 4), None), (1, (4, 10), (0, 4)), (0, (4, 10), (4, 8))])(movies, Topology(2)).ranks
    [0, 1]
    """
    try:
        drawn = list(rects)
    except TypeError:
        raise PlanError(f"rects must be a list of Shard or (rank, rows, cols), got {rects!r}") from None
    if not isinstance(compute_kernel, str | None):
        raise PlanError(f"compute_kernel must be a kernel's name or None, got {compute_kernel!r}")

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        shards = [_shard(piece, table) for piece in drawn]
        check_shards(table, shards, False, topology.world_size)
        return ParameterSharding("custom", compute_kernel or "fused", shards=shards, route=route)

    return generate


def _shard(piece: Shard | tuple[int, Span | None, Span | None], table: BaseEmbeddingConfig) -> Shard:
    if isinstance(piece, Shard):
        return piece
    try:
        rank, rows, cols = piece
        (r0, r1), (c0, c1) = rows or (0, table.num_embeddings), cols or (0, table.embedding_dim)
        return Shard(int(rank), (int(r0), int(r1)), (int(c0), int(c1)))
    except (TypeError, ValueError):
        raise PlanError(
            f"table {table.name!r}: a piece of a tiling is a Shard or (rank, (r0, r1), (c0, c1)), got {piece!r}"
        ) from None


def _by_scheme(
    name: str, where: _Where | Sequence[int] | None, compute_kernel: str | None, route: str
) -> ParameterShardingGenerator:
    """where: the ranks, or what chooses them for a table; left out, the scheme does."""

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        ranks = where(table, topology) if callable(where) else where
        made = scheme_named(name).default(table, topology, ranks)
        kernel = compute_kernel or "fused"
        return ParameterSharding(made.sharding_type, kernel, made.ranks, shards=made.shards, route=route)

    return generate
