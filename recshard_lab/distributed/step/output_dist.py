"""The output exchange: sends looked-up rows to the ranks of their samples, and their gradients back.

A plan chooses an output path for each table (``route=``). Tables with one path share its messages::

    direct           forward   owner: partial rows of every sample --all-to-all--> local batch: added, columns joined
                     backward  local batch: columns of the gradient --all-to-all--> owner
    reduce_scatter   forward   every rank: [W, B, D], zeros where it stores nothing --reduce-scatter--> local batch
                     backward  local batch: [B, D] --all-gather--> every rank
    two_hop          forward   owner --all-to-all in the node--> added --all-to-all across nodes--> local batch
                     backward  the same two hops in reverse order
    distinct_rows    forward   owner: a row of each distinct id --all-to-all--> local batch: pooled
                     backward  local batch: summed gradients of distinct ids --all-to-all--> owner

`direct` sends as many bytes as `reduce_scatter`, and is several times faster on Gloo. `reduce_scatter` lets the network
add, if it can (NVLink SHARP). `two_hop` adds the row shards of a node before it sends them across nodes:
``local_world_size`` times fewer bytes for table_row_wise and grid_shard. `distinct_rows` moves bytes by distinct id,
not by bag and shard: fewer where a shard sees fewer distinct ids than bags.

All give the same result, up to the order of additions. Sequence collections, whose rows are not added, use `direct`.

Pooled rows, rows of a variable batch and rows of sequences share the exchange (`messages.Exchange`): its parcels,
sizes, messages, and the gradients of replicas behind them. They differ in what a parcel is: the rows of all shard
features of a rank, the bags of one, or its ids. What joins the rows that arrive is separate for sequences: pooled rows
are added by column (`ColumnMap`), and rows of ids are placed by id (`Chunks`), whose number changes with every batch.

``messages.py`` has the exchange that the paths share, and `LocalOutput` of one rank; ``columns.py`` what joins rows;
``replicas.py`` the gradients of replicated tables.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.comm import CommOp, QuantizedCommCodecs, Registry, ShardingEnv, codecs_for, issue_reduce_scatter
from recshard_lab.distributed.step.batch import LocalBatch, LookupInput
from recshard_lab.distributed.step.columns import (
    Chunks,
    ColumnMap,
    Indices,
    Ints,
    Means,
    Memo,
    Run,
    Stacked,
    Transposed,
    expand,
    first_ids,
    gather,
    inverse_of,
    starts_of,
    to_device,
)
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.messages import (
    BACKWARD,
    FORWARD,
    Arriving,
    Columns,
    Exchange,
    OutputExchange,
    OutputPath,
    Parcels,
    PendingOutput,
    Target,
    gather_rows,
    runs_of,
    widths_of,
)
from recshard_lab.distributed.step.replicas import Replicas, sum_touched
from recshard_lab.sharding import PlanError
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sparse.ops import complete_cumsum

# ``direct``: one all-to-all of partial rows, added by the rank that receives them.


class DirectPath(OutputPath):
    """Rank k sends ``[B, D_k]`` to the rank of each local batch; of a variable batch, a parcel of each shard feature.

    Replicas send nothing forward. Backward, their gradients go to every rank, behind the columns of the exchanged
    shards (`Replicas`), so that all replicas take the same step.

    Args:
        layout: the wiring.
        env: the ranks.
        codecs: number formats of both directions.
        target: the output. In that of a variable batch, this path serves the shard features of all paths.
    """

    name = "direct"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs, target: Target) -> None:
        features = layout.exchanged_features if target.variable else layout.features_of(self.name)
        super().__init__(layout, env, codecs, features)
        self.target, keep = target, 1 if target.variable else 8
        areas = [[[one] for one in own] if target.variable else [own] for own in features]
        every = [area for own in areas for area in own]
        self.area_widths = [sum(widths_of(area)) for area in every]
        self.runs = [run for number, area in enumerate(every) for run in runs_of(area, number, target.places)]
        self._receivers = np.array([target.places[area[0].block][0] if area else 0 for area in every], dtype=np.int64)
        self.split = ColumnMap([run.reversed() for run in self.runs], target.widths, self.area_widths, keep=keep)
        own = [sum(widths_of(area)) for area in areas[env.rank]]
        self.replicas = Replicas(layout, env.world_size, target, own)
        self.order = Stacked(own, env.world_size, self.replicas.widths)
        parcels = [[widths_of(area) for area in stored] for stored in areas]
        self.exchange = Exchange(parcels, env, codecs, self.replicas.widths)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        if not any(self.area_widths):  # every table is replicated: on all ranks alike
            return Arriving.nothing(rows)
        bags = _bags(lookup_input)
        return self.exchange.send(self.order.by_source(rows, bags), bags, self.area_rows(lookup_input))

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.array(self.target.rows(lookup_input.local_batch))[self._receivers]

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        if not any(self.area_widths) and not self.replicas.features:
            return Arriving.nothing(grad)
        batch, rows, counts = lookup_input.local_batch, self.area_rows(lookup_input), _bags(lookup_input)
        message = self.split(grad.view(-1), self.target.rows(batch), rows, scale)
        sends = self.replicas.sends(batch)
        if sends:
            message = self.exchange.with_tails(message, rows, self.replicas.gradients(grad.view(-1), scale, batch))
            counts = np.hstack([counts, lookup_input.copy_bags])
        return self.exchange.send_back(message, rows, counts, sends)

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        received, bags = begun.wait(), _bags(lookup_input)
        if not self.replicas.features:
            return (self.order.by_kernel(received, bags),)
        own, tails = self.exchange.begins(np.hstack([bags, lookup_input.copy_bags]))
        copies = self.replicas.order.by_kernel(received, lookup_input.copy_bags, tails)
        return self.order.by_kernel(received, bags, own), copies


def _bags(lookup_input: LookupInput) -> Ints:
    """``[W, parcels]``: rows of each parcel for each rank."""
    return np.array(lookup_input.segments)[:, None] if lookup_input.bags is None else lookup_input.bags


# ``reduce_scatter``: the network adds the partial rows of row shards; an all-gather returns their gradients.
#
# Every rank sends ``[W, B, D]``, D the columns of all tables of this path, with zeros for tables that it does not
# store.
# This suits row-wise tables over all ranks, and wastes bytes where few ranks store a table. Batches are padded to the
# largest. Forward adds encoded values: FP16 and BF16 round each partial sum, up to W times, and INT8 raises.
# A table whose rows are not split has nothing to add, so it takes the path ``direct`` (`layout.effective_route`).


class ReduceScatterPath(OutputPath):
    """Adds on the network."""

    name = "reduce_scatter"
    op = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        self._check_codec()
        self.runs = []
        compact: dict[int, tuple[int, int]] = {}  # block -> its first column among those of this path
        self.columns = 0
        for index in sorted({feature.block for features in self.features for feature in features}):
            block = layout.blocks[index]
            compact[index] = 0, self.columns
            self.runs.append(Run(0, self.columns, block.start, block.dim))
            self.columns += block.dim
        self.area_widths = [self.columns]
        parcel = tuple(layout.blocks[index].dim for index in compact)
        self.summed = Parcels([[parcel]], codecs.forward)
        self.own, self.every = (Parcels([[parcel]] * ranks, codecs.backward) for ranks in (1, env.world_size))
        stored = runs_of(self.features[env.rank], 0, compact)
        self.spread = ColumnMap(stored, [self.width], [self.columns])
        self.collect = ColumnMap([run.reversed() for run in stored], [self.columns], [self.width])
        self.split = ColumnMap([run.reversed() for run in self.runs], [layout.output_width], [self.columns])
        self._memo = Memo[Tensor]()

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        codec, segments = self.codecs.forward, lookup_input.segments
        summands = self.spread(rows.reshape(-1), [sum(segments)], [sum(segments)]).view(-1, self.columns)
        if min(segments) < max(segments):
            padded = summands.new_zeros(len(segments) * max(segments), self.columns)
            summands = padded.index_copy_(0, self._places(segments, rows.device), summands)
        message = codec.encode(summands, parts=self.env.world_size)
        held = (message.numel() + message.numel() // self.env.world_size) * message.element_size()
        pending = issue_reduce_scatter(message.view(-1), self.env, f"{FORWARD}/{self.name}")
        return Arriving(pending, self.summed, self.area_rows(lookup_input), rows.dtype, held)

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.array([max(lookup_input.segments)])

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        samples, largest = grad.shape[0], max(lookup_input.segments)
        message = self.split(grad.view(-1), [samples], [samples], scale)
        if samples < largest:
            message = pad(message, (0, (largest - samples) * self.columns))
        return gather_rows(message, self.own, self.every, largest, self.env, f"{BACKWARD}/{self.name}")

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        segments, rows = lookup_input.segments, begun.wait().view(-1, self.columns)
        if min(segments) < max(segments):
            rows = rows.index_select(0, self._places(segments, rows.device))
        return (self.collect(rows.view(-1), [rows.shape[0]], [sum(segments)]).view(sum(segments), self.width),)

    def _places(self, segments: list[int], device: torch.device) -> Tensor:
        key = tuple(segments), device
        return self._memo.get(key, lambda: _places(*key))

    def _check_codec(self) -> None:
        codec = self.codecs.forward
        if not codec.adds_on_wire:
            raise PlanError(
                f"route 'reduce_scatter' adds rows on the way, and rows coded as {codec.comm_type} cannot be added. "
                f"Fix: forward_precision=CommType.FP16, or route 'direct' or 'two_hop'"
            )


def _places(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the rows of each batch stand among batches that are padded to the largest."""
    ones = np.ones(len(segments), dtype=np.int64)
    return to_device(expand(np.arange(len(segments)) * max(segments), ones, ones, np.array(segments)), device)


# ``two_hop``: partial rows are added inside the node first, then one message goes to each other node.
#
# ::
#
#     2 nodes of 2 ranks, a table's row shards on ranks 0 and 1, local batch of rank 3 = (node 1, place 1)
#
#     hop 1, inside node 0     rank 0 --> rank 1: its partial rows for batches of place 1, on both nodes
#                              rank 1 adds its rows
#     hop 2, places 1          rank 1 --> rank 3: the sum, once
#
# `direct` would have sent two partial rows across nodes. ``env.local_world_size`` defines the nodes. On a single node
# the second hop stays on the rank.
#
# The message across nodes travels while other work runs, in both directions. `begin` and `finish_backward` wait for the
# hop inside the node, which is the faster one.


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


# ``distinct_rows``: the row of each distinct id travels once, unpooled, and the source rank pools.
#
# ::
#
#     ids       bags [3 9 3] [3]                 sent to the ranks of the rows: 3, 9
#     forward   rows 3, 9                        bag 0 = 2 x row 3 + row 9, bag 1 = row 3
#     backward  row 3 = 2 x grad 0 + grad 1      row 9 = grad 0
#
# Bytes grow with distinct ids, not with bags and shards.


class DistinctRowsPath(OutputPath):
    """Rows of distinct ids, flat, by rank and shard feature. Pooled, they make an area for each block."""

    name = DISTINCT_ROWS

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        stored = [feature for features in layout.exchanged_features for feature in features]
        self.numbers = np.array([n for n, feature in enumerate(stored) if feature.route == self.name], dtype=np.int64)
        self.first, features = layout.pooled_counts[env.rank], [stored[n] for n in self.numbers]
        dims = [block.dim for block in layout.blocks]
        self.blocks = sorted({feature.block for feature in features})
        self.has_replicas = not layout.partly_replicated.isdisjoint(self.blocks)
        self.area_widths = [dims[block] for block in self.blocks]
        self.runs = [Run(n, 0, layout.blocks[b].start, dims[b]) for n, b in enumerate(self.blocks)]
        self.chunks = Chunks(features, dims)
        self.block_starts = np.array([block.start for block in layout.blocks], dtype=np.int64) // self.chunks.size
        self.strides = np.full(len(dims), layout.output_width // self.chunks.size)
        self.turned = Transposed(widths_of(self.features[env.rank]), env.world_size)
        self.exchange = Exchange([[(width,) for width in widths_of(own)] for own in self.features], env, codecs)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        counts = self._counts(lookup_input)
        message = self.turned.by_source(rows.reshape(-1), counts)
        arriving = self.exchange.send(message, counts, self._sent(lookup_input.local_batch))
        arriving.kept = self._bags_of_rows(lookup_input.local_batch)  # computed while the rows travel
        return arriving

    def finish(self, begun: Arriving, lookup_input: LookupInput) -> Tensor:
        received, batch = begun.wait(), lookup_input.local_batch
        if not received.numel():
            return received.new_zeros(batch.batch_size * sum(self.area_widths))
        if self.has_replicas:  # their ids read a chunk of zeros
            received = pad(received, (0, self.chunks.size))
        return gather(received, self.chunks.size, begun.kept)

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.full(len(self.blocks), lookup_input.local_batch.batch_size)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        batch, sent = lookup_input.local_batch, self._sent(lookup_input.local_batch)
        assert batch.places is not None
        assert batch.num_places is not None
        bag_of_id = torch.arange(batch.batch_size, device=grad.device).repeat(len(self.blocks))
        total = sum(batch.counts[block] for block in self.blocks)
        bag_of_id = torch.repeat_interleave(bag_of_id, self._lengths(batch), output_size=total)
        shifts = (self._first_ids(batch) - first_ids(batch))[self.chunks.blocks]
        sizes, shift = to_device(np.stack([batch.num_places, shifts]), grad.device)
        place = batch.places + torch.repeat_interleave(shift, sizes, output_size=len(batch.places))
        index = self.chunks.of(bag_of_id[place], self.block_starts, self.strides, sent, batch)
        message = gather(grad.reshape(-1), self.chunks.size, index).mul_(scale)
        return self.exchange.send_back(message, sent, self._counts(lookup_input))

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        """Flat, by shard feature of this rank."""
        return (self.turned.by_kernel(begun.wait(), self._counts(lookup_input)),)

    def _counts(self, lookup_input: LookupInput) -> Ints:
        """``[W, shard features here]`` rows for each rank."""
        return lookup_input.counts[self.first : self.first + self.turned.features].T

    def _sent(self, batch: LocalBatch) -> Ints:
        """Rows of each shard feature, rank after rank."""
        return batch.sent[self.numbers]

    def _lengths(self, batch: LocalBatch) -> Tensor:
        """``[blocks * B]`` ids of each bag."""
        return torch.cat([batch.remaining[block] for block in self.blocks]).long()

    def _first_ids(self, batch: LocalBatch) -> Ints:
        """For each block, its first id among those of all blocks of this path."""
        found, counts = np.zeros(len(batch.counts), np.int64), np.array(batch.counts)[self.blocks]
        found[self.blocks] = np.cumsum(counts) - counts
        return found

    def _bags_of_rows(self, batch: LocalBatch) -> Indices:
        """For each chunk of a bag, block after block, the chunks that arrived and are added."""
        assert batch.places is not None
        chunks, lengths = self.chunks.of_blocks, self._lengths(batch)
        counts = np.array(batch.counts)[self.blocks]
        first = np.zeros(len(chunks), np.int64)  # chunk of each block's first id, ids one after the other
        first[self.blocks] = starts_of(counts, chunks[self.blocks])
        place = self.chunks.of(batch.places, first - first_ids(batch) * chunks, chunks, self._sent(batch), batch)
        order, starts = inverse_of(place, int(counts @ chunks[self.blocks])), complete_cumsum(lengths)[:-1]
        if (chunks[self.blocks] == 1).all():
            return Indices(order, starts, None)
        shift = (first - self._first_ids(batch) * chunks)[self.blocks]
        table = to_device(np.stack([shift, chunks[self.blocks]]).repeat(batch.batch_size, 1), order.device)
        row = torch.repeat_interleave(table[1], output_size=batch.batch_size * int(chunks[self.blocks].sum()))
        within = torch.arange(len(row), device=order.device) - (table[1].cumsum(0) - table[1])[row]
        starts, sizes, stride = (starts * table[1] + table[0])[row] + within, lengths[row], table[1][row]
        bags = complete_cumsum(sizes)[:-1]
        bag = torch.repeat_interleave(sizes, output_size=len(order))
        index = starts[bag] + (torch.arange(len(order), device=order.device) - bags[bag]) * stride[bag]
        return Indices(order[index], bags, None)


# Pooled rows: tables that take one output path share its messages, and one kernel joins what arrived on all paths.
#
# Of a variable batch only real bags travel. A kernel takes equally many bags of every shard feature, so empty bags
# follow
# up to the longest one's; these stay on the rank (`Stacked`).
#
# Shape letters: B samples, T rows of a kernel.


PATHS: dict[str, type[OutputPath]] = {
    path.name: path for path in (DirectPath, ReduceScatterPath, TwoHopPath, DistinctRowsPath)
}


class PooledOutput(OutputExchange):
    """Sends the rows of exchanged kernels by each table's output path, and joins them with the replicas' rows.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
        variable: whether every feature of a batch has its own number of bags (VBE). Then all tables take the path
            "direct", with equal results, and the output is flat, block after block.
    """

    def __init__(
        self, layout: Layout, env: ShardingEnv, registry: Registry | None = None, variable: bool = False
    ) -> None:
        self.layout, self.target = layout, Target(layout, variable)
        self.direct = DirectPath(layout, env, codecs_for(DirectPath.op, registry), self.target)
        others = [] if variable else [PATHS[name] for name in layout.routes if name != "direct"]
        self.paths: list[OutputPath] = [
            self.direct,
            *(path(layout, env, codecs_for(path.op, registry)) for path in others),
        ]
        #: of each path, the number of this rank's kernels, which stand side by side in the order of the paths
        self.kernels = [len(list(groupby(path.features[env.rank], lambda own: own.group))) for path in self.paths]
        self.means = Means(layout)
        runs: list[Run] = []
        widths: list[int] = []
        for path in self.paths:
            runs += [replace(run, sender=len(widths) + run.sender) for run in path.runs]
            widths += path.area_widths
        keep, kernels = 1 if variable else 8, list[list[ShardFeature]]()
        self.join = ColumnMap(runs, widths, self.target.widths, keep=keep)
        self.exchanges = any(widths)
        replicated = [feature for feature in layout.rank_features[env.rank] if feature.replicated]
        for _, group in groupby(replicated, key=lambda feature: feature.group):  # groups may differ between ranks
            kernels.append(list(group))
        runs = [run for number, features in enumerate(kernels) for run in runs_of(features, number, self.target.places)]
        widths = [sum(widths_of(features)) for features in kernels]
        blocks = [feature.block for feature in layout.replicated_features]
        #: whether replicas can be added in place: each chunk once, so that the order of additions is fixed
        self.adds_chunks = len(set(blocks)) == len(blocks) and not variable
        self.copy = ColumnMap(runs, widths, self.target.widths, keep=keep)
        self.split = ColumnMap([run.reversed() for run in runs], self.target.widths, widths)

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        dtype, left = self.layout.rows_dtype, list(exchanged)
        begun = []
        for path, kernels in zip(self.paths, self.kernels, strict=True):
            rows = [left.pop(0).to(dtype) for _ in range(kernels)]
            if not rows:
                rows = [torch.empty(sum(lookup_input.segments), 0, dtype=dtype, device=lookup_input.ids.device)]
            begun.append(path.begin(rows[0] if len(rows) == 1 else torch.cat(rows, -1), lookup_input))
        return PendingOutput(lookup_input, (begun, [rows.to(dtype) for rows in replicated]))

    def finish(self, pending: PendingOutput) -> Tensor:
        """``[B, output width]``; the rows of a variable batch's bags, flat, block after block."""
        lookup_input, (begun, replicated) = pending.lookup_input, pending.state
        local_batch = lookup_input.local_batch
        samples = self.target.rows(local_batch)
        parts = [path.finish(own, lookup_input) for path, own in zip(self.paths, begun, strict=True)]
        copies = _end_to_end([part.reshape(-1) for part in replicated], parts[0])
        out = None
        if self.exchanges or not copies.numel():
            rows = [path.area_rows(lookup_input) for path in self.paths]
            out = self.join(_end_to_end(parts, parts[0]), rows[0] if len(rows) == 1 else np.concatenate(rows), samples)
        if copies.numel() and out is not None and self.adds_chunks:
            places = self.split.indices(samples, samples * len(replicated), copies).chunks
            out.view(-1, self.split.chunk).index_add_(0, places, copies.view(-1, self.split.chunk))
        elif copies.numel():
            copied = self.copy(copies, [part.shape[0] for part in replicated], samples)
            out = copied if out is None else out + copied
        assert out is not None
        pending.buffer_bytes = sum(own.buffer_bytes for own in begun)
        out = out if self.target.variable else out.view(*samples, *self.target.widths)
        return self.means.divide(out, local_batch)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        grad = self.means.divide(grad.contiguous(), lookup_input.local_batch)
        return PendingOutput(lookup_input, [path.begin_backward(grad, scale, lookup_input) for path in self.paths])

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """``[T, width]`` of each kernel; in a variable batch, zeros in empty bags."""
        pairs = zip(self.paths, pending.state, strict=True)
        found = [path.finish_backward(begun, pending.lookup_input) for path, begun in pairs]
        pending.buffer_bytes = sum(begun.buffer_bytes for begun in pending.state)
        return Columns([own[0] for own in found] + [copies for own in found for copies in own[1:]])


def _end_to_end(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    """Flat tensors as one; no copy of a single one."""
    parts = [part for part in parts if part.numel()] or [empty.new_empty(0)]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# Rows of sequence collections: every id's row travels to the place in the batch where the id stood.
#
# Nothing is added in forward, so `direct` is the only output path. With ``use_index_dedup``, ids that are equal share
# one
# row: it travels once, is copied to each of their places, and their gradients are added before they travel. One kernel
# orders a message, and one puts what arrived in place::
#
#     kernels here    feature 0: source 0, source 1 | feature 1: source 0, source 1       by shard feature
#     on the wire     source 0: feature 0, feature 1 | source 1: feature 0, feature 1     by rank
#     output          block after block, each [n, D]


class SequenceOutput(OutputExchange):
    """The output is flat: for each block its ``[n, D]`` rows, one block after the other.

    Raises:
        PlanError: a table's route is not "direct".
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout, self.env = layout, env
        codecs = codecs_for(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, registry)
        for table, route in zip(layout.tables, layout.table_routes, strict=True):
            if route != "direct":
                raise PlanError(
                    f"route {route!r} of table {table.name!r} does not apply: the table belongs to a sequence "
                    f"collection, whose rows are not added. Fix: route='direct' for this table"
                )
        self.features, self.replicated = layout.exchanged_features, layout.replicated_features
        parcels = [[(width,) for width in widths_of(own)] for own in self.features]
        self.exchange = Exchange(parcels, env, codecs, widths_of(self.replicated))
        self.pack = Transposed(widths_of(self.features[env.rank]), env.world_size)
        self.unpack = Transposed(widths_of(layout.rank_features[env.rank]), env.world_size)
        features = [feature for stored in self.features for feature in stored]
        self.dims = [block.dim for block in layout.blocks]
        self.chunks = Chunks([*features, *self.replicated], self.dims)

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        empty = lookup_input.ids.new_empty(0, dtype=self.layout.rows_dtype)
        rows = torch.cat(list(exchanged)).to(empty.dtype) if exchanged else empty
        counts = lookup_input.counts[: self.pack.features].T
        arriving = self.exchange.send(self.pack.by_source(rows, counts), counts, lookup_input.local_batch.sent)
        places = self._places(lookup_input.local_batch)  # while the rows travel
        order = inverse_of(places, len(places.chunks))
        copies = [rows.to(empty.dtype) for rows in replicated]
        return PendingOutput(lookup_input, (arriving, copies, order), arriving.buffer_bytes)

    def finish(self, pending: PendingOutput) -> Tensor:
        """Flat: for each block its ``[n, D]`` rows, one block after the other."""
        arriving, copies, order = pending.state
        received = arriving.wait()
        flat = torch.cat([received, *copies]) if copies else received
        return flat.view(-1, self.chunks.size).index_select(0, order).view(-1)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        local_batch, sends = lookup_input.local_batch, lookup_input.local_batch.sent
        grad = (grad * scale if scale != 1.0 else grad).contiguous().view(-1)
        message = gather(grad, self.chunks.size, self._places(local_batch))
        sent = list[int]()
        if self.replicated:
            rows, touched, own = _copied(local_batch), local_batch.touched, sum(self.exchange.received.sizes(sends))
            tail = sum_touched(message[own:], rows, widths_of(self.replicated), touched)
            message = self.exchange.with_tails(message[:own], sends, tail)
            sent = [n if touch is None else touch.rows.numel() for n, touch in zip(rows, touched, strict=True)]
            del tail
        arriving = self.exchange.send_back(message, sends, lookup_input.counts.T, sent)
        return PendingOutput(lookup_input, arriving, arriving.buffer_bytes)

    def _places(self, local_batch: LocalBatch) -> Indices:
        """For each chunk that arrives, its chunks in the output: one, or a bag of them."""
        place = local_batch.places
        assert place is not None
        rows = np.concatenate([local_batch.sent, _copied(local_batch)])
        starts = starts_of(local_batch.counts, self.dims) // self.chunks.size
        starts = starts - first_ids(local_batch) * self.chunks.of_blocks
        return self.chunks.of(place, starts, self.chunks.of_blocks, rows, local_batch)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """Flat, by shard feature of this rank, exchanged and replicated."""
        return Columns([self.unpack.by_kernel(pending.state.wait(), pending.lookup_input.counts.T)])


def _copied(local_batch: LocalBatch) -> list[int]:
    """Ids of each replicated shard feature."""
    return [end - start for _, start, end in (replica.ids for replica in local_batch.replicas)]
