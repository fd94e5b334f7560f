"""TorchRec's hand-written plans: ``construct_module_sharding_plan(ebc, {"movies": row_wise(), ...})``.

`table_wise`, `row_wise`, `column_wise` and `data_parallel` return a generator: called with a table and the ranks
there are, it gives that table's `ParameterSharding`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from recshard_lab.sharding.schemes import scheme_named
from recshard_lab.sharding.schemes.base import Proposal
from recshard_lab.sharding.schemes.column_wise import pieces
from recshard_lab.sharding.shard import PlanError
from recshard_lab.sharding.topology import Topology
from recshard_lab.sharding.validate import nearest

ParameterShardingGenerator: TypeAlias = Callable[[BaseEmbeddingConfig, Topology], ParameterSharding]


def table_wise(
    rank: int | None = None, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """The whole table on `rank`; left out, on a rank drawn from the table's name.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> table_wise(rank=1)(movies, Topology(2)).shards
    (Shard(rank=1, rows=(0, 10), cols=(0, 4)),)
    """
    return _by_scheme("table_wise", None if rank is None else [rank], compute_kernel)


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """A stripe of rows on each rank.

    Args:
        sizes_placement: rows of each rank's stripe (0: none) and their device type, as in TorchRec; equal
            blocks when left out.
        compute_kernel: "fused" when left out.
    """
    if sizes_placement is None:
        return _by_scheme("row_wise", None, compute_kernel)
    sizes = [int(size) for size in sizes_placement[0]]

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        _sums_to("rows", sizes, table.num_embeddings, table)
        if len(sizes) > topology.world_size:
            raise PlanError(
                f"table {table.name!r}: {len(sizes)} sizes for {topology.world_size} ranks. "
                f"Smallest fix: one size per rank"
            )
        at, rects, ranks = 0, [], []
        for rank, size in enumerate(sizes):
            if size:
                rects.append(((at, at + size), (0, table.embedding_dim)))
                ranks.append(rank)
            at += size
        return Proposal("row_wise", tuple(rects)).placed(ranks, compute_kernel or "fused")

    return generate


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """A stripe of columns on each of `ranks`, a rank named twice holding two.

    Args:
        ranks: where the pieces go; as many ranks as the columns allow when left out.
        size_per_rank: columns of each piece; as even as multiples of four allow when left out.
        compute_kernel: "fused" when left out.
    """
    if size_per_rank is None:
        return _by_scheme("column_wise", ranks, compute_kernel)
    sizes = [int(size) for size in size_per_rank]

    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        _sums_to("columns", sizes, table.embedding_dim, table)
        where = list(range(len(sizes))) if ranks is None else list(ranks)
        if len(where) != len(sizes):
            raise PlanError(f"table {table.name!r}: {len(sizes)} sizes for {len(where)} ranks: give one size per rank")
        kept = [(rank, size) for rank, size in zip(where, sizes, strict=True) if size]
        cut = Proposal("column_wise", pieces(table, [size for _, size in kept]))
        return cut.placed([rank for rank, _ in kept], compute_kernel or "fused")

    return generate


def data_parallel() -> ParameterShardingGenerator:
    """A replica on every rank."""
    return _by_scheme("data_parallel", None, None)


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one embedding collection, table by table.

    Args:
        module: anything with ``embedding_bag_configs()`` or ``embedding_configs()``.
        per_param_sharding: table name -> `table_wise(...)`, `row_wise(...)`, ...; every table once.
        sharder: accepted as in TorchRec; the geometry does not depend on it.
        local_size: ranks of one host; all when left out.
        world_size: ranks; those of the process group where one runs, 1 otherwise.
        device_type: "cpu" or "cuda".

    Raises:
        PlanError: a table left out, a name that is no table, a scheme that cannot cut its table.
    """
    tables = configs_of(module)
    if tables is None:
        raise PlanError(f"{type(module).__name__} has neither embedding_bag_configs() nor embedding_configs()")
    names = [table.name for table in tables]
    for name in per_param_sharding:
        if name not in names:
            raise PlanError(f"no table is named {name!r}{nearest(name, names)}; tables: {', '.join(names)}")
    world_size = running_world_size() if world_size is None else world_size
    topology = Topology(world_size, compute_device=device_type or "cpu", local_world_size=local_size or world_size)
    plan = EmbeddingModuleShardingPlan()
    for table in tables:
        if table.name not in per_param_sharding:
            raise PlanError(
                f"table {table.name!r} has no sharding. Smallest fix: {{{table.name!r}: table_wise(rank=0)}}"
            )
        plan[table.name] = per_param_sharding[table.name](table, topology)
    ShardingPlan({"": plan}).validate(tables, world_size)
    return plan


def configs_of(module: Any) -> list[BaseEmbeddingConfig] | None:
    """The tables of an embedding collection, or None if `module` is none."""
    for method in ("embedding_bag_configs", "embedding_configs"):
        if callable(getattr(module, method, None)):
            return list(getattr(module, method)())
    return None


def running_world_size() -> int:
    """Ranks of the default process group, or 1 where none runs."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _by_scheme(name: str, ranks: Sequence[int] | None, compute_kernel: str | None) -> ParameterShardingGenerator:
    def generate(table: BaseEmbeddingConfig, topology: Topology) -> ParameterSharding:
        made = scheme_named(name).default(table, topology, ranks)
        return ParameterSharding(made.sharding_type, compute_kernel or "fused", made.ranks, shards=made.shards)

    return generate


def _sums_to(what: str, sizes: Sequence[int], total: int, table: BaseEmbeddingConfig) -> None:
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise PlanError(
            f"table {table.name!r} has {total:,} {what}, but the sizes {list(sizes)} sum to {sum(sizes):,}. "
            f"Smallest fix: sizes that sum to {total:,}"
        )
