"""Ranks in two dimensions: replicas of a model, each sharded over a group of ranks.

::

    4 ranks, groups of 2      strided (the default)      contiguous
    sharding groups           {0, 2}  {1, 3}             {0, 1}  {2, 3}      each stores the whole model
    replica groups            {0, 1}  {2, 3}             {0, 2}  {1, 3}      the same shards of each model

Shape letters: W ranks, S ranks per sharding group, R = W / S replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
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
        world, size, node = self.world.world_size, self.group_size, self.node_group_size
        if not isinstance(size, int) or size < 1 or world % size:
            fits = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise ValueError(
                f"sharding_group_size={size!r} does not divide {world} ranks into whole groups. Fix: use one of {fits}"
            )
        if node is not None and (not isinstance(node, int) or node < 1 or size % node):
            fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"node_group_size={node!r} does not divide a sharding group of {size} ranks into whole nodes. Fix: "
                f"use one of {fits}"
            )

    @property
    def num_replicas(self) -> int:
        """R, the number of sharding groups."""
        return self.world.world_size // self.group_size

    def rank_of(self, group: int, place: int) -> int:
        """The rank at position ``place`` (0 to S - 1) of a sharding group."""
        return group * self.group_size + place if self.contiguous else place * self.num_replicas + group

    @property
    def group(self) -> int:
        """Index of this rank's sharding group."""
        return self.world.rank // self.group_size if self.contiguous else self.world.rank % self.num_replicas

    @property
    def place(self) -> int:
        """This rank's position in its sharding group."""
        return self.world.rank % self.group_size if self.contiguous else self.world.rank // self.num_replicas

    @property
    def sharding_groups(self) -> list[list[int]]:
        """The ranks of each sharding group."""
        return [[self.rank_of(group, place) for place in range(self.group_size)] for group in range(self.num_replicas)]

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
        runs = [
            len(list(run))
            for group in self.sharding_groups
            for _, run in groupby(group, key=lambda rank: rank // local)
        ]
        return gcd(*runs)

    @cached_property
    def sharding(self) -> ShardingEnv:
        """This rank's sharding group. The first access is collective."""
        return self._env(self.sharding_groups, self.group, self.place, 0, self.ranks_per_node)

    @cached_property
    def replicas(self) -> ShardingEnv:
        """The ranks that store the same shards as this rank. The first access is collective."""
        return self._env(self.replica_groups, self.place, self.group, 1, None)

    def _env(
        self, groups: Sequence[Sequence[int]], number: int, rank: int, axis: int, local: int | None
    ) -> ShardingEnv:
        members = tuple(groups[number])
        if self.world.pg is None:
            return ShardingEnv(1, 0, None, outer=self.world, members=members, local_size=local)
        world, layout = self.world.pg, tuple(map(tuple, self.sharding_groups))
        pg = subgroups(world, layout, lambda: _process_groups(world, layout))[axis]
        group = world if pg is None else pg
        return ShardingEnv(len(members), rank, group, outer=self.world, members=members, local_size=local)

    def __str__(self) -> str:
        """``2 replicas on 2 ranks each: {0, 2} {1, 3}``."""
        groups = " ".join("{" + ", ".join(map(str, group)) + "}" for group in self.sharding_groups)
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        ranks = "1 rank" if self.group_size == 1 else f"{self.group_size} ranks"
        return f"{replicas} on {ranks} each: {groups}"


def _process_groups(pg: Any, groups: tuple[tuple[int, ...], ...]) -> tuple[Any, Any]:
    """This rank's sharding group (None for ``pg`` itself) and replica group."""
    if len(groups) == 1:
        return None, group_among(pg, [[rank] for rank in groups[0]])
    return group_among(pg, groups), group_among(pg, list(zip(*groups, strict=True)))


def device_mesh(grid: ReplicaGrid, device_type: str) -> Any:
    """torch's ``DeviceMesh`` of the grid, with the dimensions ``replicate`` and ``shard``."""
    from torch.distributed.device_mesh import DeviceMesh

    members = dist.get_process_group_ranks(grid.world.pg)
    mesh = [[members[rank] for rank in group] for group in grid.sharding_groups]
    groups = [grid.replicas.pg, grid.sharding.pg]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=("replicate", "shard"))
