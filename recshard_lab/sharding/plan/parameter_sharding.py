"""How one table is cut: its rectangles, and what runs them."""

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.plan.types import (
    DDR,
    EmbeddingComputeKernel,
    PlanError,
    Shard,
    ShardingType,
    check_route,
    nearest,
)
from recshard_lab.sharding.plan.validate import replica_flags, replicas_of, shards_in

KERNELS = tuple(kernel.value for kernel in EmbeddingComputeKernel)


@names_wrong_arguments
@dataclass(frozen=True, init=False)
class ParameterSharding:
    """How one table is cut and where the pieces go.

    Args:
        sharding_type: the scheme's name; a label, any name is allowed ("custom" for a tiling drawn by hand).
            Only "data_parallel" has a meaning: the whole table on every rank.
        compute_kernel: "fused" (the optimizer runs in backward), "dense", or "fused_uvm": fused, with all shards in
            the host's memory. Under "fused" each shard says its tier.
        ranks: the ranks that take part; taken from the shards when left out.
        sharding_spec: torch's ``EnumerableShardingSpec`` instead of `shards`, as TorchRec passes it.
        shards: the rectangles. May be left out for data_parallel, and for any registered scheme if the plan is
            put through `ShardingPlan.resolved` before it runs.
        route: how looked-up rows come home, one of `ROUTES`; the result is the same under each.

    Raises:
        PlanError: both `shards` and `sharding_spec`; a shard on a rank that `ranks` does not name; a route that
            does not exist, or one for data_parallel, whose rows never leave their rank.

    >>> ParameterSharding("table_wise", shards=[Shard(1, (0, 100), (0, 8))]).ranks
    [1]
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None
    shards: tuple[Shard, ...]
    route: str

    def __init__(
        self,
        sharding_type: str,
        compute_kernel: str = "fused",
        ranks: Sequence[int] | None = None,
        sharding_spec: Any = None,
        *,
        shards: Iterable[Shard] = (),
        route: str = "direct",
    ) -> None:
        shards = shards_in(shards)
        if sharding_spec is not None:
            if shards:
                raise PlanError("give shards or sharding_spec, not both")
            shards = shards_from_spec(sharding_spec)
        found = list(dict.fromkeys(shard.rank for shard in shards))
        if ranks is not None:
            if not all(isinstance(rank, numbers.Integral) and not isinstance(rank, bool) for rank in ranks):
                raise PlanError(f"ranks must be whole numbers, got {shown(ranks)}. Fix: ranks=[0, 1]")
            ranks = [int(rank) for rank in ranks]
            stray = [rank for rank in found if rank not in ranks]
            if stray:
                raise PlanError(f"a shard lies on rank {stray[0]}, but ranks={ranks!r} does not name it")
        kernel = str(getattr(compute_kernel, "value", compute_kernel))
        if kernel not in KERNELS:
            near = nearest(kernel[:80], KERNELS)
            raise PlanError(f"compute_kernel {kernel!r:.60} does not exist{near}. Fix: use one of {', '.join(KERNELS)}")
        in_host = [shard.tier == DDR for shard in shards]
        if kernel == EmbeddingComputeKernel.FUSED_UVM and not all(in_host):
            shards = tuple(replace(shard, tier=DDR) for shard in shards)
        elif kernel == EmbeddingComputeKernel.FUSED and shards and all(in_host):
            kernel = str(EmbeddingComputeKernel.FUSED_UVM)
        elif any(in_host) and kernel == EmbeddingComputeKernel.DENSE:
            raise PlanError(
                "a torch optimizer steps tables on the dense kernel on the device, so none of their shards lies in "
                "tier 'ddr'. Fix: compute_kernel='fused'"
            )
        object.__setattr__(self, "sharding_type", str(getattr(sharding_type, "value", sharding_type)))
        object.__setattr__(self, "compute_kernel", kernel)
        object.__setattr__(self, "ranks", ranks if ranks is not None else (found or None))
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "route", check_route(route))
        if route != "direct" and self.replicated:
            raise PlanError(
                f"{self.sharding_type} sends no rows home where every rank holds all of them, so it has no route "
                f"{route!r}. Fix: leave route out"
            )

    def __hash__(self) -> int:
        return hash((self.sharding_type, self.compute_kernel, self.shards, self.route))

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole table."""
        return self.sharding_type == ShardingType.DATA_PARALLEL or (bool(self.shards) and all(self.replica_flags))

    @cached_property
    def replica_flags(self) -> tuple[bool, ...]:
        """For each shard whether it is a replica: the same rows lie on every rank."""
        if self.sharding_type == ShardingType.DATA_PARALLEL:
            return (True,) * len(self.shards)
        return replica_flags([shard.rect for shard in self.shards])

    @property
    def partly_replicated(self) -> bool:
        """Whether some rows lie on every rank, and others do not."""
        return any(self.replica_flags) and not all(self.replica_flags)

    @property
    def sharding_spec(self) -> Any:
        """The shards as torch's ``EnumerableShardingSpec``; None for data_parallel, as in TorchRec.

        Raises:
            PlanError: some rows are replicated and others are not, which such a spec cannot say.
        """
        if self.partly_replicated:
            raise PlanError(
                f"a {self.sharding_type} table with replicas of some rows has no EnumerableShardingSpec, whose shards "
                f"never overlap. Fix: read .shards"
            )
        return None if self.replicated or not self.shards else spec_from_shards(self.shards)

    def resolved(
        self, table: BaseEmbeddingConfig, world_size: int, local_world_size: int | None = None
    ) -> "ParameterSharding":
        """The same with its rectangles spelled out: data_parallel's replicas, a bare scheme's default ones.

        Args:
            local_world_size: ranks of one node, for schemes that know nodes; all when left out.
        """
        if self.shards:
            return self
        if self.replicated:
            if self.ranks is not None and sorted(self.ranks) != list(range(world_size)):
                raise PlanError(
                    f"table {table.name!r}: data_parallel keeps a replica on every rank, but "
                    f"ranks={self.ranks!r} "
                    f"with world_size {world_size}. Fix: ranks=None"
                )
            shards = replicas_of(table, world_size)
            return ParameterSharding(self.sharding_type, self.compute_kernel, shards=shards)
        from recshard_lab.sharding.hardware.topology import Topology
        from recshard_lab.sharding.schemes import scheme_named

        topology = Topology(world_size, local_world_size=local_world_size or world_size)
        made = scheme_named(self.sharding_type).default(table, topology, self.ranks)
        return ParameterSharding(
            self.sharding_type, self.compute_kernel, made.ranks, shards=made.shards, route=self.route
        )

    def with_route(self, route: str) -> "ParameterSharding":
        """The same under another route; data_parallel, which has none, stays as it is.

        Raises:
            PlanError: a route that does not exist.
        """
        check_route(route)
        if self.replicated:
            return self
        return ParameterSharding(self.sharding_type, self.compute_kernel, self.ranks, shards=self.shards, route=route)


def shards_from_spec(spec: Any) -> tuple[Shard, ...]:
    """The rectangles of an ``EnumerableShardingSpec`` (anything with ``.shards`` of torch's ``ShardMetadata``).

    Raises:
        PlanError: another kind of spec, a shard that is not two-dimensional or has no rank.
    """
    pieces = getattr(spec, "shards", None)
    if pieces is None:
        raise PlanError(f"sharding_spec must be an EnumerableShardingSpec, got {type(spec).__name__}")
    found = []
    for piece in pieces:
        if len(piece.shard_offsets) != 2:
            raise PlanError(f"sharding_spec has a shard of {len(piece.shard_offsets)} dimensions, expected 2")
        rank = piece.placement.rank() if piece.placement is not None else None
        if rank is None:
            raise PlanError(f"sharding_spec places a shard on {piece.placement!r}, expected 'rank:k/device'")
        (r0, c0), (rows, cols) = piece.shard_offsets, piece.shard_sizes
        if rows and cols:  # TorchRec writes ranks without rows as empty shards
            found.append(Shard(int(rank), (int(r0), int(r0 + rows)), (int(c0), int(c0 + cols))))
    return tuple(found)


def spec_from_shards(shards: Sequence[Shard], device: str = "cpu") -> Any:
    """An ``EnumerableShardingSpec`` of these rectangles."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]],
                shard_sizes=[shard.num_rows, shard.num_cols],
                placement=f"rank:{shard.rank}/{device}",
            )
            for shard in shards
        ]
    )
