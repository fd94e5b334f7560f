"""What replicas of a sharded model cost (2D parallelism, `DMPCollection`): W ranks as R sharding groups of S.

A step's exchanges stay inside a sharding group, the dense gradient is averaged over all W ranks, and every n-th step a
sync averages weights and optimizer state over the R ranks that hold the same part::

    sync ms   2 (R - 1) / R * bytes of weights and optimizer state on a rank / link  +  2 latencies
    link      inside a node where all R ranks are on one, between nodes otherwise

The bytes are those that `DMPCollection.sync` sends. A sync in rounds and the scratch memory for them are left out.

Shape letters: W ranks, S of a sharding group, R = W / S replicas, L ranks of a node.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd

from recshard_lab.planner.cost import dense_step
from recshard_lab.planner.estimate import Estimate
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import Topology


@dataclass(frozen=True)
class Replicated:
    """W ranks as sharding groups.

    Args:
        world: all ranks.
        group_size: S.
        use_inter_host_allreduce: as of `DMPCollection`: neighbouring ranks share a sharding group, so that steps stay
            inside nodes and syncs cross them; else replicas of a part are neighbours, and steps cross.

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
                f"sharding_group_size={size!r} does not divide {ranks} ranks into whole groups: use one of {fits}"
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
        """The ranks of one sharding group. As many of them count as one node as always lie on one."""
        local = self.world.local_world_size
        runs = [
            len(list(run))
            for group in range(self.replicas)
            for _, run in groupby(self.rank_of(group, place) // local for place in range(self.group_size))
        ]
        together = gcd(*runs)
        made = replace(self.world, world_size=self.group_size, local_world_size=together)
        if self.world.compute_device == "cpu":  # cores are shared with the other groups' ranks
            return replace(made, cores_per_host=together / self.world.slowdown)  # type: ignore[arg-type]
        return made

    @property
    def inside_a_node(self) -> bool:
        """Whether replicas of a part always meet inside a node."""
        local = self.world.local_world_size
        return all(
            len({self.rank_of(group, place) // local for group in range(self.replicas)}) == 1
            for place in range(self.group_size)
        )

    def sync_bytes(self, found: Estimate) -> float:
        """What one rank sends in a sync, at most: of weights and optimizer state."""
        at = [found.memory_categories.index(name) for name in ("weights", "optimizer_state")]
        held = float(found.memory_bytes[:, at].sum(axis=1).max())
        return 2 * (self.replicas - 1) / self.replicas * held

    def sync_ms(self, found: Estimate) -> float:
        """One sync of a plan for a sharding group, estimated as `found`."""
        if self.replicas == 1:
            return 0.0
        top = self.world
        near = self.inside_a_node
        link = top.intra_host_bw if near else top.inter_host_bw
        wait = top.intra_host_latency_ms if near else top.inter_host_latency_ms
        return (self.sync_bytes(found) / link + 2 * (wait + (self.replicas - 1) * top.peer_ms)) * top.slowdown

    def more_dense_ms(self, workload: Workload) -> float:
        """By how much averaging the dense gradient over all ranks takes longer than over a sharding group."""
        return dense_step(workload, self.world)[0] - dense_step(workload, self.group)[0]
