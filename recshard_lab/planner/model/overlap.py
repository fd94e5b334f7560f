"""What a pipeline hides: the step of many batches, of which the next ones' ids travel while this one computes.

Without a pipeline the phases of a step run one after the other. With one, the input side of batch i + 1 runs beside the
compute of batch i::

    none          input_dist | lookup | output_dist | dense | output_dist_backward | lookup_backward
    sparse_dist   first exchange of i + 1 | lookup .. lookup_backward of i          beside: ids of i + 1, copy of i + 2
    prefetch      lookup .. lookup_backward of i        beside: first exchange of i + 2, ids of i + 1, copy of i + 3

A step is then as long as whichever needs longest:

    chain     the phases of one batch that wait for each other: what is left of input_dist, and all others. The first
              exchange (lengths, from which the sizes of the ids' messages follow) is waited for by the host under
              sparse_dist; under prefetch it went a step earlier
    network   all that the busiest rank sends and receives, input side included
    device    all that its GPU computes; host: all that its CPU packs and launches; copy: its batch over the bus

On a CPU a rank computes, packs and launches on one core, and copies nothing to a device. Only its waiting share can be
hidden: the network's part of input_dist. Where ranks share cores (`Topology.slowdown` above 1), even that is none:
while one rank waits, another computes on its core, and loopback messages are its work as well.

What is not in it: contention beyond these sums, Python's lock, memory of the batches under way.

Shape letters: K loads, P phases, W ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.planner.model.loads import COMPUTED, K
from recshard_lab.planner.model.parts import only
from recshard_lab.planner.workload import Array

if TYPE_CHECKING:
    from recshard_lab.planner.model.cost import CostModel

INPUT = 0  # the phase that is hidden
WORDS = {
    "chain": "the chain of one batch's phases",
    "network": "the network",
    "device": "the device",
    "host": "the host's packing and launches",
    "core": "the core that a rank computes and packs on",
    "copy": "the copy to the device",
    "thread": "the thread that launches the input side",
}


@dataclass(frozen=True)
class Overlap:
    """The step under a pipeline.

    Attributes:
        pipeline: its name.
        plain_ms: the step without it.
        needs_ms: resource -> ms that a step needs of it; the largest is the step.
        shared_cores: nothing is hidden because ranks share cores.

    >>> Overlap("prefetch", 5.0, {"chain": 3.0, "network": 4.0}).bound_by
    'network'
    """

    pipeline: str
    plain_ms: float
    needs_ms: Mapping[str, float]
    shared_cores: bool = False

    @property
    def step_ms(self) -> float:
        """The step under the pipeline."""
        return max(self.needs_ms.values())

    @property
    def bound_by(self) -> str:
        """The resource that it takes as long as."""
        return max(self.needs_ms, key=lambda name: self.needs_ms[name])

    @property
    def hidden_ms(self) -> float:
        """How much shorter the step is than without the pipeline."""
        return self.plain_ms - self.step_ms

    def __str__(self) -> str:
        others = ", ".join(f"{name} {ms:.2f}" for name, ms in self.needs_ms.items() if name != self.bound_by)
        words = (
            f"pipeline {self.pipeline}: {self.step_ms:.2f} ms, {self.plain_ms:.2f} ms without; bound by "
            f"{WORDS[self.bound_by]} ({others} ms)"
        )
        return f"{words}. Ranks share cores, so that nothing is hidden" if self.shared_cores else words


class OverlapCosts:
    """Splits the phases of a model into what waits for the network, what the host does and what the device does."""

    def __init__(self, model: "CostModel") -> None:
        self.model, top, load = model, model.topology, model.workload
        self.on_gpu = top.compute_device == "cuda"
        self.shared_cores = top.slowdown > 1
        self.first_ms = model.latency_ms if load.pipeline == "sparse_dist" else 0.0
        self.network, self.host, self.device = (_alone(model, part) for part in ("network", "host", "device"))
        ids, bags = model.tables.ids, model.tables.bags
        numbers = 8 * ids.sum() + 4 * (ids @ model.tables.weighted) + 4 * bags.sum()  # int64 ids, int32 lengths
        numbers += 4 * load.batch_size * (load.dense_features + 1)  # and a label
        self.copy_ms = float(numbers) / top.ddr_mem_bw if self.on_gpu else 0.0

    def split(self, loads: Array) -> tuple[Array, Array, Array, Array]:
        """``[P, ..., W]`` ms of each phase, and of it the network's, the host's and the device's.

        They add up but for the dense part and for launches on a GPU, where the device works while the host launches.
        """
        bare = loads.copy()
        bare[COMPUTED] = 0.0
        return (
            self.model.phases(loads),
            self.network.phases(bare),
            self.host.phases(bare),
            self.device.phases(loads),
        )

    def needs(self, loads: Array) -> tuple[Array, dict[str, Array]]:
        """``[...]`` ms of the plain step, and of each resource."""
        ms, network, host, device = self.split(loads)
        exposed = np.full_like(ms[INPUT], self.first_ms)
        if not self.on_gpu:
            exposed = ms[INPUT] if self.shared_cores else exposed + ms[INPUT] - network[INPUT]
        slowest = ms.max(axis=-1)
        linked = (network + device).max(axis=-1) if self.on_gpu else slowest  # a GPU's host launches ahead
        found = {"chain": exposed.max(axis=-1) + linked.sum(axis=0) - linked[INPUT]}
        found["network"] = network.sum(axis=0).max(axis=-1)
        if self.on_gpu:
            found["device"] = device.sum(axis=0).max(axis=-1)
            found["host"] = host.sum(axis=0).max(axis=-1)
            found["copy"] = np.full_like(found["chain"], self.copy_ms)
        else:
            found["core"] = (host + device).sum(axis=0).max(axis=-1)
        return slowest.sum(axis=0), found

    def step_ms(self, loads: Array) -> Array:
        """``[...]`` ms of a step of ranks that hold `loads` ``[K, ..., W]``."""
        return np.asarray(np.max(list(self.needs(loads)[1].values()), axis=0))

    def overlap(self, loads: Array) -> Overlap:
        """Of loads ``[K, W]``."""
        plain, needs = self.needs(loads)
        named = {name: float(ms) for name, ms in needs.items()}
        return Overlap(self.model.workload.pipeline, float(plain), named, not self.on_gpu and self.shared_cores)

    def leave_exposed(self, own: Array, node: Array, everyone: Array, fixed: Array, cut: Array) -> None:
        """Takes what is hidden out of the linear terms of input_dist, so that they are those of the chain."""
        if self.on_gpu:
            for costs in (own, node, everyone, fixed, cut):
                costs[INPUT] = 0.0
        elif not self.shared_cores:
            terms = self.network.terms
            sent = np.ones(K)
            sent[COMPUTED] = 0.0
            for costs, theirs in ((own, terms.own), (node, terms.node), (everyone, terms.everyone)):
                costs[INPUT] -= theirs[INPUT] * sent
            fixed[INPUT] -= terms.fixed[INPUT]
        if self.on_gpu or not self.shared_cores:
            fixed[INPUT] += self.first_ms


def _alone(model: "CostModel", part: str) -> "CostModel":
    """The same model where everything but a part costs nothing, without a pipeline."""
    made = model.on(only(model.topology, part))
    made.workload = replace(model.workload, pipeline="none")
    return made
