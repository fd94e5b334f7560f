"""Who takes part: the ranks that share one sharded model, and the nodes they live on."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from recshard_lab.arguments import checks_arguments
from recshard_lab.comm.leaving import remember


@checks_arguments
@dataclass(frozen=True)
class ShardingEnv:
    """The ranks over which a model is sharded.

    Args:
        world_size: number of ranks W.
        rank: this rank's number in the group.
        pg: the process group; None means one process on its own, which needs no collective.
        outer: the ranks that these were taken from, where they are part of a larger group (`node_envs`).
        members: for each of these ranks, its number in `outer`.
        local_size: ranks a node; as the launcher says (``LOCAL_WORLD_SIZE``) when left out.
    """

    world_size: int
    rank: int
    pg: Any = None
    outer: "ShardingEnv | None" = None
    members: tuple[int, ...] = ()
    local_size: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size} ranks")
        if self.pg is None and self.world_size > 1:
            raise ValueError(
                f"a world of {self.world_size} ranks needs a process group: use "
                f"ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
            )
        if isinstance(self.pg, dist.ProcessGroup) and (self.pg.size(), self.pg.rank()) != (self.world_size, self.rank):
            raise ValueError(
                f"rank={self.rank} of world_size={self.world_size} does not match the process group: this process is "
                f"rank {self.pg.rank()} of {self.pg.size()} there. Fix: use ShardingEnv.from_process_group(pg)"
            )
        if self.pg is not None:
            remember(self)

    @property
    def process_group(self) -> Any:
        """TorchRec's name for ``pg``."""
        return self.pg

    @property
    def local_world_size(self) -> int:
        """Ranks a node, as the launcher says (``LOCAL_WORLD_SIZE``); all of them where it says nothing that fits.

        Ranks ``[k * local_world_size, (k + 1) * local_world_size)`` live on node k.
        """
        if self.local_size is not None:
            return self.local_size
        return get_local_size(self.world_size)

    @property
    def node(self) -> int:
        """The node that this rank lives on."""
        return self.rank // self.local_world_size

    def across_nodes(self, per_rank: Sequence[int]) -> int:
        """The part of per-rank amounts that belongs to ranks on other nodes."""
        if self.outer is not None:
            return self.outer.across_nodes(self._in_outer(per_rank))
        local = self.local_world_size
        return sum(amount for rank, amount in enumerate(per_rank) if rank // local != self.node)

    def in_world(self, per_rank: Sequence[int]) -> tuple[int, ...]:
        """Per-rank amounts of a part of the ranks as amounts of all ranks, zero for those outside."""
        return tuple(per_rank) if self.outer is None else self.outer.in_world(self._in_outer(per_rank))

    def _in_outer(self, per_rank: Sequence[int]) -> list[int]:
        assert self.outer is not None
        whole = [0] * self.outer.world_size
        for member, amount in zip(self.members, per_rank, strict=True):
            whole[member] = amount
        return whole

    def node_envs(self) -> "tuple[ShardingEnv, ShardingEnv]":
        """(the ranks of this node, the ranks with this local rank on every node). All ranks must call it.

        ::

            nodes of 2        intra                 inter
            rank 0  rank 1    {0, 1} and {2, 3}     {0, 2} and {1, 3}
            rank 2  rank 3
        """
        if self.pg is None:
            return self, self
        local = self.local_world_size
        first, place = self.node * local, self.rank % local
        groups = subgroups(self.pg, ("nodes", local), lambda: _node_groups(self.pg, self.world_size, local))
        members = tuple(range(first, first + local)), tuple(range(place, self.world_size, local))
        intra, inter = (
            ShardingEnv(len(ranks), ranks.index(self.rank), group, self, ranks)
            for group, ranks in zip(groups, members, strict=True)
        )
        return intra, inter

    def twin(self) -> "ShardingEnv":
        """The same ranks over connections of their own, whose collectives need no order with those of this one.

        All ranks must call it. ``torch.distributed.destroy_process_group(twin.pg)`` closes them.
        """
        if self.pg is None:
            return self
        members = dist.get_process_group_ranks(self.pg)
        whole = len(members) == dist.get_world_size()
        group = dist.new_group(members, use_local_synchronization=not whole)  # ranks outside do not come here
        return ShardingEnv(self.world_size, self.rank, group, self.outer, self.members, self.local_size)

    @classmethod
    def from_process_group(cls, pg: Any) -> "ShardingEnv":
        """The environment of an initialised process group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":
        """One process on its own.

        >>> ShardingEnv.from_local(world_size=1, rank=0).world_size
        1
        """
        return cls(world_size, rank)

    @classmethod
    def default(cls) -> "ShardingEnv":
        """The default process group when there is one, else this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls.from_process_group(dist.group.WORLD)
        return cls.from_local(1, 0)


def get_local_size(world_size: int | None = None) -> int:
    """Ranks of this node, as the launcher says (``LOCAL_WORLD_SIZE``); all where it says nothing that fits.

    Args:
        world_size: ranks in all; those of the default process group, or 1, when left out.

    >>> get_local_size(1)
    1
    """
    world_size = ShardingEnv.default().world_size if world_size is None else world_size
    said = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return said if said > 0 and world_size % said == 0 else world_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This rank's number among those of its node.

    Args:
        world_size, rank: of the default process group, or of this process alone, when left out.

    >>> get_local_rank(world_size=1, rank=0)
    0
    """
    return (ShardingEnv.default().rank if rank is None else rank) % get_local_size(world_size)


_subgroups: "WeakKeyDictionary[Any, dict[Hashable, tuple[Any, ...]]]" = WeakKeyDictionary()


def subgroups(pg: Any, key: Hashable, create: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Process groups among the ranks of ``pg``: created by the first call with a key, returned again by later ones.

    They are released together with ``pg``, so after ``destroy_process_group()`` no group stays alive here.

    Args:
        pg: a process group.
        key: what the groups are for.
        create: creates them; it must not return ``pg`` itself. All ranks of ``pg`` must call.
    """
    known = _subgroups.setdefault(pg, {})
    if key not in known:
        known[key] = create()
    return known[key]


def _node_groups(pg: Any, world_size: int, local: int) -> tuple[Any, Any]:
    """Rows and columns of the ranks laid out as a grid of nodes x local ranks: this rank's two groups."""
    grid = [list(range(start, start + local)) for start in range(0, world_size, local)]
    return group_among(pg, grid), group_among(pg, [list(column) for column in zip(*grid, strict=True)])


def group_among(pg: Any, parts: Sequence[Sequence[int]]) -> Any:
    """The process group of the part that this rank is in. All ranks of ``pg`` must call it.

    Args:
        pg: a process group.
        parts: its ranks, each in one part.
    """
    members = dist.get_process_group_ranks(pg)
    if len(members) == dist.get_world_size():
        group, _ = dist.new_subgroups_by_enumeration([[members[rank] for rank in part] for part in parts])
        return group
    own = next(part for part in parts if dist.get_rank(pg) in part)  # ranks outside pg do not come here
    return dist.new_group([members[rank] for rank in own], use_local_synchronization=True)
