"""Ranks in two dimensions: replicas of a model, each sharded over a group of ranks.

::

    4 ranks, groups of 2      strided (the default)      contiguous
    sharding groups           {0, 2}  {1, 3}             {0, 1}  {2, 3}      each stores the whole model
    replica groups            {0, 1}  {2, 3}             {0, 2}  {1, 3}      the same shards of each model

Shape letters: W ranks, S ranks per sharding group, R = W / S replicas.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch.distributed as dist

from recshard_lab.comm.env import ShardingEnv, group_among, subgroups


@dataclass(frozen=True)
class ReplicaGrid:
    """W ranks as R sharding groups of S.

    Args:
        world: all ranks.
        group_size: S.
        contiguous: whether neighbouring ranks share a sharding group instead of a replica group.
        node_group_size: ranks of a sharding group that count as one node. Default: those on one node.

    Raises:
        ValueError: S does not divide W, or ``node_group_size`` does not divide S.

    >>> ReplicaGrid(ShardingEnv.from_local(1, 0), 1).sharding_groups
    [[0]]
    """

    world: ShardingEnv
    group_size: int
    contiguous: bool = False
    node_group_size: int | None = None

    def __post_init__(self) -> None:
        size, node = self.group_size, self.node_group_size
        _check("sharding_group_size", size, self.world.world_size, f"{self.world.world_size} ranks into whole groups")
        if node is not None:
            _check("node_group_size", node, size, f"a sharding group of {size} ranks into whole nodes")

    @property
    def num_replicas(self) -> int:
        """R, the number of sharding groups."""
        return self.world.world_size // self.group_size

    @property
    def group(self) -> int:
        """Index of this rank's sharding group."""
        return self.world.rank // self.group_size if self.contiguous else self.world.rank % self.num_replicas

    @property
    def sharding_groups(self) -> list[list[int]]:
        """The ranks of each sharding group."""
        ranks, size, count = list(range(self.world.world_size)), self.group_size, self.num_replicas
        return [ranks[k * size : (k + 1) * size] if self.contiguous else ranks[k::count] for k in range(count)]

    @property
    def replica_groups(self) -> list[list[int]]:
        """The ranks that store the same shards, for each position in a sharding group."""
        return [list(ranks) for ranks in zip(*self.sharding_groups, strict=True)]

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a sharding group that count as one node.

        If nodes split the groups unevenly, this is the largest size that never spans two nodes.
        """
        if self.node_group_size is not None:
            return self.node_group_size
        local = self.world.local_world_size
        groups = enumerate(self.sharding_groups)
        return gcd(*Counter((number, rank // local) for number, ranks in groups for rank in ranks).values())

    @cached_property
    def sharding(self) -> ShardingEnv:
        """This rank's sharding group. The first access is collective."""
        return self.world.part(self.sharding_groups, self._process_groups[0] or self.world.pg, self.ranks_per_node)

    @cached_property
    def replicas(self) -> ShardingEnv:
        """The ranks that store the same shards as this rank. The first access is collective."""
        return self.world.part(self.replica_groups, self._process_groups[1])

    @property
    def _process_groups(self) -> tuple[Any, ...]:
        """This rank's sharding group, None if that is the world, and its replica group."""
        pg, layout = self.world.pg, self.sharding_groups
        if pg is None:
            return None, None

        def create() -> tuple[Any, Any]:
            return group_among(pg, layout) if len(layout) > 1 else None, group_among(pg, self.replica_groups)

        return subgroups(pg, tuple(map(tuple, layout)), create)

    def __str__(self) -> str:
        """``2 replicas on 2 ranks each: {0, 2} {1, 3}``."""
        groups = " ".join("{" + ", ".join(map(str, group)) + "}" for group in self.sharding_groups)
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        ranks = "1 rank" if self.group_size == 1 else f"{self.group_size} ranks"
        return f"{replicas} on {ranks} each: {groups}"


def _check(name: str, size: Any, whole: int, split: str) -> None:
    """Raises unless ``size`` divides ``whole``."""
    if not isinstance(size, int) or size < 1 or whole % size:
        fits = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ValueError(f"{name}={size!r} does not divide {split}. Fix: use one of {fits}")


def device_mesh(grid: ReplicaGrid, device_type: str) -> Any:
    """torch's ``DeviceMesh`` of the grid, with the dimensions ``replicate`` and ``shard``."""
    from torch.distributed.device_mesh import DeviceMesh

    members = dist.get_process_group_ranks(grid.world.pg)
    mesh = [[members[rank] for rank in group] for group in grid.sharding_groups]
    groups = [grid.replicas.pg, grid.sharding.pg]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=("replicate", "shard"))
