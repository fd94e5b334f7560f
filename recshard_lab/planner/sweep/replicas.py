"""The cost of 2D parallelism (`DMPCollection`): W ranks are R sharding groups of S ranks.

Every sharding group has a copy of the tables.

The exchanges of a step stay inside a sharding group. The dense gradient is averaged over all W ranks. Every n-th step a
sync averages weights and optimizer state over the R ranks that hold the same shards::

    sync ms   2 (R - 1) / R * bytes of weights and optimizer state on a rank / link  +  2 latencies
    link      inside a node if all R ranks are on one node, between nodes otherwise

`DMPCollection.sync` sends these bytes. Syncs in rounds and their scratch memory are left out.

Shape letters: W ranks, S of a sharding group, R = W / S replicas, L ranks of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from math import gcd

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import dense_step
from recshard_lab.planner.model.estimate import Estimate, estimate
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array, Workload
from recshard_lab.sharding import ParameterSharding, ShardingPlan, Topology
from recshard_lab.sharding.plan.sharding_plan import Tables


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

    def estimate(
        self, plan: ShardingPlan, tables: Tables, workload: Workload | None = None, *, sync_every: int = 1
    ) -> Estimate:
        """Predicts a plan for ranks ``0 .. S - 1`` of a sharding group on all W ranks.

        Args:
            plan, tables, workload: as for `planner.estimate`.
            sync_every: steps from one sync to the next. Each step includes its share of a sync.

        Returns:
            The estimate of W ranks. Its traffic also has ``replicas/weights`` and ``replicas/optimizer_state``.

        Raises:
            PlanError: as `planner.estimate`. ValueError: `sync_every` is not at least 1.

        >>> from recshard_lab.sharding import ParameterSharding, Shard
        >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=100, embedding_dim=16, feature_names=["movie"])
        >>> whole = ShardingPlan({"": {"movies": ParameterSharding("custom", shards=[Shard(0, (0, 100), (0, 16))])}})
        >>> found = Replicated(Topology(4), 2).estimate(whole, [movies])
        >>> found.traffic_by_phase["replicas/weights"].tolist()[0]  # ranks 0 and 1 hold the same table
        [0.0, 6400.0, 0.0, 0.0]
        """
        if sync_every < 1:
            raise ValueError(f"sync_every must be at least 1 step, got {sync_every!r}. Fix: sync_every=1")
        load = workload or Workload()
        found = estimate(plan, tables, self.group, load)
        place = np.empty(self.world.world_size, dtype=int)
        for group, member in product(range(self.replicas), range(self.group_size)):
            place[self.rank_of(group, member)] = member
        ms = found.ms[place]
        ms[:, found.phases.index("dense")] += self.more_dense_ms(load) + self.sync_ms(found) / sync_every
        parts = partial(self._traffic, found, plan.pairs(tables), load, sync_every)
        return replace(
            found,
            ms=ms,
            memory_bytes=found.memory_bytes[place],
            capacity_bytes=found.capacity_bytes[place],
            usable_bytes=found.usable_bytes[place],
            host_bytes=None if found.host_bytes is None else found.host_bytes[place],
            host_weight_bytes=None if found.host_weight_bytes is None else found.host_weight_bytes[place],
            traffic_bytes=np.sum(list(parts().values()), axis=0),
            traffic_parts=parts,
            lower_bound=None,
        )

    def _traffic(
        self,
        found: Estimate,
        pairs: Sequence[tuple[BaseEmbeddingConfig, ParameterSharding]],
        workload: Workload,
        sync_every: int,
    ) -> dict[str, Array]:
        """Bytes ``[W, W]`` of steps inside each sharding group, of the dense ring over all ranks, and of syncs."""
        ranks, size = self.world.world_size, self.group_size
        groups = [[self.rank_of(group, place) for place in range(size)] for group in range(self.replicas)]
        traffic = {}
        for label, sent in found.traffic_by_phase.items():
            if label == "dense":
                continue
            traffic[label] = np.zeros((ranks, ranks))
            for group in groups:
                traffic[label][np.ix_(group, group)] = sent
        dense_bytes = dense_step(workload, self.world)[1]
        if ranks > 1 and dense_bytes:
            around = np.arange(ranks)
            traffic["dense"] = np.zeros((ranks, ranks))
            traffic["dense"][around, (around + 1) % ranks] = 2 * (ranks - 1) / ranks * dense_bytes
        if self.replicas > 1:
            for label, (once, several) in self._held(pairs, workload).items():
                sent = np.zeros((ranks, ranks))
                for number, group in enumerate(groups):
                    after = groups[(number + 1) % self.replicas]
                    sent[group, after] += 2 * (self.replicas - 1) / self.replicas * once  # around the ring
                    for other in groups:
                        sent[group, other] += (other is not group) * 2 / self.replicas * several  # to all of them
                if sent.any():
                    traffic[f"replicas/{label}"] = sent / sync_every
        return traffic

    def _held(
        self, pairs: Sequence[tuple[BaseEmbeddingConfig, ParameterSharding]], workload: Workload
    ) -> dict[str, Array]:
        """``[2, S]`` bytes of weights and of states.

        Row 0: bytes that a group stores once, which are all-reduced. Row 1: replicas and state per row, which a group
        may store several times; `distributed.replica_sync` sends these.
        """
        per_row, per_element = OPTIMIZER_STATE_BYTES[workload.optimizer]
        weights, states = np.zeros((2, self.group_size)), np.zeros((2, self.group_size))
        for config, sharding in pairs:
            full = sharding.resolved(config, self.group_size, self.group.local_world_size)
            for shard, copy in zip(full.shards, full.replica_flags, strict=True):
                weights[int(copy), shard.rank] += shard.num_elements * config.data_type.bytes_per_element
                if full.compute_kernel != "dense":
                    states[int(copy), shard.rank] += shard.num_elements * per_element
                    states[1, shard.rank] += shard.num_rows * per_row
        return {"weights": weights, "optimizer_state": states}

    def more_dense_ms(self, workload: Workload) -> float:
        """Extra milliseconds of averaging the dense gradient over all ranks instead of a sharding group."""
        return dense_step(workload, self.world)[0] - dense_step(workload, self.group)[0]
