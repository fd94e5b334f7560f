"""``two_hop``: added inside the node first, then one message to each other node.

::

    2 nodes of 2 ranks, a table's row stripes on ranks 0 and 1, home of the sample: rank 3 = (node 1, place 1)

    hop 1, inside node 0     rank 0 --> rank 1: its partial rows for homes of place 1, on whatever node
                             rank 1 adds its own
    hop 2, places 1          rank 1 --> rank 3: the sum, once

`direct` would have sent two partial rows across nodes. Nodes as ``env.local_world_size`` says; on a single node the
second hop stays on the rank.
"""

from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.input_dist import LookupInput
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.base import BACKWARD, FORWARD, Route, widths_of
from recshard_lab.distributed.step.output_dist.columns import ColumnJoin, Run
from recshard_lab.distributed.step.output_dist.wire import Arriving, Parcel, Wire


class TwoHopRoute(Route):
    """Rank (node, place) sends to its node by place of the home, and onward to that place on every node."""

    name = "two_hop"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        self.local = env.local_world_size
        self.nodes, self.node, self.place = env.world_size // self.local, env.node, env.rank % self.local
        intra, inter = env.node_envs()
        node_columns = [_NodeColumns(self._lanes_on(node)) for node in range(self.nodes)]
        here = node_columns[self.node]
        self.inside_widths = [widths_of(lanes) for lanes in self._lanes_on(self.node)]
        self.node_widths = [columns.widths for columns in node_columns]
        self.inside_join = ColumnJoin(here.runs)
        self.across_join = ColumnJoin(
            Run(node, run.source, layout.blocks[block].start + run.target, run.width)
            for node, columns in enumerate(node_columns)
            for block, run in columns.onward
        )
        self.hop_1 = Wire(intra, f"{FORWARD}/inside", codecs.forward)
        self.hop_2 = Wire(inter, f"{FORWARD}/across", codecs.forward)
        self.back_2 = Wire(inter, f"{BACKWARD}/across", codecs.backward)
        self.back_1 = Wire(intra, f"{BACKWARD}/inside", codecs.backward)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Any:
        own = self.inside_widths[self.place]
        by_place = self._by_place(lookup_input)
        sends = [Parcel(sum(batches), own) for batches in by_place]
        receives = [Parcel(sum(by_place[self.place]), widths) for widths in self.inside_widths]
        arriving = _send(self.hop_1, self._turn(rows, lookup_input, to_places=True).reshape(-1), sends, receives)
        self.buffer_bytes = arriving.buffer_bytes
        return arriving, receives

    def finish(self, begun: Any, out: Tensor, lookup_input: LookupInput) -> None:
        arriving, receives = begun
        parts = _shaped(arriving.wait(), receives)
        mine, batches = self.node_widths[self.node], self._by_place(lookup_input)[self.place]
        summed = out.new_empty(sum(batches), sum(mine))
        self.inside_join.join(parts, summed)
        sends = [Parcel(batch, mine) for batch in batches]
        receives = [Parcel(lookup_input.local_batch.batch_size, widths) for widths in self.node_widths]
        across = _send(self.hop_2, summed.view(-1), sends, receives)
        self.buffer_bytes += across.buffer_bytes
        self.across_join.join(_shaped(across.wait(), receives), out)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Any:
        sends = [Parcel(grad.shape[0], widths) for widths in self.node_widths]
        message = grad.new_empty(sum(parcel.size for parcel in sends))
        self.across_join.take_apart(grad, _shaped(message, sends), scale)
        mine = self.node_widths[self.node]
        receives = [Parcel(batch, mine) for batch in self._by_place(lookup_input)[self.place]]
        arriving = _send(self.back_2, message, sends, receives)
        self.buffer_bytes = arriving.buffer_bytes
        return arriving

    def finish_backward(self, begun: Any, lookup_input: LookupInput) -> Tensor:
        by_place = self._by_place(lookup_input)
        summed = begun.wait().view(sum(by_place[self.place]), sum(self.node_widths[self.node]))
        sends = [Parcel(summed.shape[0], widths) for widths in self.inside_widths]
        message = summed.new_empty(sum(parcel.size for parcel in sends))
        self.inside_join.take_apart(summed, _shaped(message, sends))
        own = self.inside_widths[self.place]
        inside = _send(self.back_1, message, sends, [Parcel(sum(batches), own) for batches in by_place])
        self.buffer_bytes += inside.buffer_bytes
        return self._turn(
            inside.wait().view(-1, self.width) if self.width else summed.new_empty(sum(lookup_input.segments), 0),
            lookup_input,
            to_places=False,
        )

    def _lanes_on(self, node: int) -> list[list[ShardFeature]]:
        return self.lanes[node * self.local : (node + 1) * self.local]

    def _by_place(self, lookup_input: LookupInput) -> list[list[int]]:
        """For each place in a node, the batch of that place's home on every node."""
        return [lookup_input.segments[place :: self.local] for place in range(self.local)]

    def _turn(self, rows: Tensor, lookup_input: LookupInput, to_places: bool) -> Tensor:
        """Rows by node, then place -> by place, then node; or back."""
        if self.nodes == 1 or self.local == 1:
            return rows
        order = [node * self.local + place for place in range(self.local) for node in range(self.nodes)]
        if to_places:
            parts = rows.split(lookup_input.segments)
            return torch.cat([parts[rank] for rank in order])
        parts = rows.split([lookup_input.segments[rank] for rank in order])
        place = {rank: number for number, rank in enumerate(order)}
        return torch.cat([parts[place[rank]] for rank in range(len(order))])


class _NodeColumns:
    """The distinct columns that the lanes of one node cover, side by side.

    Attributes:
        widths: of each run of a block's columns.
        runs: from each lane of each place to the node's columns.
        onward: (block, run) from the node's columns to columns of the block.
    """

    def __init__(self, lanes_of_places: list[list[ShardFeature]]) -> None:
        covered: dict[int, list[tuple[int, int]]] = {}
        for lanes in lanes_of_places:
            for lane in lanes:
                covered.setdefault(lane.block, []).append(lane.shard.cols)
        self.onward: list[tuple[int, Run]] = []
        starts: dict[int, list[tuple[int, int, int]]] = {}  # block -> (first, end, place in the node's columns)
        width = 0
        for block in sorted(covered):
            for first, end in _union(covered[block]):
                self.onward.append((block, Run(0, width, first, end - first)))
                starts.setdefault(block, []).append((first, end, width))
                width += end - first
        self.widths = tuple(run.width for _, run in self.onward)
        self.runs: list[Run] = []
        for place, lanes in enumerate(lanes_of_places):
            source = 0
            for lane in lanes:
                low, high = lane.shard.cols
                first, _, at = next(one for one in starts[lane.block] if one[0] <= low and high <= one[1])
                self.runs.append(Run(place, source, at + low - first, high - low))
                source += high - low


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(set(intervals)):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _send(wire: Wire, flat: Tensor, sends: list[Parcel], receives: list[Parcel]) -> Arriving:
    return wire.send(flat, [[parcel] for parcel in sends], [[parcel] for parcel in receives])


def _shaped(flat: Tensor, parcels: list[Parcel]) -> list[Tensor]:
    parts = flat.split([parcel.size for parcel in parcels])
    return [part.view(parcel.rows, sum(parcel.widths)) for part, parcel in zip(parts, parcels, strict=True)]
