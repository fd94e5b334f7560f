"""The ranks that share one sharded model, their nodes, and the process groups among them."""

import atexit
import gc
import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from recshard_lab.arguments import checks_arguments
from recshard_lab.comm.wire import InterNodeLink, LinkedWire, LoopbackWire, ProcessGroupWire, Wire
from recshard_lab.cores import local_world_size

_LOOPBACK = LoopbackWire()


@checks_arguments
@dataclass(frozen=True)
class ShardingEnv:
    """The ranks over which a model is sharded.

    Args:
        world_size: number of ranks W.
        rank: this rank's number in the group.
        pg: the process group. None for a single process, which needs no collectives, or for the devices of one
            process, over which quantized models are sharded.
        output_dtensor: whether state dicts have DTensors by default, as with ``fused_params={"output_dtensor": True}``.
        outer: the larger group of which these ranks are a part (`node_envs`), or None.
        members: rank in `outer` of each of these ranks.
        local_size: ranks per node. Default: the launcher's ``LOCAL_WORLD_SIZE``.

    Raises:
        ValueError: a rank outside the world, or numbers that differ from the process group's.
    """

    world_size: int
    rank: int
    pg: Any = None
    output_dtensor: bool = False
    outer: "ShardingEnv | None" = None
    members: tuple[int, ...] = ()
    local_size: int | None = None
    #: an error of a part of these ranks that the others do not know (`comm.errors`)
    unsent: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size} ranks")
        if isinstance(self.pg, dist.ProcessGroup) and (self.pg.size(), self.pg.rank()) != (self.world_size, self.rank):
            raise ValueError(
                f"rank={self.rank} of world_size={self.world_size} does not match the process group, where this "
                f"process is rank {self.pg.rank()} of {self.pg.size()}. Fix: use ShardingEnv.from_process_group(pg)"
            )
        if self.pg is not None:
            _envs[id(self)] = self
            _seen[:] = [True]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardingEnv":
        return self  # a process group cannot be copied, and the ranks are the same

    @property
    def process_group(self) -> Any:
        """TorchRec's name for ``pg``."""
        return self.pg

    @property
    def alone(self) -> bool:
        """Whether this is a single process, which sends no messages.

        Raises:
            ValueError: several ranks without a process group.
        """
        if self.pg is None and self.world_size > 1:
            raise ValueError(
                f"an environment of {self.world_size} ranks without a process group cannot exchange messages: it "
                f"describes the devices of one process. Fix: use "
                f"ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
            )
        return self.pg is None

    @cached_property
    def wire(self) -> Wire:
        """What carries messages between these ranks, found at the first message. Raises ValueError as `alone`."""
        if self.alone:
            return _LOOPBACK
        link = InterNodeLink.from_environment()
        return ProcessGroupWire(self.pg) if link is None else LinkedWire(self.pg, link, self.across_nodes)

    @property
    def local_world_size(self) -> int:
        """Ranks per node: the launcher's ``LOCAL_WORLD_SIZE`` if it divides W, otherwise all ranks.

        Node k has the ranks ``[k * local_world_size, (k + 1) * local_world_size)``.
        """
        return local_world_size(self.world_size) if self.local_size is None else self.local_size

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.local_world_size

    @property
    def world(self) -> "ShardingEnv":
        """The largest group of which these ranks are a part."""
        return self if self.outer is None else self.outer.world

    @property
    def world_ranks(self) -> Sequence[int]:
        """The number of each rank in `world`."""
        return range(self.world_size) if self.outer is None else [self.outer.world_ranks[k] for k in self.members]

    def across_nodes(self, per_rank: Sequence[int]) -> int:
        """The sum of ``per_rank`` over the ranks on other nodes."""
        world, local = self.world, self.world.local_world_size
        ranks = zip(self.world_ranks, per_rank, strict=True)
        return sum(amount for rank, amount in ranks if rank // local != world.node)

    def in_world(self, per_rank: Sequence[int]) -> tuple[int, ...]:
        """``per_rank`` of this group as amounts of all ranks, 0 for ranks outside the group."""
        amounts = dict(zip(self.world_ranks, per_rank, strict=True))
        return tuple(amounts.get(rank, 0) for rank in range(self.world.world_size))

    def node_envs(self) -> "tuple[ShardingEnv, ShardingEnv]":
        """(the ranks of this node, the ranks with this local rank on every node). Collective.

        ::

            nodes of 2        intra                 inter
            rank 0  rank 1    {0, 1} and {2, 3}     {0, 2} and {1, 3}
            rank 2  rank 3
        """
        if self.pg is None:
            return self, self
        local = self.local_world_size
        nodes = [range(first, first + local) for first in range(0, self.world_size, local)]
        layouts: list[Sequence[Sequence[int]]] = [nodes, list(zip(*nodes, strict=True))]
        groups = subgroups(self.pg, ("nodes", local), lambda: tuple(group_among(self.pg, ranks) for ranks in layouts))
        intra, inter = (self.part(ranks, group) for ranks, group in zip(layouts, groups, strict=True))
        return intra, inter

    def part(self, groups: Sequence[Sequence[int]], pg: Any, local_size: int | None = None) -> "ShardingEnv":
        """This rank's group.

        Args:
            groups: the ranks of each.
            pg: its process group.
            local_size: ranks per node. Default: as of `ShardingEnv`.
        """
        members = next(tuple(ranks) for ranks in groups if self.rank in ranks)
        place = members.index(self.rank)
        return ShardingEnv(len(members), place, pg, outer=self, members=members, local_size=local_size)

    def duplicate(self) -> "ShardingEnv":
        """The same ranks and backends with a separate communicator, whose collectives need no order with those of this.

        Collective. ``torch.distributed.destroy_process_group(duplicate.pg)`` closes them.
        """
        if self.pg is None:
            return self
        return replace(self, pg=group_among(self.pg, [range(self.world_size)], dist.get_backend(self.pg)))

    @classmethod
    def from_process_group(cls, pg: Any) -> "ShardingEnv":
        """The environment of an initialized process group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":
        """A single process, or a device of a process that shards a quantized model over its devices.

        >>> ShardingEnv.from_local(world_size=1, rank=0).world_size
        1
        """
        return cls(world_size, rank)

    @classmethod
    def default(cls) -> "ShardingEnv":
        """The default process group if initialized, otherwise this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls.from_process_group(dist.group.WORLD)
        return cls.from_local(1, 0)


def get_local_size(world_size: int | None = None) -> int:
    """Ranks per node: the launcher's ``LOCAL_WORLD_SIZE`` if it divides `world_size`, otherwise all ranks.

    Args:
        world_size: number of ranks. Default: that of the default process group, or 1.

    >>> get_local_size(1)
    1
    """
    return local_world_size(ShardingEnv.default().world_size if world_size is None else world_size)


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This rank's position on its node.

    Args:
        world_size, rank: default: those of the default process group, or of this process alone.

    >>> get_local_rank(world_size=1, rank=0)
    0
    """
    return (ShardingEnv.default().rank if rank is None else rank) % get_local_size(world_size)


_subgroups: "WeakKeyDictionary[Any, dict[Hashable, tuple[Any, ...]]]" = WeakKeyDictionary()


def subgroups(pg: Any, key: Hashable, create: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Process groups among the ranks of ``pg``: created by the first call with a key, returned again by later ones.

    They are released together with ``pg``, so none outlives ``destroy_process_group()``.

    Args:
        pg: a process group.
        key: identifies the groups.
        create: creates them; collective over ``pg``. It must not return ``pg`` itself.
    """
    known = _subgroups.setdefault(pg, {})
    if key not in known:
        known[key] = create()
    return known[key]


def group_among(pg: Any, subsets: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> Any:
    """The process group of this rank's subset of ``pg``. Collective over ``pg``, not over the world.

    ``torch.distributed.new_group(use_local_synchronization=True)`` names a group by the number of groups that each rank
    has made. Ranks with different numbers would wait for each other, so the first rank of ``pg`` chooses the name.

    Args:
        pg: a process group.
        subsets: its ranks, each in one subset.
        backend: of the new group. Default: that of the default process group.
        options: of this backend.
    """
    c10d = dist.distributed_c10d
    members, rank = dist.get_process_group_ranks(pg), dist.get_rank(pg)
    store, subset = c10d._get_default_store(), next(subset for subset in subsets if rank in subset)
    number = [store.add("recshard_lab/groups", 1) if rank == 0 else 0]
    dist.broadcast_object_list(number, group=pg, group_src=0)
    ranks, kind = [members[place] for place in subset], c10d.Backend(backend or dist.get_backend())
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        subset.index(rank),
        ranks,
        kind,
        store,
        group_name=c10d.GroupName(f"recshard_lab/{number[0]}/{ranks[0]}"),
        timeout=c10d._get_default_timeout(kind),
        backend_options=options,
    )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    return group


_envs: "WeakValueDictionary[int, ShardingEnv]" = WeakValueDictionary()
_seen: list[bool] = []  # not empty once a group existed
_GRACE_S = 0.05  # for groups with other references, such as DistributedDataParallel's


@atexit.register
def _release() -> None:
    """Releases process groups before the interpreter shuts down, which would abort the process.

    The threads of a group free the tensors of their last collective later, for which they need the interpreter. A group
    without references joins its threads first. After ``destroy_process_group()``, models hold the last references.
    """
    if _seen:
        gc.collect()  # models in reference cycles
        for env in list(_envs.values()):
            object.__setattr__(env, "pg", None)
        time.sleep(_GRACE_S)


# The devices that a process group supports, and the backend of each.
#
# ``torch.distributed.get_backend`` returns ``"cpu:gloo,cuda:nccl"`` for a group created so, never ``"nccl"``. All code
# that depends on the backend uses these functions.


DEVICE_VARIABLE = "RECSHARD_DEVICE"
"""The launcher's variable for the device of each rank, such as "cuda:0"."""
TIMES_VARIABLE = "RECSHARD_TIMES_NOTE"
"""The launcher's variable for what to print beside times that ranks measure."""


def backends_of(pg: Any) -> dict[str, str]:
    """Device type -> backend, such as ``{"cpu": "gloo", "cuda": "nccl"}``; empty without a process group."""
    if pg is None:
        return {}
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(pg).split(","))


def uses_nccl(env: ShardingEnv) -> bool:
    """Whether GPU tensors are exchanged with NCCL.

    >>> uses_nccl(ShardingEnv.from_local(1, 0))
    False
    """
    return backends_of(env.pg).get("cuda") == "nccl"


def compute_device(env: ShardingEnv) -> torch.device:
    """Default device of a model over these ranks: this rank's GPU with NCCL, otherwise the launched rank's device.

    Ranks that share a GPU exchange its tensors with Gloo, so the backend alone does not give their device.
    """
    if uses_nccl(env):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))


def times_note() -> str:
    """What to print beside times that this rank measures: empty unless it shares a GPU with other launched ranks."""
    return os.environ.get(TIMES_VARIABLE, "")


def message_device(env: ShardingEnv) -> torch.device:
    """Device of messages that the host writes and reads: the CPU if the group supports it, otherwise this rank's GPU.

    It depends on the group and never on a batch, so all ranks use one backend for one message.
    """
    backends = backends_of(env.pg)
    return compute_device(env) if backends and "cpu" not in backends else torch.device("cpu")


def host_env(env: ShardingEnv) -> ShardingEnv:
    """The same ranks over connections that carry CPU tensors: ``env`` itself, or a Gloo group beside NCCL.

    All ranks must call it. The group is created once for a process group and released with it.

    >>> host_env(ShardingEnv.from_local(1, 0)).pg is None
    True
    """
    if env.pg is None or "cpu" in backends_of(env.pg):
        return env
    (group,) = subgroups(env.pg, "host", lambda: (group_among(env.pg, [range(env.world_size)], "gloo"),))
    return replace(env, pg=group)


def sizes_env(env: ShardingEnv) -> ShardingEnv:
    """Like `host_env`, over connections of which messages of rows make no use.

    So a rank that skips messages of rows, and sends sizes, cannot be mistaken for one that sends rows. Gloo ends the
    process that receives more bytes than it expects. One thread serves the connections of both: a second one would
    make every step about 4% slower on two CPU ranks.
    """
    host = host_env(env)
    if host is not env or env.pg is None:
        return host
    rows = env.pg._get_backend(torch.device("cpu"))

    def create() -> tuple[Any, ...]:
        if not isinstance(rows, dist.ProcessGroupGloo):
            return (env.duplicate().pg,)
        if _BESIDE.upper() not in dir(dist.Backend):
            dist.Backend.register_backend(_BESIDE, _gloo_beside, extended_api=True, devices=["cpu"])
        return (group_among(env.pg, [range(env.world_size)], _BESIDE, rows),)

    (group,) = subgroups(env.pg, "sizes", create)
    return replace(env, pg=group)


_BESIDE = "gloo_beside"


def _gloo_beside(asked: Any, other: Any) -> Any:
    """A Gloo backend whose connections are served by the thread of another one."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = other.options._devices, 1, asked.timeout
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)
