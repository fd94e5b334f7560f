"""Milliseconds of lookups and optimizers, on a rank that has a core to itself.

The first use of a row in a batch reads it from memory, or from the cache if the rank's other rows have not evicted it
since the last step. A step uses U of a table's E rows, so a row is used every E / U steps, and every step reads V bytes
of rows. With ``x = E / U * V / cache_bytes``, the share ``x / (1 + x)`` comes from memory.

If ranks share cores, one computes while others wait. With c cores for W ranks, a phase takes the rank's own ms plus
``W / c - 1`` times the mean of all ranks. Balanced work therefore takes W / c times as long, and a rank that works
alone is hardly slowed. Ranks with separate cores still share memory and caches: `Topology.contention`.

The index of a dynamic table takes a time per id and a fixed time per shard and step, measured with ids that have a row
(`Topology.index_ns_per_id`, `index_ms`). Inserting and evicting takes longer. The workload does not state how many ids
are new, so that time is left out.

Shape letters: T tables, n shards, W ranks.
"""

import numpy as np

from recshard_lab.planner.model.loads import COPIES, DEDUP, LOOKUP, NORMS, POOL, SORT, SUM, UPDATE
from recshard_lab.planner.model.row_hits import RowHits
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, ROW_SUMS, Array, TableLoads
from recshard_lab.sharding import Topology

CACHE_LINE = 64  # bytes; memory is read in lines, so a piece of few columns costs as much as a line a row


class LookupCosts:
    """Costs on one topology, with one optimizer.

    Attributes:
        step_bytes: ``[T]`` of all tables' rows that a step uses, a rank's share; for every table the same.
    """

    def __init__(self, topology: Topology, tables: TableLoads, optimizer: str) -> None:
        self.topology, self.tables, self.optimizer = topology, tables, optimizer
        a_row, an_element = OPTIMIZER_STATE_BYTES[optimizer]
        each = tables.cols * (tables.element_bytes + an_element) + a_row
        self.step_bytes = np.full_like(tables.rows, (tables.ids * tables.unique * each).sum())
        self.dynamic = bool(tables.dynamic.any())
        self.of_mean = topology.slowdown - 1 + topology.contention  # how often the mean of the ranks comes on top

    def fill(
        self,
        loads: Array,
        of: Array,
        sizes: tuple[Array, Array],
        replicated: Array,
        hits: RowHits,
        sent: Array,
        back: Array,
        host: Array | None = None,
        distinct: Array | None = None,
    ) -> None:
        """Writes the loads LOOKUP, UPDATE, SORT, SUM, DEDUP, POOL, COPIES and NORMS of n shards.

        Args:
            loads: ``[K, n]``.
            of: ``[n]`` table of each; sizes: its rows and columns; replicated: 1.0 for a replica.
            hits: which ids are its rows.
            sent: ``[n]`` ids that each rank sends.
            back: ``[n]`` vectors whose gradients it sends.
            host: ``[n]`` 1.0 for shards in host memory, whose rows are all read over the link without a cache, as in
                TorchRec's formulas; None if all are in device memory.
            distinct: ``[n]`` 1.0 for shards whose ids are deduplicated by the source rank, which also pools; or
                None.
        """
        top, tables, ranks = self.topology, self.tables, self.topology.world_size
        rows, cols = sizes
        ids, unique, pooled = tables.ids[of] * hits.share, hits.unique, tables.pooled[of]
        vectors = pooled * tables.bags[of] + (1 - pooled) * ids
        loads[DEDUP] = loads[POOL] = 0.0
        if distinct is not None:  # a pass over ids, and one over rows, cost at least what routing and reading cost
            loads[DEDUP] = distinct * ids * (max(top.sort_ns_per_id, top.route_ns_per_id) * 1e-6)
            loads[POOL] = distinct * ids * cols * max(top.sum_ns_per_number * 1e-6, 4 / top.cache_bw)
            used = ids * ranks * unique
            ids, vectors = np.where(distinct > 0, sent, ids), np.where(distinct > 0, back, vectors)
            unique = np.minimum(1.0, used / np.maximum(ids * ranks, 1e-9))
        row_bytes = np.maximum(CACHE_LINE, cols * tables.element_bytes[of])
        missed = self._missed(of, rows, ids * ranks * unique)
        read_bytes = row_bytes + top.gather_row_bytes
        first_ms = missed * read_bytes / top.memory_bw + (1 - missed) * row_bytes / top.cache_bw  # of a row
        again_ms: Array | float = row_bytes / top.cache_bw
        if host is not None:
            first_ms, again_ms = (np.where(host > 0, read_bytes / top.ddr_mem_bw, ms) for ms in (first_ms, again_ms))
        vector_ms = 4 * cols / top.cache_bw + top.bag_ns * 1e-6
        lookup = ids * (top.lookup_ns_per_id * 1e-6 + unique * first_ms + (1 - unique) * again_ms)
        lookup += vectors * vector_ms
        id_ms = top.update_id_ns.get(self.optimizer, top.update_ns_per_id) * 1e-6
        row_ms = 2 * first_ms * top.update_cost[self.optimizer]
        row_ms += top.update_number_ns.get(self.optimizer, 0.0) * 1e-6 * cols
        update = sent * (id_ms + 4 * cols / top.cache_bw) + back * vector_ms + row_ms * unique * ids
        # a replica looks up its own batch, and all that was sent in backward
        update += replicated * lookup * sent / np.maximum(ids, 1e-9)
        loads[LOOKUP] = lookup * np.where(replicated > 0, 1.0, ranks)
        if self.dynamic:
            loads[LOOKUP] += tables.dynamic[of] * (ids * ranks * (top.index_ns_per_id * 1e-6) + top.index_ms)
        sums = ROW_SUMS.get(self.optimizer, 0)
        split = cols < tables.cols[of]
        used = ids * ranks * unique
        loads[UPDATE] = update * ranks + (sums > 0) * split * used * (top.norm_ns_per_row * 1e-6)
        loads[NORMS] = 4 * sums * used * (tables.cols[of] / cols - 1)  # to each other piece
        as_rows = (replicated > 0) & (sent < ids) & (ranks > 1)
        loads[COPIES] = (replicated > 0) * (ranks > 1) * tables.features[of]
        fixed = loads[COPIES] * top.replica_ms
        loads[SORT] = as_rows * ids * (top.sort_ns_per_id * 1e-6) + fixed
        loads[SUM] = as_rows * ids * cols * (top.sum_ns_per_number * 1e-6) + fixed

    def shared(self, own: Array) -> Array:
        """``[..., W]`` ms that `own` ms of computing take while the other ranks compute."""
        return own + self.of_mean * own.mean(axis=-1, keepdims=True) if self.of_mean else own

    def add_terms(self, own: Array, everyone: Array, phase: int, load: int, ms: float) -> None:
        """Adds `shared` of a load, of `ms` each, to ``[Q, K]`` as a linear term (see `terms.py`)."""
        own[phase, load] += ms
        everyone[phase, load] += ms * self.of_mean / self.topology.world_size

    def _missed(self, of: Array, rows: Array, used: Array) -> Array:
        """Of rectangles of so many rows, of which a step uses so many: the first uses that the cache misses."""
        if not self.topology.cache_bytes:
            return np.ones_like(rows)
        between = rows / np.maximum(used, 1e-9) * self.step_bytes[of]
        return np.asarray(between / (between + self.topology.cache_bytes))
