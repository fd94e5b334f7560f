"""``two_hop``: partial rows are added inside the node first, then one message goes to each other node.

::

    2 nodes of 2 ranks, a table's row shards on ranks 0 and 1, local batch of rank 3 = (node 1, place 1)

    hop 1, inside node 0     rank 0 --> rank 1: its partial rows for batches of place 1, on both nodes
                             rank 1 adds its rows
    hop 2, places 1          rank 1 --> rank 3: the sum, once

`direct` would have sent two partial rows across nodes. ``env.local_world_size`` defines the nodes. On a single node
the second hop stays on the rank.

The message across nodes travels while other work runs, in both directions. `begin` and `finish_backward` wait for the
hop inside the node, which is the faster one.
"""

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.base import OutputPath, widths_of
from recshard_lab.distributed.step.output_dist.columns import (
    ColumnMap,
    Ints,
    Memo,
    Run,
    expand,
    to_device,
)
from recshard_lab.distributed.step.output_dist.wire import Arriving, Exchange
from recshard_lab.distributed.step.types import LookupInput


class TwoHopPath(OutputPath):
    """Rank (node, place) sends to each place of its node the rows for that place, and onward to all nodes."""

    name = "two_hop"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        self.local = env.local_world_size
        self.nodes, self.node, self.place = env.world_size // self.local, env.node, env.rank % self.local
        intra, inter = env.node_envs()
        dims = [block.dim for block in layout.blocks]
        node_columns = [_NodeColumns(self._features_on(node), dims) for node in range(self.nodes)]
        inside_widths = [widths_of(features) for features in self._features_on(self.node)]
        self.inside = Exchange([[widths] for widths in inside_widths], intra, codecs, hop="/inside")
        self.across = Exchange([[columns.widths] for columns in node_columns], inter, codecs, hop="/across")
        self.area_widths = [sum(columns.widths) for columns in node_columns]
        self.runs = [
            Run(node, run.source, layout.blocks[block].start + run.target, run.width)
            for node, columns in enumerate(node_columns)
            for block, run in columns.onward
        ]
        runs, widths = node_columns[self.node].runs, [sum(own) for own in inside_widths]
        self.add = ColumnMap(runs, widths, [self.area_widths[self.node]])
        self.spread = ColumnMap([run.reversed() for run in runs], [self.area_widths[self.node]], widths)
        self.split = ColumnMap([run.reversed() for run in self.runs], [layout.output_width], self.area_widths)
        self._memo = Memo[Tensor]()

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        by_place = self._by_place(lookup_input)
        message, batches = self._reorder(rows, lookup_input, to_places=True), by_place[self.place]
        samples = np.full(self.local, batches.sum())
        inside = self.inside.send(message.reshape(-1), by_place.sum(1), samples)
        summed = self.add(inside.wait(), samples, samples[:1])
        across = self.across.send(summed, batches, self.area_rows(lookup_input))
        across.buffer_bytes += inside.buffer_bytes
        return across

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.full(self.nodes, lookup_input.local_batch.batch_size)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        samples = self.area_rows(lookup_input)
        message = self.split(grad.view(-1), samples[:1], samples, scale)
        return self.across.send_back(message, samples, self._by_place(lookup_input)[self.place])

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        by_place = self._by_place(lookup_input)
        rows = np.full(self.local, by_place[self.place].sum())
        message = self.spread(begun.wait(), rows[:1], rows)
        inside = self.inside.send_back(message, rows, by_place.sum(1))
        begun.buffer_bytes += inside.buffer_bytes
        arrived = inside.wait().view(sum(lookup_input.segments), self.width)
        return (self._reorder(arrived, lookup_input, to_places=False),)

    def _features_on(self, node: int) -> list[list[ShardFeature]]:
        return self.features[node * self.local : (node + 1) * self.local]

    def _by_place(self, lookup_input: LookupInput) -> Ints:
        """For each place in a node, the size of that place's batch on every node."""
        return np.array(lookup_input.segments).reshape(self.nodes, self.local).T

    def _reorder(self, rows: Tensor, lookup_input: LookupInput, to_places: bool) -> Tensor:
        """Rows by node, then place -> by place, then node; or back."""
        if self.nodes == 1 or self.local == 1:
            return rows
        key = tuple(lookup_input.segments), to_places, rows.device
        return rows.index_select(0, self._memo.get(key, lambda: self._compute_order(*key)))

    def _compute_order(self, segments: tuple[int, ...], to_places: bool, device: torch.device) -> Tensor:
        sizes = np.array(segments)
        ranks = np.arange(len(segments)).reshape(self.nodes, self.local).T.reshape(-1)
        ones = np.ones_like(sizes)
        order = expand((np.cumsum(sizes) - sizes)[ranks], ones, ones, sizes[ranks])
        return to_device(order if to_places else np.argsort(order), device)


class _NodeColumns:
    """The distinct columns that the shard features of one node cover, side by side.

    Attributes:
        widths: of each run of a block's columns.
        runs: from each shard feature of each place to the node's columns.
        onward: (block, run) from the node's columns to columns of the block.
    """

    def __init__(self, features_of_places: list[list[ShardFeature]], dims: list[int]) -> None:
        stored = [feature for features in features_of_places for feature in features]
        covered = {block: np.zeros(dims[block], dtype=bool) for block in sorted({own.block for own in stored})}
        for feature in stored:
            covered[feature.block][slice(*feature.shard.cols)] = True
        self.onward: list[tuple[int, Run]] = []
        places, width = {}, 0  # of each block's columns among the node's
        for block, columns in covered.items():
            places[block] = width + np.cumsum(columns) - 1
            edges = np.flatnonzero(np.diff(columns, prepend=False, append=False)).tolist()
            for first, end in zip(edges[::2], edges[1::2], strict=True):
                self.onward.append((block, Run(0, width, first, end - first)))
                width += end - first
        self.widths = tuple(run.width for _, run in self.onward)
        self.runs: list[Run] = []
        for place, features in enumerate(features_of_places):
            source = 0
            for feature in features:
                low, high = feature.shard.cols
                self.runs.append(Run(place, source, int(places[feature.block][low]), high - low))
                source += high - low
