"""Costs by the formulas of TorchRec 1.8's estimator: the same numbers, so that you can compare plans.

A shard's time is bytes over a bandwidth. A rank's time is the sum over its shards. The step is the **busiest rank's
sum**: collectives do not wait. With B' ids and V vectors of one rank's batch, W ranks, L ranks per node, c columns, e
bytes per element, and bw of device memory (half of it for replicas and kernel "dense")::

    columns   ids B' W          penalty(c) (8 ids + ids max(c, 32) e + V W c e) / bw       a shard of all rows
    rows      ids B'                       (8 ids + ids c e          + V W c e) / bw       row shards over all ranks
    node rows ids B' W / L      the same                                                   row shards over one node
    replica   ids B'                       (8 ids + ids c e          + V c e)   / bw

    backward  twice the forward; weighted ids count double, and add 1.1 times the forward
    output exchange, both directions
              V W c e over the link (node rows: over the node's link, and V (W / L) c e over the network);
              rows and node rows also copy the gradients: 2.455 V W c e / bw
    replicas, backward
              an all-reduce of the whole table over W NICs, and 9.22 of its bytes / bw for a dense optimizer

    memory    weights, optimizer state (0 for SGD, one number per row for row-wise Adagrad, two per element for Adam,
              else one), 8-byte ids and V W c e of rows; the reserve, the dense part, and 160 bytes per id of a batch
              stay free

The formulas leave out input_dist, latencies, launches, repeated ids and waiting. Prefetch costs nothing for the kernels
"fused" and "dense". Two differences from TorchRec: for a table with fewer rows than ranks, TorchRec also charges ranks
whose row shards are empty, and here empty shards do not exist. On CPUs TorchRec keeps no memory free, and here the
topology's reserve stays free. TorchRec cannot make a row shard larger than E / W (or E / L), so none is planned. In a
plan from elsewhere, such a shard is charged for its share of the ids.

Shape letters: K loads, W ranks, P phases, n shards.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import BACK, LOOKUP, MEMORY, OUT, UPDATE, K, Rects
from recshard_lab.planner.model.memory import MEMORY_CATEGORIES
from recshard_lab.planner.model.terms import Terms
from recshard_lab.planner.workload import Array, Workload
from recshard_lab.sharding import ParameterConstraints, Proposal, Topology
from recshard_lab.sharding.plan.validate import replica_flags
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

TORCHREC_PHASES = ("lookup", "output_dist", "output_dist_backward", "lookup_backward")
_LOADS = [LOOKUP, OUT, BACK, UPDATE]  # ms of each phase

ID_BYTES = 8
LEAST_COLUMNS = 32  # that a lookup of all rows reads
COPY_FACTOR, DENSE_OPTIMIZER_FACTOR = 2.455, 9.22
BACKWARD_FACTOR, WEIGHTED_FACTOR = 2.0, 1.1
COPIES_OF_A_BATCH = 20


class TorchRecCostModel(CostModel):
    """`CostModel` by TorchRec's formulas; times are loads, in milliseconds.

    Attributes:
        message_bytes: ``[T]`` bytes per number of a row in messages. Default: those of the weights.

    >>> tables = [BaseEmbeddingConfig(name="movies", num_embeddings=1000, embedding_dim=128, feature_names=["movie"])]
    >>> model = TorchRecCostModel(tables, Topology(2, "cuda"), Workload(512))
    >>> whole = [np.array([x]) for x in (0, 1000.0, 128.0, 0.0, 0.0)]
    >>> [f"{ms:.6f}" for ms in model.phases(model.rect_loads(Rects(*whole)))[:, 0]]
    ['0.001097', '0.000814', '0.000814', '0.002194']
    """

    name = "torchrec"
    phase_names = TORCHREC_PHASES
    prices_nodes = True
    waits = False
    has_routes = False
    has_tiers = False

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        topology: Topology,
        workload: Workload,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        if workload.codecs != ("fp32", "fp32") or workload.pipeline != "none":
            raise ValueError(
                f"cost_model='torchrec' knows rows and gradients in fp32 and no pipeline, and the workload has codecs "
                f"{'/'.join(workload.codecs)} and pipeline {workload.pipeline!r}. Fix: cost_model='recshard', "
                f"or codecs='fp32' and pipeline='none'"
            )
        dynamic = [table.name for table in tables if table.dynamic]
        if dynamic:
            raise ValueError(
                f"cost_model='torchrec' has no formulas for the dynamic table {dynamic[0]!r}. Fix: "
                f"cost_model='recshard'"
            )
        super().__init__(tables, topology, workload, constraints)
        self.message_bytes = self.tables.element_bytes
        at = MEMORY_CATEGORIES.index
        self.fixed_memory[at("output_buffers")] = 0.0
        self.fixed_memory[at("input_buffers")] = np.ceil(self.tables.ids.sum() * ID_BYTES) * COPIES_OF_A_BATCH

    def takes(self, proposal: Proposal) -> bool:
        """Whether TorchRec can make a proposal.

        It cannot replicate some rows only, and its row shards have equal sizes on all ranks.
        """
        if proposal.tiers is not None:
            return False
        if proposal.scheme == "row_wise" and (
            proposal.assignments is None or not isinstance(proposal.rects, EvenTiling)
        ):
            return False
        if isinstance(proposal.rects, EvenTiling):
            return not proposal.rects.copies
        return len(set(flags := replica_flags(proposal.rects))) == 1 or not flags

    def rect_loads(self, rects: Rects) -> Array:
        """The loads ``[K, n]`` of n shards. All routes cost the same."""
        of, rows, cols, dense = rects.of, rects.rows, rects.cols, rects.dense
        top, tables = self.topology, self.tables
        ranks, local, nodes = top.world_size, top.local_world_size, top.num_nodes
        replica = rects.replicated > 0
        node_rows = np.zeros(len(of), dtype=bool) if rects.by_node is None else (rects.by_node > 0) & ~replica
        cut = ~replica & ~node_rows & (rows < tables.rows[of])
        whole = ~(replica | node_rows | cut)
        size, pooled = tables.element_bytes[of], tables.pooled[of] > 0
        row_shards = np.where(node_rows, local, np.where(cut, ranks, 1.0))
        share = np.where(rows <= np.ceil(tables.rows[of] / row_shards), 1.0 / row_shards, rows / tables.rows[of])
        sources = np.where(replica, 1.0, ranks)
        ids = tables.ids[of] * share * sources
        vectors = np.where(pooled, tables.filled[of], tables.ids[of] * share)
        moved = vectors * sources * cols * self.message_bytes[of]
        bw = top.memory_bw * np.where(replica | (dense > 0), 0.5, 1.0)

        read = np.ceil(ids * ID_BYTES) * (1 + tables.weighted[of])
        looked_up = ids * np.where(whole, np.maximum(cols, LEAST_COLUMNS), cols) * size
        forward = (read + looked_up + moved) * np.where(whole, _penalty(cols), 1.0) / bw

        link = top.intra_host_bw if nodes == 1 else top.inter_host_bw
        wire = moved / np.where(node_rows, top.intra_host_bw, link)
        if nodes > 1:
            across = np.where(pooled, tables.filled[of], tables.ids[of]) * nodes * cols * self.message_bytes[of]
            wire += node_rows * across / top.inter_host_bw
        loads = np.zeros((K, len(of)))
        loads[LOOKUP] = forward
        loads[UPDATE] = forward * (BACKWARD_FACTOR + WEIGHTED_FACTOR * tables.weighted[of])
        loads[OUT] = np.where(replica, 0.0, wire)
        copied = (node_rows | cut) * moved * COPY_FACTOR / bw
        loads[BACK] = np.where(replica, self._all_reduce(rows * cols * size, bw), wire + copied)

        weights = np.ceil(rows * cols * size)
        loads[MEMORY] = weights
        loads[MEMORY + 1] = np.ceil(weights * self._state_factor(of))
        loads[MEMORY + 2] = np.ceil(ids * ID_BYTES)
        loads[MEMORY + 3] = np.ceil(moved)
        return loads

    def phases(self, loads: Array) -> Array:
        """Milliseconds ``[P, ..., W]`` of ranks that hold `loads` ``[K, ..., W]``."""
        return np.asarray(loads[_LOADS])

    def caused(self, loads: Array, whole: Array) -> Array:
        """``[P, W]`` ms that `loads` ``[K, W]`` cause. No cost is paid once, so `whole` does not matter."""
        return self.phases(loads)

    @cached_property
    def terms(self) -> Terms:
        """One phase, whose value on a rank is its sum: the slowest rank is the busiest."""
        own, nothing, fixed = np.zeros((2, K)), np.zeros((2, K)), np.zeros(2)
        own[0, _LOADS] = 1.0
        own[1, MEMORY:] = 1.0
        fixed[1] = self.fixed_memory.sum()
        return Terms(own, nothing, nothing.copy(), fixed)

    def buffer_bytes(self, loads: Array) -> Array:
        """``[..., W]`` zeros: a shard's own loads contain all buffers."""
        return np.zeros(loads.shape[1:])

    def traffic(self, loads: Array, norms: Array | None = None, collections: int = 1) -> dict[str, Array]:
        """Empty: the formulas have times, and no bytes from rank to rank."""
        return {}

    def _all_reduce(self, table_bytes: Array, bw: Array) -> Array:
        top = self.topology
        nodes = min(top.num_nodes, 2)
        ms = table_bytes * (2 * nodes - 1) / nodes / (top.inter_host_bw * top.local_world_size)
        if top.world_size > 2 * top.local_world_size:
            ms = ms * 2
        return np.asarray(ms + table_bytes * DENSE_OPTIMIZER_FACTOR / bw)

    def _state_factor(self, of: Array) -> Array:
        """``[n]`` bytes of optimizer state for a byte of weights."""
        optimizer = self.workload.optimizer
        if optimizer == "exact_row_wise_adagrad":
            return np.asarray(1.0 / self.tables.cols[of])
        return np.full(len(of), {"exact_sgd": 0.0, "adam": 2.0}.get(optimizer, 1.0))


def _penalty(cols: Array) -> Array:
    """``[n]`` factor on lookups whose rows fill only part of a kernel's block."""
    return np.where(cols >= 128, 1.0, np.where(cols >= 64, 1.15, 1.75))
