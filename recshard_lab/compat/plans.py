"""Plans both ways between this library and an installed TorchRec.

A plan here is a list of shards for each table. TorchRec runs a scheme by its name and expects that scheme's shards:
row shards of ``ceil(rows / ranks)`` in the order of the ranks, including empty ones. Every table is checked against the
shards that TorchRec would run, and refused if they differ. TorchRec's plans cannot store the route, a custom label or a
replicated table with an optimizer in backward. An attribute of their entry keeps them for the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from recshard_lab.sharding import (
    CacheParams,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    ShardingType,
)
from recshard_lab.sharding.plan.types import HBM

KEPT = "_recshard_lab"
"""Attribute of TorchRec's ``ParameterSharding``: (its sharding as read back, the sharding it was converted from)."""


def to_torchrec(
    plan: ShardingPlan,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device_type: str = "cpu",
    paths: Mapping[str, str] | None = None,
) -> Any:
    """Converts a plan to TorchRec's ``ShardingPlan``, for its ``DistributedModelParallel``.

    Args:
        plan: with explicit shards (`ShardingPlan.resolved`). Data-parallel tables need none.
        world_size: number of ranks. Default: those in the plan.
        local_world_size: ranks per node. Default: all.
        device_type: "cpu" or "cuda".
        paths: module path here -> module path in TorchRec. Default: the same path.

    Raises:
        PlanError: TorchRec would run other shards of a table.
        ImportError: TorchRec is not installed, or its names are served by this library.
    """
    theirs = _torchrec()
    world_size = plan.world_size if world_size is None else world_size
    nodes = _Nodes(world_size, world_size if local_world_size is None else local_world_size)
    return theirs.ShardingPlan(
        plan={
            (paths or {}).get(path, path): theirs.EmbeddingModuleShardingPlan(
                {name: _entry(theirs, name, ours, nodes, device_type) for name, ours in tables.items()}
            )
            for path, tables in plan.plan.items()
        }
    )


def from_torchrec(plan: Any, paths: Mapping[str, str] | None = None) -> ShardingPlan:
    """Converts a plan of TorchRec. Call `resolved` for data-parallel tables: the plan does not have their sizes.

    Args:
        plan: TorchRec's ``ShardingPlan``.
        paths: module path in TorchRec -> module path here. Default: the same path.

    Raises:
        PlanError: an unsupported kernel, or the plan of another module than an embedding collection.
    """
    found: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, tables in plan.plan.items():
        if not isinstance(tables, Mapping):
            raise PlanError(f"module {path!r} has a {type(tables).__name__}, expected the plan of embedding tables")
        own = {name: _own(name, theirs) for name, theirs in tables.items()}
        found[(paths or {}).get(path, path)] = EmbeddingModuleShardingPlan(own)
    return ShardingPlan(found)


def _torchrec() -> Any:
    try:
        from torchrec.distributed import types
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchrec":
            raise
        raise ModuleNotFoundError(
            "to_torchrec needs the package torchrec, which is not installed. Fix: pip install torchrec, or "
            "plan.to_json()",
            name="torchrec",
        ) from None

    if types.ShardingPlan is ShardingPlan:
        raise ImportError(
            "recshard_lab serves the names of torchrec, so TorchRec's ShardingPlan cannot be imported. Fix: "
            "recshard_lab.compat.uninstall()"
        )
    return types


def _own(name: str, theirs: Any) -> ParameterSharding:
    kernel = str(theirs.compute_kernel)
    if kernel not in [str(known) for known in EmbeddingComputeKernel]:
        raise PlanError(
            f"table {name!r} is on TorchRec's kernel {kernel!r}, which recshard_lab does not have. Fix: 'fused'"
        )
    spec, ranks = theirs.sharding_spec, theirs.ranks
    cache, caches = getattr(theirs, "cache_params", None), kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING
    params = CacheParams(cache.algorithm, cache.load_factor) if cache is not None and caches else None
    if spec is None:
        read = ParameterSharding(theirs.sharding_type, kernel, ranks, None, params)
    else:
        read = ParameterSharding(theirs.sharding_type, kernel, None, spec, params)
    told, ours = getattr(theirs, KEPT, (None, None))
    return ours if told == read and ours is not None else read


class _Nodes:
    """Nodes of consecutive ranks."""

    def __init__(self, world_size: int, local: int) -> None:
        if world_size < 1 or local < 1 or world_size % local:
            raise PlanError(f"world_size {world_size} is not a multiple of local_world_size {local}")
        self.world_size, self.local = world_size, local

    def ranks_with(self, rank: int) -> list[int]:
        first = rank // self.local * self.local
        return list(range(first, first + self.local))


def _entry(theirs: Any, name: str, ours: ParameterSharding, nodes: _Nodes, device_type: str) -> Any:
    if ours.replicated:
        made = theirs.ParameterSharding(str(ours.sharding_type), "dense", list(range(nodes.world_size)), None)
    else:
        scheme, shards = _as_they_run_it(name, ours, nodes)
        ranks = [shard.rank for shard in shards]
        spec = _spec(shards, device_type, nodes)
        made = theirs.ParameterSharding(scheme, ours.compute_kernel, ranks, spec)
        if ours.cache_params is not None:
            made.cache_params = _their_cache(theirs, ours.cache_params)
    setattr(made, KEPT, (_own(name, made), ours))
    return made


def _their_cache(theirs: Any, ours: CacheParams) -> Any:
    """TorchRec has no emulated cost. Its default algorithm is LRU."""
    algorithm = None
    if ours.algorithm != "lru":
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm

        algorithm = CacheAlgorithm[ours.algorithm.upper()]
    return theirs.CacheParams(algorithm=algorithm, load_factor=ours.load_factor)


def _spec(shards: Sequence[Shard], device_type: str, nodes: _Nodes) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]],
                shard_sizes=[shard.num_rows, shard.num_cols],
                placement=f"rank:{shard.rank}/{device_type}"
                + (f":{shard.rank % nodes.local}" if device_type == "cuda" else ""),
            )
            for shard in shards
        ]
    )


def _as_they_run_it(name: str, ours: ParameterSharding, nodes: _Nodes) -> tuple[str, list[Shard]]:
    """The scheme under which TorchRec runs these shards, and the shards in its order, with its empty row shards."""
    if not ours.shards:
        raise PlanError(f"table {name!r} has no shards. Fix: plan.resolved(tables, world_size)")
    if ours.partly_replicated:
        hot = next(shard for shard, copy in zip(ours.shards, ours.replica_flags, strict=True) if copy)
        raise PlanError(
            f"table {name!r} ({ours.sharding_type}) has rows {hot.rows[0]:,} to {hot.rows[1] - 1:,} on every rank and "
            f"the others on some ranks, which TorchRec does not support. Fix: row_wise() for this table"
        )
    if len({shard.tier for shard in ours.shards}) > 1:
        raise PlanError(
            f"table {name!r} ({ours.sharding_type}) has shards in both memories of a rank, but a kernel of TorchRec "
            f"has all shards of a table. Fix: compute_kernel='fused' or 'fused_uvm' with all shards in one tier"
        )
    flat = (replace(shard, tier=HBM) for shard in ours.shards)  # the kernel's name has the memory
    ours_sorted = sorted(flat, key=lambda shard: (shard.cols, shard.rows))
    rows, cols = max(s.rows[1] for s in ours_sorted), max(s.cols[1] for s in ours_sorted)
    beyond = [shard.rank for shard in ours_sorted if shard.rank >= nodes.world_size]
    if beyond:
        raise PlanError(f"table {name!r} has a shard on rank {beyond[0]}, but world_size is {nodes.world_size}")
    named = ours.sharding_type in _FORMS
    for scheme in [ours.sharding_type] if named else _FORMS:
        found = _FORMS[scheme](ours_sorted, rows, cols, nodes)
        if found is not None and [s for s in found if s.num_rows] == ours_sorted:
            return str(scheme), found
    what = f"TorchRec's {ours.sharding_type}" if named else "any scheme of TorchRec's"
    raise PlanError(
        f"table {name!r} ({ours.sharding_type}, {len(ours.shards)} shards on ranks {ours.ranks}) is not split as by "
        f"{what} on {nodes.world_size} ranks, {nodes.local} per node: its row shards have equal heights, in the "
        f"order of the ranks. Fix: the scheme's default, such as row_wise() without sizes or ranks"
    )


def _stripes(rows: int, cols: tuple[int, int], ranks: Sequence[int]) -> list[Shard]:
    block = -(-rows // len(ranks))
    edges = [min(rows, block * number) for number in range(len(ranks) + 1)]
    return [Shard(rank, (edges[number], edges[number + 1]), cols) for number, rank in enumerate(ranks)]


def _table_wise(shards: list[Shard], rows: int, cols: int, nodes: _Nodes) -> list[Shard] | None:
    return shards if len(shards) == 1 else None


def _column_wise(shards: list[Shard], rows: int, cols: int, nodes: _Nodes) -> list[Shard] | None:
    return shards if all(shard.rows == (0, rows) for shard in shards) else None


def _row_wise(shards: list[Shard], rows: int, cols: int, nodes: _Nodes) -> list[Shard] | None:
    return _stripes(rows, (0, cols), range(nodes.world_size))


def _table_row_wise(shards: list[Shard], rows: int, cols: int, nodes: _Nodes) -> list[Shard] | None:
    return _stripes(rows, (0, cols), nodes.ranks_with(shards[0].rank))


def _table_column_wise(shards: list[Shard], rows: int, cols: int, nodes: _Nodes) -> list[Shard] | None:
    own = nodes.ranks_with(shards[0].rank)
    return _column_wise(shards, rows, cols, nodes) if all(shard.rank in own for shard in shards) else None


def _grid_shard(shards: list[Shard], rows: int, cols: int, nodes: _Nodes) -> list[Shard] | None:
    pieces = {shard.cols: shard.rank for shard in reversed(shards)}  # the first rank of each
    return [shard for piece in sorted(pieces) for shard in _stripes(rows, piece, nodes.ranks_with(pieces[piece]))]


_FORMS: dict[str, Callable[[list[Shard], int, int, _Nodes], list[Shard] | None]] = {
    ShardingType.TABLE_WISE: _table_wise,
    ShardingType.COLUMN_WISE: _column_wise,
    ShardingType.ROW_WISE: _row_wise,
    ShardingType.TABLE_ROW_WISE: _table_row_wise,
    ShardingType.TABLE_COLUMN_WISE: _table_column_wise,
    ShardingType.GRID_SHARD: _grid_shard,
}
"""The shards that TorchRec runs under each scheme, for a table of this size on these ranks; None if none fit."""
