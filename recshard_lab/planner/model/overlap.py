"""What a training pipeline hides: the step of many batches, whose inputs travel while another batch is computed.

On a GPU, `simulation.py` issues the parts of several batches to streams, and the time between two batches is the
prediction. Its lower bound is the largest of what the step needs of each resource::

    chain     from a lookup to the next one: rows, dense compute, gradients, update; without the host
    network   all that the busiest rank sends and receives, input side included
    device    all kernels
    host      all launches, and the read of the ids' sizes
    thread    the launches of the second host thread, if the workload has one
    copy      the copy of a batch to the device

On a CPU, a rank computes, packs and launches on one core, and copies nothing to a device. A pipeline hides only the
network's part of input_dist, all but the message of sizes under sparse_dist. The step is the largest of::

    chain     the phases of one batch, without what is hidden
    network   as above
    core      all that the rank computes, packs and launches

If ranks share cores (`Topology.slowdown` above 1), a pipeline hides nothing: while one rank waits, another computes on
its core, and loopback messages are work of that core too.

Shape letters: K loads, P phases, W ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recshard_lab.planner.model.loads import COMPUTED, K, Rects
from recshard_lab.planner.model.simulation import DENSE, INPUT, StepParts, steady_ms
from recshard_lab.planner.model.terms import Terms
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology

if TYPE_CHECKING:
    from recshard_lab.planner.model.cost import CostModel

BUCKET_BYTES = 25 * 2**20  # of torch's DistributedDataParallel
FREE = 1e30  # bytes or operations per ms of what costs nothing
#: figures of `Topology` by who spends them; those of lookups and updates are in the loads `loads.COMPUTED`
FIGURES = {
    "network": (
        "intra_host_bw", "inter_host_bw", "intra_host_latency_ms", "inter_host_latency_ms", "peer_ms",
        "inter_host_peer_ms",
    ),
    "host": ("launch_ms", "host_ms", "shard_feature_ms", "row_split_ms", "norm_ms", "step_ms", "sync_ms"),
    "device": ("hbm_mem_bw", "cache_bw", "flops_per_ms", "tf32_flops_per_ms", "route_ns_per_id", "kernel_ms"),
}  # fmt: skip
WORDS = {
    "chain": "the chain from lookup to lookup",
    "network": "the network",
    "device": "the device",
    "host": "the host",
    "core": "the core",
    "copy": "the copy to the device",
    "thread": "the second host thread",
}


@dataclass(frozen=True)
class Overlap:
    """The step under a pipeline.

    Attributes:
        pipeline: its name.
        step_ms: predicted time between two batches.
        plain_ms: the phases of one batch, one after the other.
        needs_ms: resource -> ms for which a step needs it.
        shared_cores: whether ranks share cores, so that the pipeline hides nothing.

    >>> found = Overlap("prefetch", 4.5, 6.0, {"chain": 3.0, "network": 4.0})
    >>> found.bound_by, found.lower_bound_ms
    ('network', 4.0)
    """

    pipeline: str
    step_ms: float
    plain_ms: float
    needs_ms: Mapping[str, float]
    shared_cores: bool = False

    @property
    def lower_bound_ms(self) -> float:
        """The largest need: no order of the same work is shorter."""
        return max(self.needs_ms.values())

    @property
    def bound_by(self) -> str:
        """The resource that the step needs longest."""
        return max(self.needs_ms, key=lambda name: self.needs_ms[name])

    @property
    def hidden_ms(self) -> float:
        """How much shorter the step is than its phases one after the other."""
        return self.plain_ms - self.step_ms

    def __str__(self) -> str:
        needs = sorted(self.needs_ms.items(), key=lambda need: -need[1])
        words = (
            f"pipeline {self.pipeline}: {self.step_ms:.2f} ms, its phases one after the other {self.plain_ms:.2f} ms. "
            f"It needs {', '.join(f'{WORDS[name]} {ms:.2f} ms' for name, ms in needs)}"
        )
        return f"{words}. The ranks share cores, so the pipeline hides nothing" if self.shared_cores else words


class OverlapCosts:
    """Splits the phases of a model into what waits for the network, what the host does and what the device does."""

    def __init__(self, model: "CostModel") -> None:
        self.model, top, load = model, model.topology, model.workload
        self.on_gpu = top.compute_device == "cuda"
        self.shared_cores = top.slowdown > 1
        self.threads = load.pipeline_threads
        self.first_ms = model.latency_ms if load.pipeline == "sparse_dist" else 0.0
        self.network, self.host, self.device = (_alone(model, part) for part in ("network", "host", "device"))
        ids, bags = model.tables.ids, model.tables.bags
        numbers = 8 * ids.sum() + 4 * (ids @ model.tables.weighted) + 4 * bags.sum()  # int64 ids, int32 lengths
        numbers += 4 * load.batch_size * (load.dense_features + 1)  # and a label
        self.copy_ms = float(numbers) / top.ddr_mem_bw if self.on_gpu else 0.0

    def split(self, loads: Array) -> tuple[Array, Array, Array, Array]:
        """``[P, ..., W]`` ms of each phase, and of it the network's, the host's and the device's.

        They add up but for the dense part, where the device computes while the host launches.
        """
        bare = loads.copy()
        bare[COMPUTED] = 0.0
        return (
            self.model.phases(loads),
            self.network.phases(bare),
            self.host.phases(bare),
            self.device.phases(loads),
        )

    def parts(self, loads: Array) -> StepParts:
        """The step of ranks with loads ``[K, ..., W]`` on GPUs: each phase's slowest rank, by network and device."""
        _, network, host, device = self.split(loads)
        slowest = (network + device).argmax(axis=-1)[..., None]
        computed, sent = (np.take_along_axis(part, slowest, axis=-1)[..., 0] for part in (device, network))
        straggle, sizes_ms = self.model.straggle, self.model.latency_ms * self.model.straggle
        sync_ms, launched = self.model.topology.sync_ms * straggle, host.max(axis=-1)
        launched[INPUT] -= sync_ms
        sent[INPUT] -= sizes_ms
        buckets = max(1, math.ceil(self.model.dense_bytes / BUCKET_BYTES))
        return StepParts(launched, computed, sent, sizes_ms, sync_ms, self.copy_ms, buckets)

    def needs(self, loads: Array) -> dict[str, Array]:
        """Resource -> ``[...]`` ms for which a step needs it."""
        if self.on_gpu:
            return self.parts(loads).needs(self.threads)
        ms, network, host, device = self.split(loads)
        exposed = ms[INPUT] if self.shared_cores else self.first_ms + ms[INPUT] - network[INPUT]
        slowest = ms.max(axis=-1)
        return {
            "chain": exposed.max(axis=-1) + slowest.sum(axis=0) - slowest[INPUT],
            "network": network.sum(axis=0).max(axis=-1),
            "core": (host + device).sum(axis=0).max(axis=-1),
        }

    def step_ms(self, loads: Array) -> Array:
        """``[...]`` ms of a step of ranks that hold `loads` ``[K, ..., W]``."""
        if self.on_gpu:
            return steady_ms(self.parts(loads), self.model.workload.pipeline, self.threads)
        return np.asarray(np.max(list(self.needs(loads).values()), axis=0))

    def overlap(self, loads: Array) -> Overlap:
        """The step of ranks with loads ``[K, W]``."""
        plain, needs = self.model.step_of(self.model.phases(loads)), self.needs(loads)
        named = {name: float(ms) for name, ms in needs.items()}
        step = float(self.step_ms(loads))
        return Overlap(self.model.workload.pipeline, step, float(plain), named, not self.on_gpu and self.shared_cores)

    def leave_exposed(self, own: Array, node: Array, everyone: Array, fixed: Array, cut: Array) -> None:
        """On CPUs, takes what is hidden out of the linear terms of input_dist, so that they are those of the chain."""
        if not self.shared_cores:
            terms = self.network.terms
            sent = np.ones(K)
            sent[COMPUTED] = 0.0
            for costs, theirs in ((own, terms.own), (node, terms.node), (everyone, terms.everyone)):
                costs[INPUT] -= theirs[INPUT] * sent
            fixed[INPUT] += self.first_ms - terms.fixed[INPUT]

    def terms(self) -> Terms:
        """On GPUs, linear terms of which no step is shorter: a weighted mean of the chain's and the host's.

        Each alone is a lower bound. The weights are the cubes of both for evenly spread tables. So the larger one
        counts nearly in full, and a search still avoids what lengthens the smaller one.
        """
        model, ranks = self.model, self.model.topology.world_size
        chain, host = model.on(only(model.topology, "network", "device")).added_terms(), self.host.added_terms()
        hidden = [chain] if not self.threads else [chain, host]
        for terms in hidden:
            for costs in (terms.own, terms.node, terms.everyone, terms.fixed):
                costs[INPUT] = 0.0
            for switch in terms.switches:
                switch.fixed[INPUT] = 0.0
        for costs in (host.own, host.node, host.everyone):
            costs[:, COMPUTED] = 0.0
        chain.fixed[DENSE] -= self.network.dense_ms * model.straggle
        tables, none = model.tables, np.zeros(len(model.tables.rows))
        of: Array = np.arange(len(none))  # type: ignore[assignment]
        whole = model.rect_loads(Rects(of, tables.rows, tables.cols, none, none)).sum(axis=1)
        even = np.repeat(whole[:, None] / ranks, ranks, axis=1)
        lengths = [float(terms.spent(even, model.topology.num_nodes)[:-1].max(axis=1).sum()) for terms in (chain, host)]
        cubes = [max(length, 1e-9) ** 3 for length in lengths]
        return chain.mean(host, cubes[0] / sum(cubes))


def only(topology: Topology, *parts: str) -> Topology:
    """The topology on which everything costs nothing but these parts of a phase.

    >>> only(Topology(8, "cuda"), "network", "device").launch_ms
    0.0
    """
    others = [name for part, names in FIGURES.items() if part not in parts for name in names]
    free: dict[str, Any] = {name: FREE if name.endswith(("_bw", "flops_per_ms")) else 0.0 for name in others}
    return replace(topology, **free)


def _alone(model: "CostModel", part: str) -> "CostModel":
    """The same model where everything but a part costs nothing, without a pipeline."""
    made = model.on(only(model.topology, part))
    made.workload = replace(model.workload, pipeline="none")
    return made
