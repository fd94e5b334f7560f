"""Costs of the output paths (`route`): milliseconds, buffers, and bytes from rank to rank.

Bytes are those for one source rank (see `loads.py`), with N nodes of L ranks and W = N L::

    direct          rank r sends OUT[r] to every other rank, and the source rank adds what it receives
    reduce_scatter  every rank contributes sum(SCATTER) for every source rank, W - 1 of them over its link
    two_hop         inside: rank r sends HOP[r] for the N source ranks with one local rank to that local rank, which
                    adds them
                    across: a rank sends its node's summed ACROSS to the same local rank of each other node

Backward reverses each path: an all-gather for the reduce-scatter, the two hops in opposite order. Replicas need
gradients on every rank, which only `direct` sends. `coded` applies a codec to any load: every hop encodes each shard's
columns separately, row by row.
"""

from collections.abc import Mapping

import numpy as np

from recshard_lab.planner.model.codecs import WIRE_FORMATS, WireFormat
from recshard_lab.planner.model.loads import ACROSS, BACK, CODED_ROWS, HOP, OUT, PLAIN, SCATTER, SHARD_FEATURES
from recshard_lab.planner.model.terms import SOME, Switch
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology


class RouteCosts:
    """Costs on one topology; everything but `traffic` works on loads ``[K, ..., W]``.

    Args:
        codecs: formats of rows and of gradients.
    """

    def __init__(self, topology: Topology, codecs: tuple[str, str] = ("fp32", "fp32")) -> None:
        top = self.topology = topology
        self.codecs = codecs
        self.forward, self.backward = (WIRE_FORMATS[name] for name in codecs)
        self.adds_to_rows = any(one.row_bytes for one in (self.forward, self.backward))
        coded = [one for one in (self.forward, self.backward) if one.encode_passes]
        self.widest: WireFormat | None = max(coded, key=lambda one: one.ratio, default=None)  # the larger buffers
        self.ranks, self.nodes, self.local = top.world_size, top.num_nodes, top.local_world_size
        self.copied = top.slowdown / top.cache_bw
        self.link = top.intra_host_bw if self.nodes == 1 else top.inter_host_bw
        flat = top.intra_host_latency_ms if self.nodes == 1 else top.inter_host_latency_ms
        self.latency_ms = self._latency(flat, self.local, self.ranks - self.local)
        self.hops_ms = self._latency(top.intra_host_latency_ms, self.local)
        self.hops_ms += self._latency(top.inter_host_latency_ms, 1, self.nodes - 1)
        # the busiest rank's time in an all-to-all, per byte that it sends to each peer
        near, far = (self.local - 1) / top.intra_host_bw, (self.ranks - self.local) / top.inter_host_bw
        self.wire_ms = max(near, far) if self.nodes > 1 else near
        self.shared_wire_ms = self.wire_ms * (top.slowdown - 1) / self.ranks  # per byte of any rank, see `LookupCosts`
        self.half = top.half_duplex if self.nodes == 1 and self.ranks > 1 else 0.0
        if self.half:  # sent and received, halved: (W - 1) x of the rank's own and x of every other
            self.wire_ms += self.half * ((self.ranks - 2) / 2 / top.intra_host_bw - self.wire_ms)
            self.shared_wire_ms += self.half / 2 / top.intra_host_bw

    def wire(self, per_peer: Array, total: Array) -> Array:
        """ms of an all-to-all in which rank r exchanges ``per_peer[..., r]`` bytes with each peer, one way."""
        top, ranks, local = self.topology, self.ranks, self.local
        if ranks == 1:
            return np.zeros_like(per_peer)
        others = total * self.shared_wire_ms
        if self.nodes == 1:
            busier = np.maximum((ranks - 1) * per_peer, total - per_peer) * (1 - self.half)
            return np.asarray((busier + self.half * (ranks - 2) / 2 * per_peer) / top.intra_host_bw + others)
        node = self.of_node(per_peer)
        inside = np.maximum((local - 1) * per_peer, node - per_peer) / top.intra_host_bw
        across = np.maximum((ranks - local) * per_peer, total - node) / top.inter_host_bw
        return np.asarray(np.maximum(inside, across) + others)

    def ms(self, loads: Array, totals: Array, once: Mapping[str, Array], features_ms: Array, backward: bool) -> Array:
        """``[..., W]`` ms of the output exchange, or of the gradients' exchange.

        Args:
            totals: ``[K, ..., 1]``, at least up to SCATTER: the sums of `loads` over the ranks.
            once: of `CostModel.once`.
            features_ms: ``[..., 1]`` of its shard features, once per direction on every path.
        """
        codec = self.backward if backward else self.forward
        way = BACK if backward else OUT
        direct_ms, hops_ms = self._once(once, 4 if backward else 2)
        sent, arrived = self.coded(loads, codec), self.coded(totals, codec)
        total, everywhere, summed = (arrived[load - OUT] for load in (way, ACROSS, SCATTER))
        ms = self.wire(sent[way - OUT], total) + total * self.copied
        if codec.encode_passes:
            ms = ms + self._coding(loads, totals, way, *self._passes(codec, backward))
        fixed = (total > SOME) * direct_ms
        used = total
        if summed.any():
            slower = 1.0 if backward else self.topology.reduce_scatter_cost
            ms = ms + (self.ranks - 1) * summed * (slower * self.topology.slowdown / self.link) + summed * self.copied
            fixed = fixed + (summed > SOME) * direct_ms
            used = used + summed
        if everywhere.any():
            hop = sent[HOP - OUT]
            inside, across = self.of_node(hop), self.of_node(sent[ACROSS - OUT])
            most = self.nodes * np.maximum((self.local - 1) * hop, inside - hop)
            ms = ms + most * (self.topology.slowdown / self.topology.intra_host_bw)
            most = np.maximum((self.nodes - 1) * across, everywhere - across)
            ms = ms + most * (self.topology.slowdown / self.topology.inter_host_bw)
            ms = ms + (self.nodes * inside + everywhere) * self.copied
            fixed = fixed + (everywhere > SOME) * hops_ms
            used = used + everywhere
        return np.asarray(ms + fixed + (used > SOME) * features_ms)

    def add_terms(self, own: Array, node: Array, everyone: Array, once: Mapping[str, Array]) -> list[Switch]:
        """Adds `ms` and `buffer_bytes` as linear terms (see `terms.py`) and gives what is paid once.

        Args:
            own, node, everyone: ``[Q, K]`` to be added to.
            once: of `CostModel.once`.
        """
        top, slow = self.topology, self.topology.slowdown
        switches = []
        slower_by = (top.reduce_scatter_cost, 1.0)
        for phase, way, slower, codec in zip(
            (2, 4), (OUT, BACK), slower_by, (self.forward, self.backward), strict=True
        ):
            own[phase, way] = self.wire_ms
            everyone[phase, way] = self.copied + self.shared_wire_ms
            everyone[phase, ACROSS] = self.copied
            everyone[phase, SCATTER] = (self.ranks - 1) * slower * slow / self.link + self.copied
            own[phase, HOP] = self.nodes * (self.local - 1) * slow / top.intra_host_bw
            node[phase, HOP] = self.nodes * self.copied
            node[phase, ACROSS] = (self.nodes - 1) * slow / top.inter_host_bw
            for costs in (own, node, everyone):
                costs[phase, CODED_ROWS] = codec.row_bytes * costs[phase, PLAIN]
                costs[phase, PLAIN] *= codec.ratio
            holder, source = self._passes(codec, backward=way == BACK)
            own[phase, way] += self.ranks * holder
            own[phase, HOP] += self.ranks * holder
            node[phase, HOP] += self.nodes * source
            node[phase, ACROSS] += self.nodes * holder
            everyone[phase, way] += source
            everyone[phase, ACROSS] += source
            everyone[phase, SCATTER] += self.ranks * holder + source
            used = np.zeros_like(everyone)
            used[phase, SHARD_FEATURES] = top.shard_feature_ms * slow
            direct_ms, hops_ms = self._once(once, phase)
            paid = ((way, direct_ms), (SCATTER, direct_ms), (ACROSS, hops_ms))
            ones = [np.where(np.arange(len(own)) == phase, ms, 0.0) for _, ms in paid]
            switches += [Switch((load,), fixed) for (load, _), fixed in zip(paid, ones, strict=True)]
            switches.append(Switch((way, SCATTER, ACROSS), np.zeros(len(own)), used))
        everyone[-1, BACK] = everyone[-1, ACROSS] = 1.0
        everyone[-1, SCATTER] = self.ranks + 1
        node[-1, HOP] = node[-1, ACROSS] = self.nodes
        if self.widest is not None:
            for costs in (node, everyone):
                costs[-1, CODED_ROWS] = self.widest.row_bytes * costs[-1, PLAIN]
                costs[-1, PLAIN] *= 1 + self.widest.ratio
        return switches

    def buffer_bytes(self, loads: Array) -> Array:
        """``[..., W]`` bytes that a source rank's side of the exchange needs, with encoded copies."""
        plain = loads[PLAIN]
        held = plain if self.widest is None else plain + self.coded(loads, self.widest)
        needed, _, everywhere, summed = held[BACK - OUT :].sum(axis=-1, keepdims=True)
        if summed.any():
            needed = needed + (self.ranks + 1) * summed
        if everywhere.any():
            needed = needed + self.nodes * (self.of_node(held[HOP - OUT]) + self.of_node(held[ACROSS - OUT]))
            needed = needed + everywhere
        return np.asarray(needed)

    def coded(self, loads: Array, codec: WireFormat) -> Array:
        """Bytes ``[5, ..., W]`` on the wire of OUT, BACK, HOP, ACROSS and SCATTER of loads ``[K, ..., W]``."""
        if not codec.encode_passes:
            return loads[PLAIN]
        return codec.ratio * loads[PLAIN] + codec.row_bytes * loads[CODED_ROWS]

    def _passes(self, codec: WireFormat, backward: bool) -> tuple[float, float]:
        """ms per fp32 byte on the shard's rank, and on the source rank."""
        encode, decode = codec.encode_passes * self.copied, codec.decode_passes * self.copied
        return (decode, encode) if backward else (encode, decode)

    def _coding(self, loads: Array, totals: Array, way: int, holder: float, source: float) -> Array:
        """``[..., W]`` ms of encoding and decoding; two hops do both twice."""
        ms = self.ranks * holder * (loads[way] + loads[HOP]) + source * (totals[way] + totals[ACROSS])
        ms = ms + (self.ranks * holder + source) * totals[SCATTER]
        if totals[ACROSS].any():
            ms = ms + self.nodes * (source * self.of_node(loads[HOP]) + holder * self.of_node(loads[ACROSS]))
        return np.asarray(ms)

    def traffic(self, loads: Array) -> dict[str, Array]:
        """Bytes ``[W, W]`` of rows and gradients from rank to rank in one step, of loads ``[K, W]``.

        Keys are the labels of the executor's collectives in a trace. Unused paths have none.
        """
        there, back = self.coded(loads, self.forward), self.coded(loads, self.backward)
        found: dict[str, Array] = {}
        everyone = np.ones((self.ranks, self.ranks))
        for label, way, codec in (("output_dist/rows", OUT, there), ("output_dist_backward/rows", BACK, back)):
            forward = way == OUT
            sent = codec[way - OUT]
            if sent.any():
                found[label] = everyone * (sent[:, None] if forward else sent[None, :])
            if (summed := codec[SCATTER - OUT].sum()) > 0:
                found[f"{label}/reduce_scatter"] = everyone * summed
            if not codec[HOP - OUT].any():
                continue
            node, place = np.divmod(np.arange(self.ranks), self.local)
            inside, across = codec[HOP - OUT], self.of_node(codec[ACROSS - OUT])
            same_node, same_place = node[:, None] == node[None, :], place[:, None] == place[None, :]
            hops = {
                "inside": same_node * self.nodes * (inside[:, None] if forward else inside[None, :]),
                "across": same_place * (across[:, None] if forward else across[None, :]),
            }
            found |= {f"{label}/{hop}": hops[hop] for hop in (hops if forward else reversed(hops))}
        return found

    def of_node(self, values: Array) -> Array:
        """``[..., W]`` -> for each rank the sum over its node."""
        by_node = values.reshape(*values.shape[:-1], self.nodes, self.local).sum(axis=-1)
        return np.repeat(by_node, self.local, axis=-1)

    def _latency(self, one: float, near: int, far: int = 0) -> float:
        """ms of a collective of no bytes among ``near`` ranks of one host, and ``far`` ranks of others."""
        top = self.topology
        each = one + top.peer_ms * (near - 1) + top.inter_host_peer_ms * far
        return each * top.slowdown if near + far > 1 else 0.0

    def _once(self, once: Mapping[str, Array], phase: int) -> tuple[float, float]:
        """ms that a phase takes once for a direct exchange or a sum on the way, and for two hops."""
        codec = self.codecs[phase == 4]
        coding = float(once[codec][phase]) if codec in once else 0.0
        packing = float(once["table_wise"][phase]) + coding
        return self.latency_ms + packing, self.hops_ms + packing + coding + float(once["two_hop"][phase])
