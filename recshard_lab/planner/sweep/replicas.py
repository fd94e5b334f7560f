"""The cost of 2D parallelism (`DMPCollection`): W ranks are R sharding groups of S ranks.

Every sharding group has a copy of the tables.

The exchanges of a step stay inside a sharding group. The dense gradient is averaged over all W ranks. Every n-th step a
sync averages weights and optimizer state over the R ranks that hold the same shards::

    sync ms   2 (R - 1) / R * bytes of weights and optimizer state on a rank / link  +  2 latencies
    link      inside a node if all R ranks are on one node, between nodes otherwise

`DMPCollection.sync` sends these bytes. Syncs in rounds and their scratch memory are left out.

Shape letters: W ranks, S of a sharding group, R = W / S replicas, L ranks of a node.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd

from recshard_lab.planner.model.cost import dense_step
from recshard_lab.planner.model.estimate import Estimate
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import Topology


@dataclass(frozen=True)
class Replicated:
    """W ranks as sharding groups.

    Args:
        world: all ranks.
        group_size: S.
        use_inter_host_allreduce: as for `DMPCollection`. If True, neighbouring ranks share a sharding group: steps stay
            inside nodes and syncs cross them. If False, ranks with the same shards are neighbours, and steps cross.

    Raises:
        ValueError: S does not divide W.

    >>> Replicated(Topology(16, local_world_size=8), 4).replicas
    4
    """

    world: Topology
    group_size: int
    use_inter_host_allreduce: bool = False

    def __post_init__(self) -> None:
        ranks, size = self.world.world_size, self.group_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or ranks % size:
            fits = ", ".join(str(n) for n in range(1, min(ranks, 4096) + 1) if ranks % n == 0)
            raise ValueError(
                f"sharding_group_size={size!r} does not divide {ranks} ranks into whole groups. Fix: use one of {fits}"
            )

    @property
    def replicas(self) -> int:
        """R."""
        return self.world.world_size // self.group_size

    def rank_of(self, group: int, place: int) -> int:
        """The rank at a place ``0 .. S - 1`` of a sharding group."""
        if self.use_inter_host_allreduce:
            return group * self.group_size + place
        return place * self.replicas + group

    @property
    def group(self) -> Topology:
        """One sharding group as a topology. Its nodes have the largest size that holds for all groups."""
        local = self.world.local_world_size
        runs = [
            len(list(run))
            for group in range(self.replicas)
            for _, run in groupby(self.rank_of(group, place) // local for place in range(self.group_size))
        ]
        together = gcd(*runs)
        made = replace(self.world, world_size=self.group_size, local_world_size=together)
        if self.world.compute_device == "cpu":  # other groups use the same cores
            return replace(made, cores_per_host=together / self.world.slowdown)  # type: ignore[arg-type]
        return made

    @property
    def inside_a_node(self) -> bool:
        """Whether all ranks with the same shards are on one node."""
        local = self.world.local_world_size
        return all(
            len({self.rank_of(group, place) // local for group in range(self.replicas)}) == 1
            for place in range(self.group_size)
        )

    def sync_bytes(self, found: Estimate) -> float:
        """The most bytes of weights and optimizer state that a rank sends in one sync."""
        at = [found.memory_categories.index(name) for name in ("weights", "optimizer_state")]
        held = found.memory_bytes[:, at].sum(axis=1) + (0.0 if found.host_bytes is None else found.host_bytes)
        return 2 * (self.replicas - 1) / self.replicas * float(held.max())

    def sync_ms(self, found: Estimate) -> float:
        """Milliseconds of one sync, for the estimate `found` of a sharding group."""
        if self.replicas == 1:
            return 0.0
        top = self.world
        near = self.inside_a_node
        link = top.intra_host_bw if near else top.inter_host_bw
        wait = top.intra_host_latency_ms if near else top.inter_host_latency_ms
        wait += (self.replicas - 1) * (top.peer_ms if near else top.inter_host_peer_ms)
        return (self.sync_bytes(found) / link + 2 * wait) * top.slowdown

    def more_dense_ms(self, workload: Workload) -> float:
        """Extra milliseconds of averaging the dense gradient over all ranks instead of a sharding group."""
        return dense_step(workload, self.world)[0] - dense_step(workload, self.group)[0]
