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

``messages.py`` has the exchange that the paths share; ``columns.py`` what joins rows; ``replicas.py`` the gradients of
replicated tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.comm import (
    CommOp,
    QuantizedCommCodecs,
    Registry,
    ShardingEnv,
    codecs_for,
    issue_all_gather,
    issue_reduce_scatter,
)
from recshard_lab.distributed.step.batch import LocalBatch, LookupInput
from recshard_lab.distributed.step.columns import (
    Chunks,
    ColumnMap,
    Indices,
    Ints,
    Last,
    Means,
    Run,
    Stacked,
    Target,
    Transposed,
    expand,
    first_ids,
    gather,
    inverse_of,
    runs_of,
    starts_of,
    to_device,
    widths_of,
)
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.messages import BACKWARD, FORWARD, Exchange, Message, MessageLayout
from recshard_lab.distributed.step.program import Call, Calls, Signature, Step
from recshard_lab.distributed.step.replicas import Replicas, sum_touched
from recshard_lab.sharding import PlanError
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sparse.ops import complete_cumsum


class OutputPath(ABC):
    """Brings the pooled rows of the shards that take one path to the ranks of their samples, as flat areas.

    Attributes:
        features: for each rank, the shard features that take this path.
        width: columns of this rank's shard features.
        kernels: which of this rank's kernels they are.
        area_widths: columns of each area that arrives.
        runs: from the areas to the columns of the output.
        scale: of gradients: ranks average them, as DistributedDataParallel does.
    """

    name: ClassVar[str]
    op: ClassVar[CommOp] = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    """The kind of message whose codecs this path uses."""
    area_widths: list[int]
    runs: list[Run]

    def __init__(
        self,
        layout: Layout,
        env: ShardingEnv,
        codecs: QuantizedCommCodecs,
        like: Tensor,
        features: list[list[ShardFeature]] | None = None,
    ) -> None:
        self.layout, self.env, self.codecs, self.like, self.device = layout, env, codecs, like, like.device
        self.features = features or layout.features_of(self.name)
        self.width = sum(widths_of(self.features[env.rank]))
        self.kernels, self.scale = slice(0), 1.0 / env.world_size  # `PooledOutput` sets the slice

    @abstractmethod
    def calls(self, signature: Signature) -> Calls:
        """What this path does for such batches.

        "give" sends this rank's partial rows, which are ordered by source rank. "split" sends this path's columns of
        the output's gradient, times `scale`. "update" appends ``[T, width]`` to ``step.grads``.
        """

    @abstractmethod
    def area_rows(self, signature: Signature) -> Ints:
        """Rows of each area; the first B of them are samples."""

    def areas(self, received: Tensor, step: Step) -> Tensor:
        """The areas for the local batch, flat, of the rows that arrived."""
        return received

    def rows(self, step: Step) -> Tensor:
        """``[T, width]``: those of this rank's kernels side by side."""
        parts = step.rows[self.kernels]  # [T, d] of each kernel
        if not parts:
            return self.like.new_empty(sum(step.lookup_input.segments), 0)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self.like.dtype)


def _send(name: str, key: str, message: Message | Callable[[Step], Message], rows: Callable[[Step], Tensor]) -> Call:
    """Sends rows, flat; ``step.arrived(key)`` waits for them. ``message`` depends on the step where sizes do."""
    if isinstance(message, Message):
        known = message
        return Call(name, lambda step: step.send(key, known, rows(step)), lambda _: known.drain())
    of = message
    return Call(name, lambda step: step.send(key, of(step), rows(step)), lambda step: of(step).drain())


def _receive(key: str, like: Tensor, unpack: Callable[[Tensor], Tensor]) -> Call:
    """Waits for gradients of rows."""
    return Call("receive", lambda step: step.grads.append(unpack(step.arrived(key, like))))


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

    def __init__(
        self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs, like: Tensor, target: Target
    ) -> None:
        # in a variable batch, features of one rank have different numbers of rows: each is an area
        features = layout.exchanged_features if target.variable else layout.features_of(self.name)
        super().__init__(layout, env, codecs, like, features)
        areas = [[[one] for one in own] if target.variable else [own] for own in features]
        every = [area for own in areas for area in own]
        self.target, self.area_widths = target, [sum(widths_of(area)) for area in every]
        self.runs = [run for number, area in enumerate(every) for run in runs_of(area, number, target.places)]
        # the output area whose number of rows each area has
        self._receivers = np.array([target.places[area[0].block][0] if area else 0 for area in every], dtype=np.int64)
        self.split = ColumnMap([run.reversed() for run in self.runs], target.widths, self.area_widths)
        own = [sum(widths_of(area)) for area in areas[env.rank]]
        self.replicas = Replicas(layout, env.world_size, target, own)
        self.order = Stacked(own, env.world_size, self.replicas.widths)
        parcels = [[widths_of(area) for area in stored] for stored in areas]
        self.exchange = Exchange(parcels, env, codecs, like, self.replicas.widths)

    def area_rows(self, signature: Signature) -> Ints:
        return np.array(signature.rows)[self._receivers]

    def calls(self, signature: Signature) -> Calls:
        variable = signature.bags is not None
        bags = np.array(signature.bags if variable else [[n] for n in signature.segments], dtype=np.int64)
        rows, give = self.area_rows(signature), []
        if any(self.area_widths):  # not if every table is replicated, on all ranks alike
            pack = self.order.by_source(bags, self.device)
            message = self.exchange.forward(bags, rows)
            give.append(_send("give direct", self.name, message, lambda step: pack(self.rows(step))))
        columns = self.split.bind(signature.rows, rows, self.device, self.scale, self.like.dtype)
        if self.replicas.features:
            return {"give": give} | self._with_replicas(signature, bags, rows, columns)
        back, unpack = self.exchange.backward(rows, bags), self.order.by_kernel(bags, self.device)
        split = _send("split direct", self.name, back, lambda step: columns(step.grad.view(-1)))
        return {"give": give, "split": [split], "update": [_receive(self.name, self.like, unpack)]}

    def _with_replicas(
        self, signature: Signature, bags: Ints, rows: Ints, columns: Callable[[Tensor], Tensor]
    ) -> dict[str, list[Call]]:
        """Backward. Replicas may send distinct rows, whose number is known only by step."""
        copies = self.replicas.bind(signature.rows, self.device, self.scale, self.like.dtype)

        def message(step: Step) -> Message:
            counts, batch = np.hstack([bags, step.lookup_input.copy_bags]), step.lookup_input.local_batch
            return self.exchange.backward(rows, counts, self.replicas.sends(signature.rows, batch))

        def gradients(step: Step) -> Tensor:
            grad = step.grad.view(-1)
            return self.exchange.with_tails(columns(grad), rows, copies(grad, step.lookup_input.local_batch))

        def orders_of(copy_bags: Ints) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
            own, tails = self.exchange.begins(np.hstack([bags, copy_bags]))
            order = self.replicas.order.by_kernel(copy_bags, self.device, tails)
            return self.order.by_kernel(bags, self.device, own), order

        orders = Last(orders_of)

        def receive(step: Step) -> None:
            received, (own, own_copies) = step.arrived(self.name, self.like), orders(step.lookup_input.copy_bags)
            step.grads.append(own(received))
            step.copy_grads.append(own_copies(received))

        split = _send("split direct", self.name, message, gradients)
        return {"split": [split], "update": [Call("receive", receive)]}


# ``reduce_scatter``: the network adds the partial rows of row shards; an all-gather returns their gradients.
#
# Every rank sends ``[W, B, D]``, D the columns of all tables of this path, with zeros for tables that it does not
# store. This suits row-wise tables over all ranks, and wastes bytes where few ranks store a table. Batches are padded
# to the largest. Forward adds encoded values: FP16 and BF16 round each partial sum, up to W times, and INT8 raises. A
# table whose rows are not split has nothing to add, so it takes the path ``direct`` (`layout.effective_route`).


class ReduceScatterPath(OutputPath):
    """Adds on the network."""

    name = "reduce_scatter"
    op = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs, like: Tensor) -> None:
        super().__init__(layout, env, codecs, like)
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
        # received once, as the sum of all ranks
        self.summed = MessageLayout([[parcel]], codecs.forward)
        self.own, self.every = (MessageLayout([[parcel]] * ranks, codecs.backward) for ranks in (1, env.world_size))
        stored = runs_of(self.features[env.rank], 0, compact)
        self.spread = ColumnMap(stored, [self.width], [self.columns])
        self.collect = ColumnMap([run.reversed() for run in stored], [self.columns], [self.width])
        self.split = ColumnMap([run.reversed() for run in self.runs], [layout.output_width], [self.columns])

    def area_rows(self, signature: Signature) -> Ints:
        return np.array([max(signature.segments)])

    def calls(self, signature: Signature) -> Calls:
        segments, (samples,) = signature.segments, signature.rows
        total, largest, device, dtype = sum(segments), max(segments), self.device, self.like.dtype
        places = None if min(segments) == largest else _places(segments, device)
        spread, collect = (own.bind([total], [total], device) for own in (self.spread, self.collect))
        split = self.split.bind([samples], [samples], device, self.scale, dtype)
        there, back = self._messages(largest, segments)

        def summands(step: Step) -> Tensor:
            rows = spread(self.rows(step).reshape(-1)).view(-1, self.columns)
            if places is None:
                return rows
            return rows.new_zeros(len(segments) * largest, self.columns).index_copy_(0, places, rows)

        def gradients(step: Step) -> Tensor:
            grads = split(step.grad.view(-1))
            return grads if samples == largest else pad(grads, (0, (largest - samples) * self.columns))

        def unpack(flat: Tensor) -> Tensor:
            rows = flat.view(-1, self.columns)
            rows = rows if places is None else rows.index_select(0, places)
            return collect(rows.view(-1)).view(total, self.width)

        return {
            "give": [_send("give reduce_scatter", self.name, there, summands)],
            "split": [_send("split reduce_scatter", self.name, back, gradients)],
            "update": [_receive(self.name, self.like, unpack)],
        }

    def _messages(self, largest: int, segments: Sequence[int]) -> tuple[Message, Message]:
        """Rows of so many samples from every rank, added; and their gradients to every rank."""
        dtype, ranks, codec = self.like.dtype, len(segments), self.codecs.forward
        one, every = np.array([largest]), np.full(ranks, largest)
        rows = self.like.to(self.summed.wire_dtype(dtype))
        add = partial(issue_reduce_scatter, env=self.env, label=f"{FORWARD}/{self.name}")
        size, encode = largest * self.columns, lambda summands: codec.encode(summands, parts=ranks).view(-1)
        held, decode = (ranks + 1) * size * rows.element_size(), self.summed.decoder(one, self.device, dtype)
        there = Message(add, ranks * size, rows, encode, decode, held)
        grads, (size,) = self.like.to(self.own.wire_dtype(dtype)), self.own.wire_sizes(one)
        send = partial(issue_all_gather, env=self.env, label=f"{BACKWARD}/{self.name}")
        held, decode = (ranks + 1) * size * grads.element_size(), self.every.decoder(every, self.device, dtype)
        return there, Message(send, size, grads, self.own.encoder(one, self.device), decode, held)

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
# The message across nodes travels while other work runs, in both directions. `give` and `update` wait for the hop in
# the node, which is the faster one.


class TwoHopPath(OutputPath):
    """Rank (node, place) sends to each place of its node the rows for that place, and onward to all nodes."""

    name = "two_hop"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs, like: Tensor) -> None:
        super().__init__(layout, env, codecs, like)
        self.local = env.local_world_size
        self.nodes, self.node, self.place = env.world_size // self.local, env.node, env.rank % self.local
        intra, inter = env.node_envs()
        dims = [block.dim for block in layout.blocks]
        node_columns = [_NodeColumns(self._features_on(node), dims) for node in range(self.nodes)]
        inside_widths = [widths_of(features) for features in self._features_on(self.node)]
        self.inside = Exchange([[widths] for widths in inside_widths], intra, codecs, like, hop="/inside")
        self.across = Exchange([[columns.widths] for columns in node_columns], inter, codecs, like, hop="/across")
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

    def area_rows(self, signature: Signature) -> Ints:
        return np.full(self.nodes, signature.rows[0])

    def calls(self, signature: Signature) -> Calls:
        device, own = self.device, self.area_rows(signature)
        by_place = np.array(signature.segments).reshape(self.nodes, self.local).T  # a place's batch on every node
        batches, total = by_place[self.place], sum(signature.segments)
        # every place of the node sends rows for the same batches: those of this place, on all nodes
        summed = np.full(self.local, batches.sum())
        there, here = self.inside.forward(by_place.sum(1), summed), self.across.forward(batches, own)
        home, back = self.across.backward(own, batches), self.inside.backward(summed, by_place.sum(1))
        add, spread = self.add.bind(summed, summed[:1], device), self.spread.bind(summed[:1], summed, device)
        split = self.split.bind(signature.rows, own, device, self.scale, self.like.dtype)
        # with one node or one place, both orders are equal
        order = None if self.nodes == 1 or self.local == 1 else self._order(signature.segments)
        to_places = None if order is None else to_device(order, device)
        to_nodes = None if order is None else to_device(np.argsort(order), device)

        def by_places(step: Step) -> Tensor:
            rows = self.rows(step)
            return (rows if to_places is None else rows.index_select(0, to_places)).reshape(-1)

        def by_nodes(flat: Tensor) -> Tensor:
            rows = flat.view(total, self.width)
            return rows if to_nodes is None else rows.index_select(0, to_nodes)

        inside, like = "two_hop inside", self.like
        return {
            "give": [
                _send("give two_hop inside", inside, there, by_places),
                _send("give two_hop across", self.name, here, lambda step: add(step.arrived(inside, like))),
            ],
            "split": [_send("split two_hop across", self.name, home, lambda step: split(step.grad.view(-1)))],
            "update": [
                _send("split two_hop inside", inside, back, lambda step: spread(step.arrived(self.name, like))),
                _receive(inside, like, by_nodes),
            ],
        }

    def _features_on(self, node: int) -> list[list[ShardFeature]]:
        return self.features[node * self.local : (node + 1) * self.local]

    def _order(self, segments: Sequence[int]) -> Ints:
        """Rows by node, then place -> by place, then node."""
        sizes = np.array(segments)
        ranks = np.arange(len(segments)).reshape(self.nodes, self.local).T.reshape(-1)
        ones = np.ones_like(sizes)
        return expand((np.cumsum(sizes) - sizes)[ranks], ones, ones, sizes[ranks])


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
            # row shards of the node share columns: their sum crosses once
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

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs, like: Tensor) -> None:
        super().__init__(layout, env, codecs, like)
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
        self.turned = Transposed(widths_of(self.features[env.rank]), env.world_size, self.device)
        self.exchange = Exchange([[(width,) for width in widths_of(own)] for own in self.features], env, codecs, like)

    def area_rows(self, signature: Signature) -> Ints:
        return np.full(len(self.blocks), signature.rows[0])

    def calls(self, signature: Signature) -> Calls:
        def rows(step: Step) -> Tensor:
            return self.turned.by_source(self.rows(step).reshape(-1), self._counts(step.lookup_input))

        def order(step: Step) -> None:  # while the rows travel
            step.order = self._bags_of_rows(step.lookup_input.local_batch)

        def receive(step: Step) -> None:
            received = step.arrived(self.name, self.like)
            step.grads.append(self.turned.by_kernel(received, self._counts(step.lookup_input)))

        return {
            "give": [_send("give distinct_rows", self.name, self._message, rows), Call("order", order)],
            "split": [_send("split distinct_rows", self.name, self._message_back, self._gradients)],
            "update": [Call("receive", receive)],
        }

    def _message(self, step: Step) -> Message:
        return self.exchange.forward(self._counts(step.lookup_input), self._sent(step.lookup_input.local_batch))

    def _message_back(self, step: Step) -> Message:
        return self.exchange.backward(self._sent(step.lookup_input.local_batch), self._counts(step.lookup_input))

    def areas(self, received: Tensor, step: Step) -> Tensor:
        if not received.numel():
            return received.new_zeros(step.lookup_input.local_batch.batch_size * sum(self.area_widths))
        if self.has_replicas:  # their ids read a chunk of zeros
            received = pad(received, (0, self.chunks.size))
        return gather(received, self.chunks.size, step.order)

    def _gradients(self, step: Step) -> Tensor:
        batch, grad = step.lookup_input.local_batch, step.grad
        assert batch.places is not None
        assert batch.num_places is not None
        bag_of_id = torch.arange(batch.batch_size, device=grad.device).repeat(len(self.blocks))  # [blocks * B]
        total = sum(batch.counts[block] for block in self.blocks)
        bag_of_id = torch.repeat_interleave(bag_of_id, self._lengths(batch), output_size=total)  # [n]
        # places count the ids of the whole batch, `bag_of_id` those of this path's blocks
        shifts = (self._first_ids(batch) - first_ids(batch))[self.chunks.blocks]
        sizes, shift = to_device(np.stack([batch.num_places, shifts]), grad.device)
        place = batch.places + torch.repeat_interleave(shift, sizes, output_size=len(batch.places))
        index = self.chunks.of(bag_of_id[place], self.block_starts, self.strides, self._sent(batch), batch)
        return gather(grad.reshape(-1), self.chunks.size, index).mul_(self.scale)

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
        # [2, blocks * B] of each bag; below, each bag becomes one bag for each chunk of its row
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
# follow up to the longest one's; these stay on the rank (`Stacked`).


PATHS: dict[str, type[OutputPath]] = {
    path.name: path for path in (DirectPath, ReduceScatterPath, TwoHopPath, DistinctRowsPath)
}


class PooledOutput:
    """Sends the rows of exchanged kernels by each table's output path, and joins them with the replicas' rows.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
        device: of rows.
        variable: whether every feature of a batch has its own number of bags (VBE). Then all tables take the path
            "direct", with equal results, and the output is flat, block after block.
    """

    def __init__(
        self,
        layout: Layout,
        env: ShardingEnv,
        registry: Registry | None,
        device: torch.device,
        variable: bool = False,
    ) -> None:
        self.layout, self.target, self.device = layout, Target(layout, variable), device
        self.like = torch.empty(0, dtype=layout.rows_dtype, device=device)
        self.paths = self._paths(env, registry)
        first = 0  # this rank's kernels stand side by side in the order of the paths
        for path in self.paths:
            end = first + len(list(groupby(path.features[env.rank], lambda own: own.group)))
            path.kernels, first = slice(first, end), end
        self.copies, self.means = slice(first, None), Means(layout)
        runs: list[Run] = []
        widths: list[int] = []
        for path in self.paths:
            # the areas of all paths are end to end, so senders are counted over all paths
            runs += [replace(run, sender=len(widths) + run.sender) for run in path.runs]
            widths += path.area_widths
        self.join, self.exchanges = ColumnMap(runs, widths, self.target.widths), any(widths)
        replicated = [feature for feature in layout.rank_features[env.rank] if feature.replicated]
        # groups may differ between ranks
        kernels = [list(own) for _, own in groupby(replicated, key=lambda feature: feature.group)]
        self.kernel_blocks = [[feature.block for feature in features] for features in kernels]
        runs = [run for number, features in enumerate(kernels) for run in runs_of(features, number, self.target.places)]
        widths = [sum(widths_of(features)) for features in kernels]
        blocks = [feature.block for feature in layout.replicated_features]
        #: whether replicas can be added in place: each chunk once, so that the order of additions is fixed
        self.adds_chunks = len(set(blocks)) == len(blocks) and not variable
        self.copy = ColumnMap(runs, widths, self.target.widths)
        self.split = ColumnMap([run.reversed() for run in runs], self.target.widths, widths)

    def _paths(self, env: ShardingEnv, registry: Registry | None) -> list[OutputPath]:
        layout = self.layout
        names = [] if self.target.variable else [name for name in layout.routes if name != "direct"]
        paths: list[OutputPath] = []
        # the gradients of replicas travel on this path, even if no table takes it
        if not names or "direct" in layout.routes or layout.replicated_features:
            paths.append(DirectPath(layout, env, codecs_for(DirectPath.op, registry), self.like, self.target))
        return paths + [PATHS[name](layout, env, codecs_for(PATHS[name].op, registry), self.like) for name in names]

    def calls(self, signature: Signature) -> Calls:
        """Rows to the ranks of their samples, and gradients back."""
        paths, samples, variable = [path.calls(signature) for path in self.paths], signature.rows, self.target.variable
        shape = (-1,) if variable else (*samples, *self.target.widths)
        rows = [max(samples[self.target.places[block][0]] for block in own) for own in self.kernel_blocks]
        copied = any(n * width for n, width in zip(rows, self.copy.source_widths, strict=True))
        join = []
        # an output without any rows still needs its zeros
        if self.exchanges or not copied:
            join.append(Call("join", self._join(signature, shape)))
        if copied:
            join.append(Call("add replicas", self._add_replicas(samples, rows, shape)))
        bags = samples if variable else list(samples) * len(self.layout.blocks)
        divide, split = self.means.bind(bags, not variable, self.device), list[Call]()
        if divide is not None:
            by_length = divide

            def divide_output(step: Step) -> Tensor:
                step.output = by_length(step.output, step.lookup_input.local_batch)
                return step.output

            def divide_grad(step: Step) -> None:
                step.grad = by_length(step.grad, step.lookup_input.local_batch)

            join.append(Call("divide means", divide_output))
            split.append(Call("divide means", divide_grad))
        found = {stage: [call for own in paths for call in own[stage]] for stage in ("give", "split", "update")}
        return found | {"join": join, "split": split + found["split"]}

    def _join(self, signature: Signature, shape: tuple[int, ...]) -> Callable[[Step], Tensor]:
        area_rows = np.concatenate([path.area_rows(signature) for path in self.paths])
        add = self.join.bind(area_rows, signature.rows, self.device)

        def join(step: Step) -> Tensor:
            areas = []
            for path in self.paths:
                areas.append(path.areas(step.arrived(path.name, self.like), step))
            step.output = add(_end_to_end(areas)).view(shape)
            return step.output

        return join

    def _add_replicas(
        self, samples: Sequence[int], rows: Sequence[int], shape: tuple[int, ...]
    ) -> Callable[[Step], Tensor]:
        dtype, exchanges, in_place = self.like.dtype, self.exchanges, self.exchanges and self.adds_chunks
        places = self.split.indices(samples, rows, self.device).chunks if in_place else None
        copy = self.copy.bind(rows, samples, self.device)

        def add(step: Step) -> Tensor:
            copies = _end_to_end([own.to(dtype).reshape(-1) for own in step.rows[self.copies]])
            if places is not None:
                chunk = self.split.chunk
                step.output.view(-1, chunk).index_add_(0, places, copies.view(-1, chunk))
            elif exchanges:
                step.output = step.output + copy(copies).view(shape)
            else:
                step.output = copy(copies).view(shape)
            return step.output

        return add


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors as one; no copy of a single one."""
    if len(parts) == 1:
        return parts[0]
    filled = [part for part in parts if part.numel()] or parts[:1]
    return filled[0] if len(filled) == 1 else torch.cat(list(filled))


class LocalOutput:
    """World size 1: the kernel's rows are the output, and its gradient is the gradient of the rows. Nothing is copied.

    Used where one kernel on one rank looks up the output's columns in order, and no bag is averaged (`is_enough`).
    """

    @staticmethod
    def is_enough(layout: Layout, kernels: int) -> bool:
        """Whether this is all that such a collection needs."""
        features = layout.rank_features[0]
        in_order = [feature.block for feature in features] == list(range(len(layout.blocks)))
        whole = all(feature.shard.num_cols == layout.blocks[feature.block].dim for feature in features)
        direct = all(route == "direct" for route in layout.table_routes)
        return layout.world_size == 1 and kernels == 1 and in_order and whole and direct and not layout.mean_blocks

    def calls(self, signature: Signature) -> Calls:
        """Two calls, and no message."""
        return {
            "join": [Call("join", self._join)],
            "update": [Call("receive", lambda step: step.grads.append(step.grad))],
        }

    @staticmethod
    def _join(step: Step) -> Tensor:
        (step.output,) = step.rows
        return step.output


# Rows of sequence collections: every id's row travels to the place in the batch where the id stood.
#
# Nothing is added in forward, so `direct` is the only output path. With ``use_index_dedup``, ids that are equal share
# one row: it travels once, is copied to each of their places, and their gradients are added before they travel. One
# kernel orders a message, and one puts what arrived in place::
#
#     kernels here    feature 0: source 0, source 1 | feature 1: source 0, source 1       by shard feature
#     on the wire     source 0: feature 0, feature 1 | source 1: feature 0, feature 1     by rank
#     output          block after block, each [n, D]


class SequenceOutput:
    """The output is flat: for each block its ``[n, D]`` rows, one block after the other.

    Raises:
        PlanError: a table's route is not "direct".
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None, device: torch.device) -> None:
        self.like, self.scale = torch.empty(0, dtype=layout.rows_dtype, device=device), 1.0 / env.world_size
        codecs = codecs_for(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, registry)
        for table, route in zip(layout.tables, layout.table_routes, strict=True):
            if route != "direct":
                raise PlanError(
                    f"route {route!r} of table {table.name!r} does not apply: the table belongs to a sequence "
                    f"collection, whose rows are not added. Fix: route='direct' for this table"
                )
        self.features, self.replicated = layout.exchanged_features, layout.replicated_features
        self.kernels = len(list(groupby(self.features[env.rank], lambda own: own.group)))
        parcels = [[(width,) for width in widths_of(own)] for own in self.features]
        self.exchange = Exchange(parcels, env, codecs, self.like, widths_of(self.replicated))
        self.pack = Transposed(widths_of(self.features[env.rank]), env.world_size, device)
        self.unpack = Transposed(widths_of(layout.rank_features[env.rank]), env.world_size, device)
        features = [feature for stored in self.features for feature in stored]
        self.dims = [block.dim for block in layout.blocks]
        self.chunks = Chunks([*features, *self.replicated], self.dims)

    def calls(self, signature: Signature) -> Calls:
        """Every number of rows is a number of ids, which each step has."""
        return {
            "give": [_send("give", "rows", self._message, self._rows), Call("order", self._order)],
            "join": [Call("join", self._join)],
            "split": [_send("split", "rows", self._message_back, self._gradients)],
            "update": [Call("receive", self._receive)],
        }

    def _counts(self, step: Step) -> Ints:
        """``[W, shard features here]`` rows for each rank."""
        return step.lookup_input.counts[: self.pack.features].T

    def _message(self, step: Step) -> Message:
        return self.exchange.forward(self._counts(step), step.lookup_input.local_batch.sent)

    def _message_back(self, step: Step) -> Message:
        local_batch, sent = step.lookup_input.local_batch, list[int]()
        if self.replicated:
            pairs = zip(_copied(local_batch), local_batch.touched, strict=True)
            sent = [n if touch is None else touch.rows.numel() for n, touch in pairs]
        return self.exchange.backward(local_batch.sent, step.lookup_input.counts.T, sent)

    def _rows(self, step: Step) -> Tensor:
        rows = step.rows[: self.kernels]
        flat = torch.cat(rows).to(self.like.dtype) if rows else self.like
        return self.pack.by_source(flat, self._counts(step))

    def _order(self, step: Step) -> None:  # while the rows travel
        places = self._places(step.lookup_input.local_batch)
        step.order = inverse_of(places, len(places.chunks))

    def _join(self, step: Step) -> Tensor:
        """Flat: for each block its ``[n, D]`` rows, one block after the other."""
        copies = [rows.to(self.like.dtype) for rows in step.rows[self.kernels :]]
        received = step.arrived("rows", self.like)
        flat = torch.cat([received, *copies]) if copies else received
        step.output = flat.view(-1, self.chunks.size).index_select(0, step.order).view(-1)
        return step.output

    def _gradients(self, step: Step) -> Tensor:
        local_batch = step.lookup_input.local_batch
        grad = step.grad if self.scale == 1.0 else step.grad * self.scale
        flat = gather(grad.contiguous().view(-1), self.chunks.size, self._places(local_batch))
        if not self.replicated:
            return flat
        own = sum(self.exchange.received.sizes(local_batch.sent))
        tail = sum_touched(flat[own:], _copied(local_batch), widths_of(self.replicated), local_batch.touched)
        return self.exchange.with_tails(flat[:own], local_batch.sent, tail)

    def _receive(self, step: Step) -> None:
        """Flat, by shard feature of this rank, exchanged and replicated."""
        step.grads.append(self.unpack.by_kernel(step.arrived("rows", self.like), step.lookup_input.counts.T))

    def _places(self, local_batch: LocalBatch) -> Indices:
        """For each chunk that arrives, its chunks in the output: one, or a bag of them."""
        place = local_batch.places
        assert place is not None
        rows = np.concatenate([local_batch.sent, _copied(local_batch)])
        starts = starts_of(local_batch.counts, self.dims) // self.chunks.size
        starts = starts - first_ids(local_batch) * self.chunks.of_blocks
        return self.chunks.of(place, starts, self.chunks.of_blocks, rows, local_batch)


def _copied(local_batch: LocalBatch) -> list[int]:
    """Ids of each replicated shard feature."""
    return [end - start for _, start, end in (replica.ids for replica in local_batch.replicas)]
