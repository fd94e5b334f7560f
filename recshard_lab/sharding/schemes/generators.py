"""TorchRec's generators of one table's sharding: ``row_wise()``, ``grid_shard(host_indexes=[0, 1])``.

Each function returns a generator. A generator takes a table and a topology and returns a `ParameterSharding`.
`tiling` takes explicit rectangles. Every function takes the output path as ``route=``.
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
from recshard_lab.sharding.schemes.column_wise import column_slices, max_column_shards
from recshard_lab.sharding.schemes.flex_shard import default_hot_rows, hot_and_cold
from recshard_lab.sharding.schemes.grid_shard import grid_rects
from recshard_lab.sharding.schemes.nodes import ranks_of_host
from recshard_lab.sharding.schemes.row_wise import bucket_sizes, check_sizes, shards_of_sizes, sizes_at_boundaries

ParameterShardingGenerator: TypeAlias = Callable[[BaseEmbeddingConfig, Topology], ParameterSharding]
_RankChoice: TypeAlias = Callable[[BaseEmbeddingConfig, Topology], Sequence[int]]


@checks_arguments
def table_wise(
    rank: int | None = None,
    device: str | None = None,
    compute_kernel: str | None = None,
    *,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """The whole table on `rank`. Default: a rank chosen by a hash of the table's name.

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
    """A row shard on each rank, of equal size unless you pass sizes, boundaries or buckets.

    Args:
        sizes_placement: rows of each shard (0: no shard) and their device type, as in TorchRec.
        compute_kernel: default "fused".
        num_buckets: number of equal buckets of rows. Shards have whole buckets, and differ by at most one.
        boundaries: first rows of the shards, ascending; row 0 may be omitted.
        sizes: rows of each shard (0: no shard).
        ranks: ranks of the shards, in order. Default: 0, 1, ...

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> [(s.rank, s.rows) for s in row_wise(boundaries=[2], ranks=[1, 0])(movies, Topology(2)).shards]
    [(1, (0, 2)), (0, (2, 10))]
    """
    options = {"sizes_placement": sizes_placement, "num_buckets": num_buckets, "boundaries": boundaries, "sizes": sizes}
    passed = [name for name, value in options.items() if value is not None]
    if len(passed) > 1:
        raise PlanError(f"row_wise takes one of {', '.join(options)}, got {' and '.join(passed)}")
    if not passed:
        return _by_scheme("row_wise", ranks, compute_kernel, route)
    if sizes_placement is not None:
        sizes = sizes_placement[0]

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        shard_ranks = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        if num_buckets is not None:
            rows = bucket_sizes(table, num_buckets, len(shard_ranks))
        elif boundaries is not None:
            rows = sizes_at_boundaries(table, boundaries)
        else:
            rows = [int(size) for size in sizes or ()]
        shards = shards_of_sizes(table, rows, shard_ranks, one_per_rank=ranks is not None)
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
    """A column shard on each of `ranks`; a rank may occur twice.

    Args:
        ranks: ranks of the shards. Default: the most ranks that the columns allow.
        size_per_rank: columns of each shard. Default: as even as multiples of four allow.
        compute_kernel: default "fused".
        device_types: as in TorchRec; the same for every shard, because all ranks of a plan have one device type.

    Raises:
        PlanError: several device types.
    """
    if len(set(device_types or ())) > 1:
        raise PlanError(
            f"device_types={list(device_types or ())!r}: all ranks of a plan have one device type. Fix: pass one type"
        )
    if size_per_rank is None:
        return _by_scheme("column_wise", ranks, compute_kernel, route)
    sizes = [int(size) for size in size_per_rank]

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        check_sizes("columns", sizes, table.embedding_dim, table)
        shard_ranks = list(range(len(sizes))) if ranks is None else list(ranks)
        if len(shard_ranks) != len(sizes):
            raise PlanError(
                f"table {table.name!r}: {len(sizes)} sizes for {len(shard_ranks)} ranks. Fix: pass one size per rank"
            )
        kept = [(rank, size) for rank, size in zip(shard_ranks, sizes, strict=True) if size]
        proposal = Proposal("column_wise", column_slices(table, [size for _, size in kept]))
        return proposal.placed([rank for rank, _ in kept], compute_kernel or "fused", route)

    return generate


@checks_arguments
def table_row_wise(
    host_index: int, compute_kernel: str | None = None, *, route: str = "direct"
) -> ParameterShardingGenerator:
    """A row shard on each rank of node `host_index`.

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
    """A column shard on each rank of node `host_index`; TorchRec has this scheme, but not this function.

    Args:
        host_index: the node.
        size_per_rank: columns of each rank's shard (0: no shard). Default: as even as multiples of four allow.
        compute_kernel: default "fused".
    """
    if size_per_rank is None:

        def first_ranks(table: BaseEmbeddingConfig, topology: Topology) -> Sequence[int]:
            return ranks_of_host(host_index, topology)[: max_column_shards(table.embedding_dim)]

        return _by_scheme("table_column_wise", first_ranks, compute_kernel, route)

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        ranks = ranks_of_host(host_index, topology)[: len(size_per_rank)]
        sharding = column_wise(ranks, size_per_rank, compute_kernel, route=route)(table, topology)
        return ParameterSharding("table_column_wise", sharding.compute_kernel, shards=sharding.shards, route=route)

    return generate


@checks_arguments
def grid_shard(
    host_indexes: Sequence[int], compute_kernel: str | None = None, *, route: str = "direct"
) -> ParameterShardingGenerator:
    """A column slice for each node of `host_indexes`, split by rows over the ranks of that node.

    A node may occur twice.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=8)
    >>> sharding = grid_shard(host_indexes=[1, 0])(movies, Topology(4, local_world_size=2))
    >>> [(s.rank, s.rows, s.cols) for s in sharding.shards[:2]]
    [(2, (0, 5), (0, 4)), (3, (5, 10), (0, 4))]
    """
    hosts = list(host_indexes)
    if not hosts:
        raise PlanError("host_indexes is empty. Fix: host_indexes=[0]")

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        rects, rect_ranks = grid_rects(table, [ranks_of_host(host, topology) for host in hosts])
        return Proposal("grid_shard", rects).placed(rect_ranks, compute_kernel or "fused", route)

    return generate


@checks_arguments
def flex_shard(
    hot_rows: int | None = None,
    compute_kernel: str | None = None,
    *,
    ranks: Sequence[int] | None = None,
    route: str = "direct",
) -> ParameterShardingGenerator:
    """Rows ``[0, hot_rows)`` on every rank, a row shard of the others on each (FlexShard): for ids sorted by use.

    Args:
        hot_rows: number of replicated rows, less than all. Default: 1% of the rows.
        compute_kernel: default "fused".
        ranks: ranks of the row shards, in order. Default: 0, 1, ... Every rank stores the replicas.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> [(s.rank, s.rows) for s in flex_shard(hot_rows=2)(movies, Topology(2)).shards]
    [(0, (0, 2)), (1, (0, 2)), (0, (2, 6)), (1, (6, 10))]
    """

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        cold_ranks = check_ranks(range(topology.world_size) if ranks is None else ranks, topology.world_size)
        hot = default_hot_rows(table) if hot_rows is None else hot_rows
        rects, rect_ranks = hot_and_cold(table, hot, cold_ranks, topology.world_size)
        return Proposal("flex_shard", rects).placed(rect_ranks, compute_kernel or "fused", route)

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
    """A hand-drawn tiling: any rectangles that tile the table.

    Args:
        rects: shards, or ``(rank, rows, cols)`` with half-open spans; None means all rows or all columns. Equal
            rectangles with all columns on every rank are replicas.
        compute_kernel: default "fused".

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=8)
    >>> tiling([(0, (0, 4), None), (1, (4, 10), (0, 4)), (0, (4, 10), (4, 8))])(movies, Topology(2)).ranks
    [0, 1]
    """
    try:
        tiles = list(rects)
    except TypeError:
        raise PlanError(f"rects must be a list of Shard or (rank, rows, cols), got {rects!r}") from None
    if not isinstance(compute_kernel, str | None):
        raise PlanError(f"compute_kernel must be the name of a kernel or None, got {compute_kernel!r}")

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        shards = [_shard(tile, table) for tile in tiles]
        check_shards(table, shards, False, topology.world_size)
        return ParameterSharding("custom", compute_kernel or "fused", shards=shards, route=route)

    return generate


def _shard(tile: Shard | tuple[int, Span | None, Span | None], table: BaseEmbeddingConfig) -> Shard:
    if isinstance(tile, Shard):
        return tile
    try:
        rank, rows, cols = tile
        (r0, r1), (c0, c1) = rows or (0, table.num_embeddings), cols or (0, table.embedding_dim)
        return Shard(int(rank), (int(r0), int(r1)), (int(c0), int(c1)))
    except (TypeError, ValueError):
        raise PlanError(
            f"table {table.name!r}: a tile must be a Shard or (rank, (r0, r1), (c0, c1)), got {tile!r}"
        ) from None


def _by_scheme(
    name: str, ranks: _RankChoice | Sequence[int] | None, compute_kernel: str | None, route: str
) -> ParameterShardingGenerator:
    """A generator of the scheme's default sharding over `ranks`, which may depend on the table."""

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        chosen = ranks(table, topology) if callable(ranks) else ranks
        default = scheme_named(name).default(table, topology, chosen)
        kernel = compute_kernel or "fused"
        return ParameterSharding(default.sharding_type, kernel, default.ranks, shards=default.shards, route=route)

    return generate
