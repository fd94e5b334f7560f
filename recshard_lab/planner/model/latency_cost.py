"""Costs of inference: one batch through the forward chain alone, without backward and optimizer.

It is `CostModel` with the phases input_dist, lookup, output_dist and dense. The dense part computes 2 operations per
parameter and sample, or a third of ``dense_flops_per_sample``, and averages no gradient. Memory has no optimizer state,
no gradients and 4 bytes per dense parameter. Weights take the bytes of their number format, and quantized ones a scale
and an offset for each row of each shard.

Shape letters: K loads, W ranks, P phases, T tables, n shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from recshard_lab.embedding.configs import ROW_HEADER_BYTES, BaseEmbeddingConfig, DataType
from recshard_lab.planner.model.cost import PHASES, CostModel, dense_step
from recshard_lab.planner.model.loads import BACK, HOST, MEMORY, NORMS, OUT, ROWS, SUM, UPDATE, Rects
from recshard_lab.planner.model.memory import MEMORY_CATEGORIES
from recshard_lab.planner.model.terms import Switch, Terms
from recshard_lab.planner.workload import Array, Workload
from recshard_lab.sharding import ParameterConstraints, Topology

FORWARD = PHASES[:4]
SCALE_BYTES = dict.fromkeys((DataType.INT8, DataType.INT4, DataType.INT2), ROW_HEADER_BYTES)
"""Bytes of a row's scale and bias, fp16 both."""
_TRAINING = [UPDATE, NORMS, SUM]


class LatencyCostModel(CostModel):
    """`CostModel` of inference: ``EmbeddingShardingPlanner(cost_model="latency")``.

    >>> tables = [BaseEmbeddingConfig(1000, 16, "movies", DataType.INT8, ["movie"])]
    >>> model = LatencyCostModel(tables, Topology(2), Workload(512, optimizer="adam"))
    >>> whole = Rects(*(np.array([x]) for x in (0, 1000.0, 16.0, 0.0, 0.0)))
    >>> loads = np.append(model.rect_loads(whole), np.zeros((len(model.rect_loads(whole)), 1)), axis=1)
    >>> model.phase_names, model.memory(loads)[:2, 0].tolist()  # weights with scales, no optimizer state
    (('input_dist', 'lookup', 'output_dist', 'dense'), [20000.0, 0.0])
    """

    name = "latency"
    phase_names = FORWARD

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        topology: Topology,
        workload: Workload,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        if workload.pipeline != "none":
            raise ValueError(
                f"cost_model='latency' predicts one batch at a time, and the workload has pipeline "
                f"{workload.pipeline!r}. Fix: pipeline='none'"
            )
        self._scales = np.array([SCALE_BYTES.get(table.data_type, 0) for table in tables], dtype=float)
        super().__init__(tables, topology, replace(workload, optimizer="exact_sgd"), constraints)
        self.fixed_memory[MEMORY_CATEGORIES.index("dense")] = 4.0 * workload.dense_parameters

    def set_topology(self, topology: Topology) -> None:
        super().set_topology(topology)
        each = self.workload.dense_flops_per_sample
        flops = 2.0 * self.workload.dense_parameters if each is None else each / 3
        forward = replace(
            self.workload,
            dense_parameters=0,
            dense_flops_per_sample=flops,
            dense_traffic_per_sample=self.workload.dense_traffic_per_sample / 3,
            dense_launches=self.workload.dense_launches // 3,
        )
        self.dense_ms, self.dense_bytes = dense_step(forward, topology)

    def rect_loads(self, rects: Rects) -> Array:
        """The loads ``[K, n]`` of n shards."""
        whole = Rects(
            rects.of, rects.rows, rects.cols, rects.replicated, np.zeros_like(rects.dense), rects.route,
            rects.by_node, rects.first, rects.host, rects.cached,
        )  # fmt: skip
        loads = super().rect_loads(whole)
        loads[_TRAINING] = 0.0
        replica = rects.replicated > 0
        for load in (BACK, ROWS + BACK - OUT):  # gradients; for other shards, the buffer of their rows
            loads[load] = np.where(replica, 0.0, loads[load])
        scales = rects.rows * self._scales[rects.of]
        in_host = np.zeros(len(rects.of), dtype=bool) if rects.host is None else rects.host > 0
        in_host &= self.topology.has_tiers
        loads[MEMORY] += np.where(in_host, 0.0, scales)
        loads[HOST] += np.where(in_host, scales, 0.0)
        return loads

    def phases(self, loads: Array) -> Array:
        """Milliseconds ``[P, ..., W]`` of ranks that hold `loads` ``[K, ..., W]``."""
        return super().phases(loads)[: len(FORWARD)]

    @cached_property
    def terms(self) -> Terms:
        """The same costs as linear terms."""
        terms = self.added_terms()
        kept = [*range(len(FORWARD)), -1]  # and memory
        switches = (
            Switch(one.loads, one.fixed[kept], None if one.everyone is None else one.everyone[kept])
            for one in terms.switches
        )
        return Terms(terms.own[kept], terms.node[kept], terms.everyone[kept], terms.fixed[kept], tuple(switches))

    def traffic(self, loads: Array, norms: Array | None = None, collections: int = 1) -> dict[str, Array]:
        """Bytes ``[W, W]`` from rank to rank in one forward, by the label that a trace gives them."""
        found = super().traffic(loads, None, collections)
        return {label: sent for label, sent in found.items() if not label.startswith("output_dist_backward")}
