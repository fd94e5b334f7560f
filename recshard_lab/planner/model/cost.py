"""What a plan costs on each rank and in each phase of a step.

Every shard adds a fixed vector of loads to its rank. The phases follow from the sums::

    input_dist            each rank sends its ids to the ranks whose shards have their rows: sizes, then ids
    lookup                each rank looks up all its shards for the global batch, replicas for its own batch
    output_dist           partial pooled rows return to the source ranks, by their output path (not for replicas)
    dense                 the rest of the model, its all-reduce, and what a step costs around its phases
    output_dist_backward  the gradient of every pooled row goes back (of replicas, to every rank)
    lookup_backward       segment sums and the optimizer; with a row-wise optimizer on column shards, the norms

Collectives wait for the slowest rank, so a step is the **sum over phases of the slowest rank**. W ranks that vary by
chance with the relative deviation s wait for the largest of W draws, about ``1 + s sqrt(2 ln W)`` times the mean.

A phase is the sum of the network's time, of the time that grows with ids and bytes, and of a fixed time. On a GPU the
fixed time is the larger of the host's time for launches and exchanges and the device's time to start kernels
(`launch_counts.py`). A GPU's host also launches while the device works on ids and bytes. This sum ignores that, and is
too long by at most the smaller of the two in each phase. In exchange every cost is linear in the loads, which the
bounds of the search need. Pipelines, where the host runs ahead most, have their own model (`overlap.py`).

The sum over shards is an assumption. One fused kernel looks up all tables of a rank, and is faster than the sum of
separate lookups where small tables share its start, and slower where tables compete for the cache. `LookupCosts` keeps
the shared cache in the sum; `recshard bench calibration` measures what remains, as the error of held-out models.

Codecs (`codecs.py`) make rows and gradients smaller on the wire, and cost passes over memory at both ends.

Shape letters: K loads, W ranks, P phases, C candidates, n shards.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.launch_counts import fixed_costs
from recshard_lab.planner.model.loads import (
    ACROSS,
    BACK,
    CODED_ROWS,
    COPIES,
    DEDUP,
    DIRECT,
    DISTINCT,
    HOP,
    HOST,
    IDS,
    IN,
    LOOKUP,
    MEMORY,
    NORMS,
    OUT,
    PLAIN,
    POOL,
    REDUCE_SCATTER,
    ROW_CUT,
    SCATTER,
    SHARD_FEATURES,
    SORT,
    SUM,
    TWO_HOP,
    UPDATE,
    K,
    Rects,
)
from recshard_lab.planner.model.lookup_costs import LookupCosts
from recshard_lab.planner.model.memory import MEMORY_CATEGORIES, fixed_memory, rect_memory
from recshard_lab.planner.model.overlap import OverlapCosts
from recshard_lab.planner.model.route_costs import RouteCosts
from recshard_lab.planner.model.row_hits import row_hits, row_shares_of
from recshard_lab.planner.model.terms import SOME, Switch, Terms
from recshard_lab.planner.workload import Array, Workload, table_loads
from recshard_lab.sharding import ParameterConstraints, PlanError, Proposal, Topology

SIZES_BYTES = 32, 16  # of the sizes message to a rank, for each collection and for each of its shard features
PHASES = ("input_dist", "lookup", "output_dist", "dense", "output_dist_backward", "lookup_backward")

_AGREE = ("phases", "terms")  # two forms of the same costs
_MEMORY_AT = [MEMORY_CATEGORIES.index(c) for c in ("weights", "optimizer_state", "input_buffers", "output_buffers")]


class CostModel:
    """Costs of rectangles of `tables` on `topology` under `workload`.

    Attributes:
        name: by which the planner and `estimate` are asked for it.
        phase_names: of `phases`.
        prices_nodes: whether a shard's loads depend on `by_node` of `rect_loads`.
        waits: whether every phase takes as long as its slowest rank; else a step is the busiest rank's sum.
        has_routes: whether a table's route changes its cost.
        has_tiers: whether it knows the host's memory from the rank's own.

    Subclasses that change costs change the loads in `rect_loads`, or `phases` and `terms` together: the search and its
    bounds read `terms`.

    Raises:
        ValueError: an optimizer for which the topology states no `update_cost`.
        TypeError: a subclass that overrides `phases` without `terms`.
    """

    name = "recshard"
    phase_names: tuple[str, ...] = PHASES
    prices_nodes = False
    waits = True
    has_routes = True
    has_tiers = True
    proposers: Sequence[Any] | None = None  # the planner's `Proposer`s; None: the registered schemes

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        topology: Topology,
        workload: Workload,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        owners = [next(at for at, kind in enumerate(type(self).__mro__) if name in vars(kind)) for name in _AGREE]
        if owners[0] < owners[1]:
            raise TypeError(
                f"cost_model {type(self).__name__} overrides phases without terms: the planner searches by terms, and "
                f"would choose plans by other costs than it reports. Fix: change the loads in rect_loads, or override "
                f"terms too"
            )
        if workload.optimizer not in topology.update_cost:
            raise ValueError(
                f"topology.update_cost has no entry for {workload.optimizer!r} (it has: "
                f"{', '.join(topology.update_cost)}). Fix: add one"
            )
        self.workload, self._configs = workload, tables
        self.tables = table_loads(tables, topology.world_size, workload, constraints)
        self.row_shares = row_shares_of(tables, workload, constraints)
        self.set_topology(topology)
        self.usable_bytes = float(topology.free_memory_bytes())
        self.fixed_memory = fixed_memory(self.tables, workload)

    def set_topology(self, topology: Topology) -> None:
        """Costs on other ranks than before; as many, with as much memory."""
        self.topology = topology
        self.dense_ms, self.dense_bytes = dense_step(self.workload, topology)
        self.routes = RouteCosts(topology, self.workload.codecs)
        self.latency_ms = self.routes.latency_ms
        self.lookups = LookupCosts(topology, self.tables, self.workload.optimizer)
        self.once = fixed_costs(topology)
        self.input_ms = 2 * self.latency_ms + topology.sync_ms
        self.straggle = 1 + topology.straggler_sigma * math.sqrt(2 * math.log(topology.world_size))

    def on(self, topology: Topology) -> Self:
        """The same tables and step on another topology of equal size and memory; cheaper than a new model."""
        found = copy(self)
        for name in ("terms", "overlapped"):
            found.__dict__.pop(name, None)
        found.set_topology(topology)
        return found

    def takes(self, proposal: Proposal) -> bool:
        """Whether the planner may choose this cut; here every one."""
        return True

    def rect_loads(self, rects: Rects) -> Array:
        """The loads ``[K, n]`` of n shards."""
        of, rows, cols, replicated, host = rects.of, rects.rows, rects.cols, rects.replicated, rects.host
        route = rects.route
        top, tables, ranks = self.topology, self.tables, self.topology.world_size
        loads = np.empty((K, len(of)))
        if route is not None:
            route = np.where(replicated > 0, DIRECT, route)  # what every rank holds sends gradients alone, to all
        hits = row_hits(tables, self.row_shares, of, rows, rects.first, ranks)
        ids, pooled = tables.ids[of] * hits.share, tables.pooled[of]
        vectors = pooled * tables.bags[of] + (1 - pooled) * ids
        sent, back, lengths = self._sent(of, ids, vectors, cols, replicated, hits.touched, route)
        loads[IN] = tables.id_bytes[of] * (sent * (1 + tables.weighted[of]) + lengths)
        scattered = self._summed(route)
        share = rows / tables.rows[of]
        loads[PLAIN] = _by_route(4 * back * cols, replicated, share, route)
        loads[CODED_ROWS] = 0.0
        if self.routes.adds_to_rows:  # a row shard's share of each row in the sum
            loads[CODED_ROWS] = _by_route(back, replicated, share * cols / tables.cols[of], route)
        loads[IDS] = sent
        slow = host if host is not None and top.has_tiers and host.any() else None
        cached = rects.cached if rects.cached is not None and rects.cached.any() else None
        distinct = self._distinct(of, replicated, route)
        read_there = slow if slow is None or cached is None else slow * (cached == 0)
        self.lookups.fill(loads, of, (rows, cols), replicated, hits, sent, back, read_there, distinct)
        loads[UPDATE] += rects.dense * 3 * 4 * rows * cols / top.memory_bw
        loads[SHARD_FEATURES] = tables.features[of]
        loads[ROW_CUT] = tables.features[of] * (rows < tables.rows[of])
        loads[HOST] = 0.0
        arrives = sent, back, lengths
        loads[MEMORY:] = rect_memory(tables, of, rows, cols, rects.dense, ranks, self.workload.optimizer, arrives)
        held = loads[MEMORY : MEMORY + 2].copy()
        if slow is not None:
            loads[HOST] = slow * held.sum(axis=0)
            loads[MEMORY : MEMORY + 2] *= 1 - slow
        if cached is not None:
            loads[MEMORY : MEMORY + 2] += cached * held
            loads[LOOKUP] += self._miss_ms(of, cached, ids * ranks * hits.unique, held.sum(axis=0) / rows)
        if scattered is not None:
            loads[-1] *= ~scattered  # every rank puts all columns into the sum: `RouteCosts.buffer_bytes`
        if self.routes.widest is not None:  # beside the rows, their coded copy
            copies = self.routes.coded(loads, self.routes.widest)
            loads[-1] += ranks * (copies[BACK - OUT] + copies[HOP - OUT])
        return loads

    def _miss_ms(self, of: Array, cached: Array, used: Array, row_bytes: Array) -> Array:
        """``[n]`` ms in which rows that a cache misses are read over the link to the host, and others written back.

        The cache holds the most used rows. If the workload states no skew, all rows are used alike. Nothing under
        pipeline "prefetch", which moves rows while the batch before is computed.

        Args:
            of: ``[n]`` table of each shard.
            cached: ``[n]`` share of its rows.
            used: ``[n]`` distinct rows that a step uses.
            row_bytes: ``[n]`` of a row's weight and optimizer state.
        """
        found = np.zeros(len(of))
        if self.workload.pipeline == "prefetch":
            return found
        for table, share in {(int(table), float(share)) for table, share in zip(of, cached, strict=True) if share}:
            curve, rows = self.workload.row_shares(self._configs[table]), float(self.tables.rows[table])
            ids = float(self.tables.ids[table]) * self.topology.world_size
            whole = 0.0 if curve is None else float(curve.distinct(0.0, rows, ids))
            missed = 1 - share
            if curve is not None and whole > 0:
                missed = float(curve.distinct(share * rows, rows, ids)) / whole
            found += np.where((of == table) & (cached == share), missed, 0.0)
        return found * used * 2 * row_bytes / self.topology.ddr_mem_bw

    def _summed(self, route: Array | None) -> NDArray[np.bool_] | None:
        """``[n]`` True if a reduce-scatter adds the shard's rows; None if all are False."""
        if route is None or not (route == REDUCE_SCATTER).any():
            return None
        if not self.routes.forward.adds:
            raise PlanError(
                f"route 'reduce_scatter' adds rows on the way, and rows coded as {self.workload.codecs[0]} cannot be "
                f"added. Fix: codecs='fp16/{self.workload.codecs[1]}', or route 'direct' or 'two_hop'"
            )
        return np.asarray(route == REDUCE_SCATTER)

    def _sent(
        self, of: Array, ids: Array, vectors: Array, cols: Array, replicated: Array, touched: Array, route: Array | None
    ) -> tuple[Array, Array, Array]:
        """Ids that one rank sends, vectors whose gradients it sends, and lengths of bags, ``[n]`` each.

        Replicas are sent bags, or touched rows and their summed gradients, whichever is smaller. Deduplicated ids are
        touched rows.
        """
        bags = self.tables.bags[of]
        smaller = (self.tables.pooled[of] == 0.0) | (touched * (cols + 1) < bags * (cols + 1) + ids)
        as_rows = (replicated > 0) & smaller & (self.topology.world_size > 1)
        if (distinct := self._distinct(of, replicated, route)) is not None:
            as_rows |= distinct > 0
        return (
            np.where(as_rows, touched, ids),
            np.where(as_rows, touched, vectors),
            np.where(as_rows, 0.0, bags * self.tables.pooled[of]),
        )

    def _distinct(self, of: Array, replicated: Array, route: Array | None) -> Array | None:
        """``[n]`` 1.0 for those whose ids travel once: route "distinct_rows", or `Workload.index_dedup`."""
        found = np.zeros(len(of)) if route is None else 1.0 * (route == DISTINCT)
        if self.workload.index_dedup:
            static = 1 - self.tables.dynamic[of]
            found = np.maximum(found, (1 - self.tables.pooled[of]) * (1 - replicated) * static)
        return found if self.topology.world_size > 1 and found.any() else None

    def phases(self, loads: Array) -> Array:
        """Milliseconds ``[P, ..., W]`` of ranks that hold `loads` ``[K, ..., W]``."""
        top, once = self.topology, self.once
        ranks, slow = top.world_size, top.slowdown
        totals = loads[:HOST].sum(axis=-1, keepdims=True)
        ms = np.empty((len(PHASES), *loads.shape[1:]))
        features_ms = totals[SHARD_FEATURES] * (top.shard_feature_ms * slow)  # a rank packs and unpacks all of them
        route = top.route_ns_per_id * 1e-6
        ms[0] = self.routes.wire(loads[IN], totals[IN]) + self.input_ms + once["table_wise"][0]
        ms[0] += self.lookups.shared(loads[IDS] * (ranks * route)) + totals[IDS] * (route * slow)
        ms[0] += features_ms + loads[SORT] * slow + totals[DEDUP] * slow  # DEDUP and POOL: on every source rank
        kernels, used = loads[SHARD_FEATURES] * top.shard_feature_ms, loads[SHARD_FEATURES] > 0
        ms[1] = self.lookups.shared(loads[LOOKUP] + kernels) + used * once["table_wise"][1]
        ms[2] = self.routes.ms(loads, totals, once, features_ms, backward=False) + totals[POOL] * slow
        ms[3] = self.dense_ms
        ms[4] = self.routes.ms(loads, totals, once, features_ms, backward=True) + totals[POOL] * slow
        ms[4] += loads[SUM] * slow
        ms[5] = self.lookups.shared(loads[UPDATE] + kernels) + used * once["table_wise"][5]
        for load, name in ((ROW_CUT, "row_shards"), (COPIES, "replicas"), (DEDUP, "distinct_rows"), (NORMS, "norms")):
            for phase in np.flatnonzero(once[name]):
                ms[phase] += (totals[load] > SOME) * once[name][phase]
        norms = loads[NORMS]
        if ranks > 1 and norms.any():
            ms[5] += norms * (slow / self.routes.link) + (totals[NORMS] > SOME) * self.latency_ms
        return np.asarray(ms * self.straggle)

    @cached_property
    def overlapped(self) -> OverlapCosts:
        """What the workload's pipeline hides."""
        return OverlapCosts(self)

    def step_ms(self, loads: Array) -> Array:
        """``[...]`` the step of ranks that hold `loads` ``[K, ..., W]``, under the workload's pipeline."""
        if self.workload.pipeline == "none":
            return self.step_of(self.phases(loads))
        return self.overlapped.step_ms(loads)

    @cached_property
    def terms(self) -> Terms:
        """The same costs as linear terms, for solvers and bounds. No step under a pipeline is shorter than they say."""
        if self.workload.pipeline == "none":
            return self.added_terms()
        if self.topology.compute_device == "cuda":
            return self.overlapped.terms()
        found = self.added_terms()
        self.overlapped.leave_exposed(found.own, found.node, found.everyone, found.fixed, found.switches[0].fixed)
        return found

    def added_terms(self) -> Terms:
        """Linear terms of the phases one after the other."""
        top, once, phases = self.topology, self.once, len(PHASES)
        slow = top.slowdown
        own, node, everyone = (np.zeros((phases + 1, K)) for _ in range(3))
        everyone[0, IDS] = top.route_ns_per_id * 1e-6 * slow
        self.lookups.add_terms(own, everyone, 0, IDS, top.world_size * top.route_ns_per_id * 1e-6)
        everyone[0, SHARD_FEATURES] = top.shard_feature_ms * slow
        own[0, SORT] = own[4, SUM] = slow
        everyone[0, DEDUP] = everyone[2, POOL] = everyone[4, POOL] = slow
        for phase, load in ((1, LOOKUP), (5, UPDATE)):
            self.lookups.add_terms(own, everyone, phase, load, 1.0)
            self.lookups.add_terms(own, everyone, phase, SHARD_FEATURES, top.shard_feature_ms)
        fixed = np.append(once["table_wise"], 0.0)
        fixed[[2, 4]] = 0.0  # with the routes
        fixed[0] += self.input_ms
        fixed[3] = self.dense_ms
        own[0, IN] = self.routes.wire_ms
        everyone[0, IN] = self.routes.shared_wire_ms
        cut, norms, replicas = (np.append(once[name], 0.0) for name in ("row_shards", "norms", "replicas"))
        if top.world_size > 1:
            own[5, NORMS] = slow / self.routes.link
            norms[5] += self.latency_ms
        ways = self.routes.add_terms(own, node, everyone, once)
        switches = [Switch((ROW_CUT,), cut), Switch((NORMS,), norms), *ways]
        if replicas.any():
            switches.append(Switch((COPIES,), replicas))
        found = Terms(own, node, everyone, fixed, tuple(switches)).times(self.straggle)
        found.own[-1, MEMORY:] = 1.0
        found.fixed[-1] = self.fixed_memory.sum()
        return found

    def step_of(self, ms: Array) -> Array:
        """``[...]`` the step, without a pipeline, in which ranks take `ms` ``[P, ..., W]``."""
        return np.asarray(ms.max(axis=-1).sum(axis=0) if self.waits else ms.sum(axis=0).max(axis=-1))

    def caused(self, loads: Array, whole: Array) -> Array:
        """``[P, W]`` what `loads` ``[K, W]`` cause in a plan of loads `whole`: linear, what is paid once left out."""
        found = self.terms.caused(loads, self.topology.num_nodes, self.terms.switched(whole))
        return np.asarray(found[:-1])

    def memory(self, loads: Array) -> Array:
        """Bytes ``[5, ..., W]`` that each rank holds, by category."""
        found = np.zeros((len(MEMORY_CATEGORIES), *loads.shape[1:]))
        found += self.fixed_memory.reshape(-1, *[1] * (loads.ndim - 1))
        found[_MEMORY_AT] += loads[MEMORY:]
        # a home's end of the exchange: rows received in forward, gradients sent in backward, to replicas too
        found[MEMORY_CATEGORIES.index("output_buffers")] += self.buffer_bytes(loads)
        return found

    def memory_total(self, loads: Array) -> Array:
        """Bytes ``[..., W]`` that each rank holds, all categories together."""
        needed = loads[MEMORY:].sum(axis=0) + self.buffer_bytes(loads)
        return np.asarray(needed + self.fixed_memory.sum())

    @property
    def host_room(self) -> float:
        """Bytes of the host's memory that one rank has for weights and optimizer state, without the reserve."""
        return self.topology.ddr_cap * (1 - self.topology.reserve_fraction)

    def buffer_bytes(self, loads: Array) -> Array:
        """Bytes ``[..., W]`` of a source rank's exchange buffers, without those of its shards."""
        return self.routes.buffer_bytes(loads)

    def traffic(self, loads: Array, norms: Array | None = None, collections: int = 1) -> dict[str, Array]:
        """Bytes ``[W, W]`` from rank to rank in one step, by the label that a trace gives them, in a step's order.

        What stays on a rank is not in it. The all-reduce of the dense gradient is drawn as a ring.

        Args:
            loads: ``[K, W]``.
            norms: ``[W, W]`` of row norms, where columns are cut (see `norm_traffic`).
            collections: of the plan; each has its sizes message.
        """
        ranks = self.topology.world_size
        sizes = SIZES_BYTES[0] * collections + SIZES_BYTES[1] * loads[SHARD_FEATURES]
        found = {"input_dist/sizes": np.repeat(sizes[None, :], ranks, axis=0)}
        found["input_dist/ids"] = np.repeat(loads[IN][None, :], ranks, axis=0)
        found |= self.routes.traffic(loads)
        if norms is not None:
            found["row_norms"] = norms
        if self.dense_bytes:
            around = np.arange(ranks)
            found["dense"] = np.zeros((ranks, ranks))
            found["dense"][around, (around + 1) % ranks] = 2 * (ranks - 1) / ranks * self.dense_bytes
        for sent in found.values():
            np.fill_diagonal(sent, 0.0)
        return found


def dense_step(workload: Workload, topology: Topology) -> tuple[float, float]:
    """ms of the rest of the model with the average of its gradient over all ranks, and bytes of that gradient.

    The device computes while the host launches: what takes longer counts. Matrix products are bound by arithmetic, the
    operators between them by memory, so both times add up. At batch B, matrices reach the share
    ``B / (B + matrix_half_batch)`` of the rate. On GPUs of several nodes the sum goes by all of a node's links at once:
    an L-th of it over each rank's, while the node's own links spread it; a tree of N nodes is log2(N) messages deep.
    """
    each = workload.dense_flops_per_sample
    flops = workload.batch_size * (6.0 * workload.dense_parameters if each is None else each)
    size = 4.0 * workload.dense_parameters
    rate = topology.flops_per_ms if workload.matmul_precision == "highest" else topology.tf32_flops_per_ms
    compute_ms = flops / rate * (1 + topology.matrix_half_batch / workload.batch_size)
    compute_ms += workload.dense_launches * topology.kernel_ms
    compute_ms += workload.batch_size * workload.dense_traffic_per_sample / topology.memory_bw
    ms = topology.step_ms + max(workload.dense_launches * topology.launch_ms, compute_ms)
    if topology.world_size > 1 and size:
        flat = topology.num_nodes == 1
        link = topology.intra_host_bw if flat else topology.inter_host_bw
        wait = topology.intra_host_latency_ms if flat else topology.inter_host_latency_ms
        others = topology.world_size - 1
        messages_ms = others * topology.peer_ms
        wire = 2 * others / topology.world_size * size / link
        if topology.compute_device == "cuda":
            nodes, local = topology.num_nodes, topology.local_world_size
            messages_ms = 2 * ((local - 1) * topology.peer_ms + math.log2(nodes) * topology.inter_host_peer_ms)
        if not flat and topology.compute_device == "cuda":
            wire = 2 * (nodes - 1) / nodes * size / local / link
            wire = max(wire, 2 * (local - 1) / local * size / topology.intra_host_bw)
        ms += wire + 2 * wait + messages_ms
    return ms * topology.slowdown, size


def _by_route(back: Array, replicated: Array, share: Array, route: Array | None) -> Array:
    """``[5, n]`` of OUT, BACK, HOP, ACROSS and SCATTER, for one source rank.

    Args:
        back: ``[n]``.
        share: ``[n]`` of each row of the sum that a reduce-scatter makes.
    """
    found = np.zeros((5, len(back)))
    out = back * (1 - replicated)
    if route is None or not route.any():
        found[OUT - OUT], found[BACK - OUT] = out, back
        return found
    direct = (route == DIRECT) | (route == DISTINCT)
    found[OUT - OUT], found[BACK - OUT] = out * direct, back * direct
    found[HOP - OUT] = found[ACROSS - OUT] = out * (route == TWO_HOP)
    found[SCATTER - OUT] = out * share * (route == REDUCE_SCATTER)
    return found
