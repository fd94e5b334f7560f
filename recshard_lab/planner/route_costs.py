"""What routes cost: milliseconds, buffers and bytes from rank to rank, of ranks that hold given loads.

Bytes are those for one home (see `loads.py`); N nodes of L ranks, W = N L::

    direct          rank r sends OUT[r] to every other rank; home adds what it receives
    reduce_scatter  every rank puts sum(SCATTER) into the sum for every home, W - 1 of them over its link
    two_hop         inside: rank r sends HOP[r] of all N homes of a place to that place, which adds them
                    across: a rank sends its node's ACROSS, summed, to the same place on each other node

Backward takes the same ways back: an all-gather for the reduce-scatter, the two hops in turn. Only `direct` can send
what replicas need, gradients to every rank.
"""

import numpy as np

from recshard_lab.planner.loads import ACROSS, BACK, HOP, LANES, OUT, SCATTER
from recshard_lab.planner.terms import SOME, Switch
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology


class RouteCosts:
    """Costs on one topology; everything but `traffic` works on loads ``[K, ..., W]``."""

    def __init__(self, topology: Topology) -> None:
        top = self.topology = topology
        self.ranks, self.nodes, self.local = top.world_size, top.num_nodes, top.local_world_size
        self.copied = top.slowdown / top.cache_bw
        self.link = top.intra_host_bw if self.nodes == 1 else top.inter_host_bw
        flat = top.intra_host_latency_ms if self.nodes == 1 else top.inter_host_latency_ms
        self.latency_ms = self._latency(flat, self.ranks)
        inside, across = (
            self._latency(top.intra_host_latency_ms, self.local),
            self._latency(top.inter_host_latency_ms, self.nodes),
        )
        self.hops_ms = inside + across
        # the busiest rank's time in an all-to-all, per byte that it sends to each peer
        near, far = (self.local - 1) / top.intra_host_bw, (self.ranks - self.local) / top.inter_host_bw
        self.wire_ms = (max(near, far) if self.nodes > 1 else near) * top.slowdown

    def wire(self, per_peer: Array, total: Array) -> Array:
        """ms of an all-to-all in which rank r exchanges ``per_peer[..., r]`` bytes with each peer, one way."""
        top, ranks, local = self.topology, self.ranks, self.local
        if ranks == 1:
            return np.zeros_like(per_peer)
        if self.nodes == 1:
            return np.asarray(np.maximum((ranks - 1) * per_peer, total - per_peer) * (top.slowdown / top.intra_host_bw))
        node = self.of_node(per_peer)
        inside = np.maximum((local - 1) * per_peer, node - per_peer) / top.intra_host_bw
        across = np.maximum((ranks - local) * per_peer, total - node) / top.inter_host_bw
        return np.asarray(np.maximum(inside, across) * top.slowdown)

    def ms(self, loads: Array, totals: Array, host_ms: float, lanes_ms: Array, backward: bool) -> Array:
        """``[..., W]`` of bringing rows home, or gradients back.

        Args:
            totals: ``[K, ..., 1]``, at least up to SCATTER: the sums of `loads` over the ranks.
            host_ms: of packing and unpacking one exchange.
            lanes_ms: ``[..., 1]`` of its lanes, once a direction whatever the routes.
        """
        way = BACK if backward else OUT
        total, everywhere, summed = totals[way], totals[ACROSS], totals[SCATTER]
        ms = self.wire(loads[way], total) + total * self.copied
        fixed = (total > SOME) * (self.latency_ms + host_ms)
        used = total
        if summed.any():
            slower = 1.0 if backward else self.topology.reduce_scatter_cost
            ms = ms + (self.ranks - 1) * summed * (slower * self.topology.slowdown / self.link) + summed * self.copied
            fixed = fixed + (summed > SOME) * (self.latency_ms + host_ms)
            used = used + summed
        if everywhere.any():
            inside, across = self.of_node(loads[HOP]), self.of_node(loads[ACROSS])
            most = self.nodes * np.maximum((self.local - 1) * loads[HOP], inside - loads[HOP])
            ms = ms + most * (self.topology.slowdown / self.topology.intra_host_bw)
            most = np.maximum((self.nodes - 1) * across, everywhere - across)
            ms = ms + most * (self.topology.slowdown / self.topology.inter_host_bw)
            ms = ms + (self.nodes * inside + everywhere) * self.copied
            fixed = fixed + (everywhere > SOME) * (self.hops_ms + 2 * host_ms)
            used = used + everywhere
        return np.asarray(ms + fixed + (used > SOME) * lanes_ms)

    def add_terms(self, own: Array, node: Array, everyone: Array, phases_of_ways: tuple[int, int]) -> list[Switch]:
        """Adds `ms` and `buffer_bytes` as linear terms (see `terms.py`) and gives what is paid once.

        Args:
            own, node, everyone: ``[Q, K]`` to be added to.
            phases_of_ways: rows of Q of the way home and of the way back.
        """
        top, slow, host = self.topology, self.topology.slowdown, self.topology.host_ms * self.topology.slowdown
        switches = []
        for phase, way, slower in zip(phases_of_ways, (OUT, BACK), (top.reduce_scatter_cost, 1.0), strict=True):
            own[phase, way] = self.wire_ms
            everyone[phase, way] = everyone[phase, ACROSS] = self.copied
            everyone[phase, SCATTER] = (self.ranks - 1) * slower * slow / self.link + self.copied
            own[phase, HOP] = self.nodes * (self.local - 1) * slow / top.intra_host_bw
            node[phase, HOP] = self.nodes * self.copied
            node[phase, ACROSS] = (self.nodes - 1) * slow / top.inter_host_bw
            used = np.zeros_like(everyone)
            used[phase, LANES] = top.lane_ms * slow
            once = ((way, self.latency_ms + host), (SCATTER, self.latency_ms + host), (ACROSS, self.hops_ms + 2 * host))
            ones = [np.where(np.arange(len(own)) == phase, ms, 0.0) for _, ms in once]
            switches += [Switch((load,), fixed) for (load, _), fixed in zip(once, ones, strict=True)]
            switches.append(Switch((way, SCATTER, ACROSS), np.zeros(len(own)), used))
        everyone[-1, BACK] = everyone[-1, ACROSS] = 1.0
        everyone[-1, SCATTER] = self.ranks + 1
        node[-1, HOP] = node[-1, ACROSS] = self.nodes
        return switches

    def buffer_bytes(self, loads: Array) -> Array:
        """``[..., W]`` of what a home's end needs, beside the rows of its own rectangles."""
        needed, _, everywhere, summed = loads[BACK : SCATTER + 1].sum(axis=-1, keepdims=True)
        if summed.any():
            needed = needed + (self.ranks + 1) * summed
        if everywhere.any():
            needed = needed + self.nodes * (self.of_node(loads[HOP]) + self.of_node(loads[ACROSS])) + everywhere
        return np.asarray(needed)

    def traffic(self, loads: Array) -> Array:
        """Bytes ``[W, W]`` of rows and gradients from rank to rank in one step, of loads ``[K, W]``."""
        sent = loads[BACK][None, :] + loads[OUT][:, None] + 2 * loads[SCATTER].sum()
        if loads[HOP].any():
            node, place = np.divmod(np.arange(self.ranks), self.local)
            hop, across = loads[HOP], self.of_node(loads[ACROSS])
            sent = sent + (node[:, None] == node[None, :]) * self.nodes * (hop[:, None] + hop[None, :])
            sent = sent + (place[:, None] == place[None, :]) * (across[:, None] + across[None, :])
        return np.asarray(sent)

    def of_node(self, values: Array) -> Array:
        """``[..., W]`` -> for each rank the sum over its node."""
        by_node = values.reshape(*values.shape[:-1], self.nodes, self.local).sum(axis=-1)
        return np.repeat(by_node, self.local, axis=-1)

    def _latency(self, one: float, members: int) -> float:
        """ms of one collective among so many ranks."""
        return (one + self.topology.peer_ms * (members - 1)) * self.topology.slowdown if members > 1 else 0.0
