"""The plan of one table: its shards, kernel and output path."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.interrupts import uninterrupted
from recshard_lab.sharding.plan.cache_params import CacheParams
from recshard_lab.sharding.plan.types import (
    DDR,
    EmbeddingComputeKernel,
    PlanError,
    Shard,
    ShardingType,
    check_route,
    nearest,
)
from recshard_lab.sharding.plan.validate import as_shards, replica_flags

KERNELS = tuple(kernel.value for kernel in EmbeddingComputeKernel)


@names_wrong_arguments
@dataclass(frozen=True, init=False)
class ParameterSharding:
    """How one table is sharded, and which ranks store its shards.

    Args:
        sharding_type: the scheme's name. It is a label and may be any string ("custom" for a hand-drawn tiling). Only
            "data_parallel" changes behaviour: every rank stores the whole table.
        compute_kernel: "fused" (the optimizer runs in backward), "dense", or "fused_uvm": fused, with all shards in
            host memory. "fused_uvm_caching": the same, with a cache of rows in the rank's memory. With "fused", each
            shard has its own tier.
        ranks: the participating ranks. Default: the ranks of the shards.
        sharding_spec: torch's ``EnumerableShardingSpec`` instead of `shards`, as TorchRec passes it.
        cache_params: the cache of "fused_uvm_caching". Default: ``CacheParams()``.
        shards: the shards. You may omit them for data_parallel, and for any registered scheme if you call
            `ShardingPlan.resolved` before running the plan.
        route: the output path, one of `ROUTES`. All paths give the same result.

    Raises:
        PlanError: both `shards` and `sharding_spec`; a shard on a rank that is not in `ranks`; an unknown route, or a
            route other than "direct" for data_parallel, which exchanges no rows; `cache_params` of another kernel.

    >>> ParameterSharding("table_wise", shards=[Shard(1, (0, 100), (0, 8))]).ranks
    [1]
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None
    shards: tuple[Shard, ...]
    route: str
    cache_params: CacheParams | None

    devices = None
    """Rank -> device in the placements of `sharding_spec`; None: "cpu". Plans that differ in it alone are equal."""

    def __init__(
        self,
        sharding_type: str,
        compute_kernel: str = "fused",
        ranks: Sequence[int] | None = None,
        sharding_spec: Any = None,
        cache_params: CacheParams | None = None,
        *,
        shards: Iterable[Shard] = (),
        route: str = "direct",
    ) -> None:
        shards = as_shards(shards)
        if sharding_spec is not None:
            if shards:
                raise PlanError("shards and sharding_spec are mutually exclusive. Fix: pass one of them")
            shards = shards_from_spec(sharding_spec)
            placements = [entry.placement for entry in sharding_spec.shards]
            object.__setattr__(self, "devices", {int(place.rank()): str(place.device()) for place in placements})
        shard_ranks = list(dict.fromkeys(shard.rank for shard in shards))
        if ranks is not None:
            if not all(isinstance(rank, numbers.Integral) and not isinstance(rank, bool) for rank in ranks):
                raise PlanError(f"ranks must be whole numbers, got {shown(ranks)}. Fix: ranks=[0, 1]")
            ranks = [int(rank) for rank in ranks]
            extra = [rank for rank in shard_ranks if rank not in ranks]
            if extra:
                raise PlanError(f"a shard is on rank {extra[0]}, which ranks={ranks!r} lacks. Fix: add it to ranks")
        kernel = str(getattr(compute_kernel, "value", compute_kernel))
        if kernel not in KERNELS:
            near = nearest(kernel[:80], KERNELS)
            raise PlanError(f"compute_kernel {kernel!r:.60} does not exist{near}. Fix: use one of {', '.join(KERNELS)}")
        in_host = [shard.tier == DDR for shard in shards]
        caches = kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING
        if cache_params is not None and not (caches and isinstance(cache_params, CacheParams)):
            why = f"compute_kernel is {kernel!r}" if not caches else "it must be CacheParams"
            raise PlanError(
                f"cache_params={shown(cache_params)} does not apply: {why}. Fix: "
                f"compute_kernel='fused_uvm_caching', cache_params=CacheParams(load_factor=0.1)"
            )
        if (caches or kernel == EmbeddingComputeKernel.FUSED_UVM) and not all(in_host):
            shards = tuple(replace(shard, tier=DDR) for shard in shards)
        elif kernel == EmbeddingComputeKernel.FUSED and shards and all(in_host):
            kernel = str(EmbeddingComputeKernel.FUSED_UVM)
        elif any(in_host) and kernel == EmbeddingComputeKernel.DENSE:
            raise PlanError(
                "a table with compute_kernel='dense' has a shard in tier 'ddr', but its torch optimizer runs on the "
                "device. Fix: compute_kernel='fused'"
            )
        object.__setattr__(self, "sharding_type", str(getattr(sharding_type, "value", sharding_type)))
        object.__setattr__(self, "compute_kernel", kernel)
        object.__setattr__(self, "ranks", ranks if ranks is not None else (shard_ranks or None))
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "route", check_route(route))
        object.__setattr__(self, "cache_params", (cache_params or CacheParams()) if caches else None)
        if caches and self.sharding_type == ShardingType.DATA_PARALLEL:
            raise PlanError(
                "data_parallel with compute_kernel 'fused_uvm_caching': replicas are stepped by the batches of all "
                "ranks, which a cache does not hold. Fix: compute_kernel='fused_uvm', or row_wise"
            )
        if route != "direct" and self.replicated:
            raise PlanError(
                f"{self.sharding_type} with route {route!r}: every rank stores all rows, so none are exchanged. "
                f"Fix: omit route"
            )

    def __hash__(self) -> int:
        return hash((self.sharding_type, self.compute_kernel, self.shards, self.route, self.cache_params))

    @property
    def replicated(self) -> bool:
        """Whether every rank stores the whole table."""
        return self.sharding_type == ShardingType.DATA_PARALLEL or (bool(self.shards) and all(self.replica_flags))

    @cached_property
    def replica_flags(self) -> tuple[bool, ...]:
        """For each shard, whether it is a replica: every rank stores the same rows."""
        if self.sharding_type == ShardingType.DATA_PARALLEL:
            return (True,) * len(self.shards)
        return replica_flags([shard.rect for shard in self.shards])

    @property
    def partly_replicated(self) -> bool:
        """Whether some rows are replicated on every rank and others are not."""
        return any(self.replica_flags) and not all(self.replica_flags)

    @property
    def sharding_spec(self) -> Any:
        """The shards as torch's ``EnumerableShardingSpec``; None for data_parallel, as in TorchRec.

        Raises:
            PlanError: only some rows are replicated, which such a spec cannot express.
        """
        if self.partly_replicated:
            raise PlanError(
                f"a {self.sharding_type} table with replicas of some rows has no EnumerableShardingSpec, because its "
                f"shards must not overlap. Fix: read .shards"
            )
        return None if self.replicated or not self.shards else spec_from_shards(self.shards, self.devices)

    def on_devices(self, device_type: str, local_world_size: int) -> "ParameterSharding":
        """This sharding with these devices in the placements of `sharding_spec`: "cpu", or a GPU for each rank.

        >>> on_gpus = ParameterSharding("table_wise", shards=[Shard(3, (0, 9), (0, 8))]).on_devices("cuda", 2)
        >>> on_gpus.sharding_spec.shards[0].placement
        rank:3/cuda:1
        """
        numbered = (
            (lambda rank: f"{device_type}:{rank % local_world_size}") if device_type != "cpu" else lambda _: "cpu"
        )
        return self._placed(replace(self), {shard.rank: numbered(shard.rank) for shard in self.shards})

    def _placed(self, other: "ParameterSharding", devices: "dict[int, str] | None") -> "ParameterSharding":
        object.__setattr__(other, "devices", devices)
        return other

    def resolved(
        self, table: BaseEmbeddingConfig, world_size: int, local_world_size: int | None = None
    ) -> "ParameterSharding":
        """This sharding with explicit shards: replicas for data_parallel, otherwise the scheme's default ones.

        Args:
            local_world_size: ranks per node, for node-aware schemes. Default: all ranks.
        """
        if self.shards:
            return self
        if self.replicated:
            if self.ranks is not None and sorted(self.ranks) != list(range(world_size)):
                raise PlanError(
                    f"table {table.name!r}: data_parallel keeps a replica on every rank, but ranks={self.ranks!r} "
                    f"with world_size {world_size}. Fix: ranks=None"
                )
            whole = ((0, table.num_embeddings), (0, table.embedding_dim))
            shards = [Shard(rank, *whole) for rank in range(world_size)]
            return ParameterSharding(self.sharding_type, self.compute_kernel, shards=shards)
        from recshard_lab.sharding.hardware.topology import Topology
        from recshard_lab.sharding.schemes import scheme_named

        topology = Topology(world_size, local_world_size=local_world_size or world_size)
        default = scheme_named(self.sharding_type).default(table, topology, self.ranks)
        return replace(self, ranks=default.ranks, shards=default.shards)

    def with_kernel(self, compute_kernel: str) -> "ParameterSharding":
        """This sharding with another kernel.

        Raises:
            PlanError: an unknown kernel.
        """
        return self._placed(replace(self, compute_kernel=compute_kernel), self.devices)

    def with_route(self, route: str) -> "ParameterSharding":
        """This sharding with another output path; data_parallel, which has none, is unchanged.

        Raises:
            PlanError: an unknown route.
        """
        check_route(route)
        if self.replicated:
            return self
        return self._placed(replace(self, route=route), self.devices)


def shards_from_spec(spec: Any) -> tuple[Shard, ...]:
    """The shards of an ``EnumerableShardingSpec`` (anything with ``.shards`` of torch's ``ShardMetadata``).

    Raises:
        PlanError: another kind of spec, a shard that is not two-dimensional or has no rank.
    """
    entries = getattr(spec, "shards", None)
    if entries is None:
        raise PlanError(
            f"sharding_spec must be an EnumerableShardingSpec, got {type(spec).__name__}. Fix: pass shards="
        )
    shards = []
    for entry in entries:
        if len(entry.shard_offsets) != 2:
            raise PlanError(
                f"sharding_spec has a shard of {len(entry.shard_offsets)} dimensions, expected 2. Fix: give row and "
                f"column offsets"
            )
        rank = entry.placement.rank() if entry.placement is not None else None
        if rank is None:
            raise PlanError(
                f"sharding_spec places a shard on {entry.placement!r}, expected 'rank:k/device'. Fix: 'rank:0/cpu'"
            )
        (r0, c0), (rows, cols) = entry.shard_offsets, entry.shard_sizes
        if rows and cols:  # TorchRec writes ranks without rows as empty shards
            shards.append(Shard(int(rank), (int(r0), int(r0 + rows)), (int(c0), int(c0 + cols))))
    return tuple(shards)


def spec_from_shards(shards: Sequence[Shard], devices: Mapping[int, str] | None = None) -> Any:
    """An ``EnumerableShardingSpec`` of these shards, on the devices of their ranks. Default: "cpu"."""
    with uninterrupted():
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]],
                shard_sizes=[shard.num_rows, shard.num_cols],
                placement=f"rank:{shard.rank}/{(devices or {}).get(shard.rank, 'cpu')}",
            )
            for shard in shards
        ]
    )
