"""Plans both ways between this library and an installed TorchRec.

A plan here is rectangles, whatever its label. TorchRec runs a scheme by its name and expects that scheme's rectangles:
row stripes of ``ceil(rows / ranks)`` in the order of the ranks, empty ones included. So every table is checked against
what TorchRec would run, and one that it would run otherwise is refused. What its plans have no place for (the route, a
label of one's own, a replicated table stepped in backward) is kept beside its entry, and comes back with it.
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
"""Attribute of TorchRec's ``ParameterSharding``: (what it says, read back; what it was made from)."""


def to_torchrec(
    plan: ShardingPlan,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device_type: str = "cpu",
    paths: Mapping[str, str] | None = None,
) -> Any:
    """The same plan as TorchRec's ``ShardingPlan``, which its ``DistributedModelParallel`` takes.

    Args:
        plan: with every rectangle spelled out (`ShardingPlan.resolved`); a data-parallel table needs none.
        world_size: ranks that it will run on; as many as the plan names when left out.
        local_world_size: ranks of one node; all when left out.
        device_type: "cpu" or "cuda".
        paths: module path here -> module path there, where a model differs; the same when left out.

    Raises:
        PlanError: a table whose rectangles TorchRec would not run as they are, by name, with a fix.
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
    """TorchRec's plan as this library's. Data-parallel tables, whose size a plan does not tell, are left to `resolved`.

    Args:
        plan: TorchRec's ``ShardingPlan``.
        paths: module path there -> module path here, where a model differs.

    Raises:
        PlanError: a kernel that this library does not have, or a module that is no embedding collection.
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
            "a plan becomes TorchRec's where the package torchrec is installed, and here it is not; plan.to_json() and "
            "plan.to_script() need nothing else",
            name="torchrec",
        ) from None

    if types.ShardingPlan is ShardingPlan:
        raise ImportError(
            "torchrec's names are served by recshard_lab here, so there is no other plan to convert to: call "
            "recshard_lab.compat.torchrec.uninstall() first"
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
    """Ranks fill nodes in order."""

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
    """The scheme by whose name TorchRec runs these very rectangles, and they in its order, with its empty stripes."""
    if not ours.shards:
        raise PlanError(f"table {name!r} has no rectangles yet. Fix: plan.resolved(tables, world_size)")
    if ours.partly_replicated:
        hot = next(shard for shard, copy in zip(ours.shards, ours.replica_flags, strict=True) if copy)
        raise PlanError(
            f"table {name!r} ({ours.sharding_type}) has rows {hot.rows[0]:,} to {hot.rows[1] - 1:,} on every rank and "
            f"the others on some: TorchRec has no such sharding. Fix: row_wise() for this table"
        )
    if len({shard.tier for shard in ours.shards}) > 1:
        raise PlanError(
            f"table {name!r} ({ours.sharding_type}) has shards in both memories of a rank, and TorchRec's kernels "
            f"serve a whole table. Fix: compute_kernel='fused' or 'fused_uvm' with all shards in one tier"
        )
    flat = (replace(shard, tier=HBM) for shard in ours.shards)  # its kernel's name says where they lie
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
        f"table {name!r} ({ours.sharding_type}, {len(ours.shards)} shards on ranks {ours.ranks}) is not cut as {what} "
        f"would cut it on {nodes.world_size} ranks of {nodes.local} a node, where row stripes are of equal height and "
        f"lie in the order of the ranks. Fix: the scheme's default, such as row_wise() without sizes or ranks"
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
"""What TorchRec runs under each name, for a table of this size on these ranks; None where it never would."""
