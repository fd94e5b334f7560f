"""Messages of rows: the number and widths of rows for each rank, their encoding, and the exchange that sends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import (
    Codec,
    CommOp,
    CommType,
    Pending,
    QuantizedCommCodecs,
    ShardingEnv,
    issue_all_gather,
    issue_all_to_all,
)
from recshard_lab.distributed.step.batch import LocalBatch, LookupInput
from recshard_lab.distributed.step.columns import ColumnMap, Ints, Memo, Run
from recshard_lab.distributed.step.layout import Layout, ShardFeature

FORWARD, BACKWARD = "output_dist/rows", "output_dist_backward/rows"


class Parcels:
    """What each rank gets in a message: parcels of rows, one after the other. Their numbers of rows change by step.

    Args:
        widths: for each rank and parcel, the widths of the embedding rows that stand side by side in a row of it.
        codec: the format on the wire.

    >>> Parcels([[(4,), (8, 8)], []]).sizes(np.array([3, 2]))
    [44, 0]
    """

    def __init__(self, widths: Sequence[Sequence[tuple[int, ...]]], codec: Codec | None = None) -> None:
        self.widths = [parcel for own in widths for parcel in own]
        self.columns = np.array([sum(parcel) for parcel in self.widths], dtype=np.int64)
        self.codec = None if codec is None or codec.comm_type is CommType.FP32 else codec
        distinct = {width for parcel in self.widths for width in parcel}
        #: the width with which the codec can encode the whole message at once
        self._one_width = next(iter(distinct)) if len(distinct) == 1 else None
        self._wire_columns = self.columns
        if self.codec is not None and self.codec.row_wise:
            encoded = [sum(map(self.codec.encoded_width, parcel)) for parcel in self.widths]
            self._wire_columns = np.array(encoded, dtype=np.int64)
        elif self.codec is not None:
            self._one_width = 1
        self._ends = np.cumsum([0, *map(len, widths)])
        self._memo = Memo[list[int]](keep=2)

    def sizes(self, rows: Ints) -> list[int]:
        """Elements for each rank, before encoding; ``rows`` are those of each parcel."""
        return self._sum(rows * self.columns)

    def wire_sizes(self, rows: Ints) -> list[int]:
        """The same, encoded."""
        return self._memo.get(rows.tobytes(), lambda: self._sum(rows * self._wire_columns))

    def _sum(self, elements: Ints) -> list[int]:
        sizes: list[int] = np.diff(np.concatenate([[0], elements.cumsum()])[self._ends]).tolist()
        return sizes

    def encode(self, flat: Tensor, rows: Ints) -> Tensor:
        """Encoded rows, flat; ``rows`` are those of each parcel."""
        codec, width = self.codec, self._one_width
        if codec is None or flat.numel() == 0:
            return flat if codec is None else flat.new_empty(0, dtype=codec.wire_dtype)
        if width is not None:
            return codec.encode(flat.view(-1, width)).view(-1)
        return self._by_width.encode(flat, rows)

    def decode(self, flat: Tensor, rows: Ints, dtype: torch.dtype) -> Tensor:
        """The rows that `encode` received, within the codec's error."""
        codec, width = self.codec, self._one_width
        if codec is None or flat.numel() == 0:
            return flat.to(dtype)
        if width is not None:
            return codec.decode(flat.view(-1, codec.encoded_width(width)), width, dtype).view(-1)
        return self._by_width.decode(flat, rows, dtype)

    @cached_property
    def _by_width(self) -> _ByWidth:
        assert self.codec is not None
        return _ByWidth(self.widths, self.codec)


_NO_PARCELS = Parcels([])


@dataclass(slots=True)
class Arriving:
    """A message that was issued.

    Attributes:
        pending: the collective.
        parcels: the layout of what arrives.
        rows: of each parcel.
        dtype: of the decoded rows.
        buffer_bytes: sent and received.
        kept: what the receiver needs besides.
    """

    pending: Pending
    parcels: Parcels
    rows: Ints
    dtype: torch.dtype
    buffer_bytes: int
    kept: Any = None

    @classmethod
    def nothing(cls, like: Tensor) -> Arriving:
        """No message."""
        return cls(Pending(like.new_empty(0)), _NO_PARCELS, np.empty(0, np.int64), like.dtype, 0)

    def wait(self) -> Tensor:
        """The received rows, flat, sender after sender."""
        return self.parcels.decode(self.pending.wait(), self.rows, self.dtype)


def gather_rows(flat: Tensor, own: Parcels, every: Parcels, rows: int, env: ShardingEnv, label: str) -> Arriving:
    """Sends a parcel to every rank.

    Args:
        flat: the parcel.
        own: its layout.
        every: the layout of what arrives, such a parcel from each rank.
        rows: of each parcel.
        env: the ranks.
        label: the name in traces.
    """
    message = own.encode(flat, np.array([rows]))
    held = message.numel() * (1 + env.world_size) * message.element_size()
    return Arriving(issue_all_gather(message, env, label), every, np.full(env.world_size, rows), flat.dtype, held)


class Exchange:
    """Sends rows to the ranks of their samples, and their gradients back, which gradients of replicas follow.

    Args:
        parcels: for each rank, the widths in each of its parcels.
        env: the ranks.
        codecs: number formats of both directions.
        copies: columns of each replicated shard feature.
        hop: the end of both labels in traces.
    """

    def __init__(
        self,
        parcels: Sequence[Sequence[tuple[int, ...]]],
        env: ShardingEnv,
        codecs: QuantizedCommCodecs,
        copies: Sequence[int] = (),
        hop: str = "",
    ) -> None:
        own, tail, ranks = parcels[env.rank], [(width,) for width in copies], env.world_size
        self.sent, self.received = Parcels([own] * ranks, codecs.forward), Parcels(parcels, codecs.forward)
        self.sent_back = Parcels([[*there, *tail] for there in parcels], codecs.backward)
        self.received_back = Parcels([[*own, *tail]] * ranks, codecs.backward)
        self._env, self._hop = env, hop
        self._edges = np.cumsum([len(there) for there in parcels])[:-1]
        self._own = len(own)

    def send(self, flat: Tensor, counts: Ints, arriving: Ints) -> Arriving:
        """Sends ``flat``.

        Args:
            flat: the parcels, rank after rank.
            counts: ``[W, parcels]`` their rows.
            arriving: the rows of each parcel that arrives.
        """
        return self._send(flat, self.sent, counts.reshape(-1), self.received, arriving, FORWARD)

    def with_tails(self, flat: Tensor, rows: Ints, tail: Tensor) -> Tensor:
        """``flat``, parcels of so many ``rows``, with ``tail`` behind those of each rank."""
        sizes = self.received.sizes(rows)
        if len(set(sizes)) == 1:
            return torch.cat([flat.view(len(sizes), sizes[0]), tail.expand(len(sizes), -1)], 1).view(-1)
        return torch.cat([part for own in flat.split(sizes) for part in (own, tail)])

    def send_back(self, flat: Tensor, rows: Ints, counts: Ints, tail_rows: Sequence[int] = ()) -> Arriving:
        """Sends the gradients of what arrived.

        Args:
            flat: the gradients, parcel after parcel; with replicas, as `with_tails` returns it.
            rows: of each parcel.
            counts: ``[W, parcels + copies]`` the rows that arrive.
            tail_rows: rows of each replicated shard feature.
        """
        if tail_rows:
            rows = np.concatenate([part for own in np.split(rows, self._edges) for part in (own, tail_rows)])
        return self._send(flat, self.sent_back, rows, self.received_back, counts.reshape(-1), BACKWARD)

    def _send(
        self, flat: Tensor, sends: Parcels, rows: Ints, receives: Parcels, arriving: Ints, label: str
    ) -> Arriving:
        message, out, back = sends.encode(flat, rows), sends.wire_sizes(rows), receives.wire_sizes(arriving)
        pending = issue_all_to_all(message, out, back, self._env, label + self._hop)
        return Arriving(pending, receives, arriving, flat.dtype, (sum(out) + sum(back)) * message.element_size())

    def begins(self, counts: Ints) -> Ints:
        """``[2, W]``: where the parcels of each rank begin among the gradients that arrive, and those of replicas."""
        sizes = counts * self.received_back.columns[: counts.shape[1]]
        parts = np.column_stack([sizes[:, : self._own].sum(1), sizes[:, self._own :].sum(1)]).reshape(-1)
        return (np.cumsum(parts) - parts).reshape(-1, 2).T


class _ByWidth:
    """A message grouped by the width of its rows, so that the codec is called once for each width.

    Args:
        widths: of each parcel.
        codec: the format on the wire.
    """

    def __init__(self, widths: Sequence[tuple[int, ...]], codec: Codec) -> None:
        self.codec, self.distinct = codec, sorted({width for parcel in widths for width in parcel})
        areas = [(width, n) for width in self.distinct for n, parcel in enumerate(widths) if width in parcel]
        place = {area: number for number, area in enumerate(areas)}
        self.parcels = np.array([n for _, n in areas], dtype=np.int64)  # of each area
        self.begins = [next(i for i, area in enumerate(areas) if area[0] == width) for width in self.distinct]
        self.group, self.ungroup = [], []  # plain, encoded
        for size_of_row in (lambda width: width, codec.encoded_width):
            columns, runs = [0] * len(areas), []
            for n, parcel in enumerate(widths):
                ends = accumulate(map(size_of_row, parcel), initial=0)
                for width, source in zip(parcel, ends, strict=False):
                    area, size = place[width, n], size_of_row(width)
                    runs.append(Run(n, source, columns[area], size, area))
                    columns[area] += size
            totals = [sum(map(size_of_row, parcel)) for parcel in widths]
            self.group.append(ColumnMap(runs, totals, columns, keep=1))
            self.ungroup.append(ColumnMap([run.reversed() for run in runs], columns, totals, keep=1))

    def encode(self, flat: Tensor, rows: Ints) -> Tensor:
        """Encoded parcels, flat; ``rows`` are those of each parcel."""
        return self._turn(flat, rows, 0, 1, lambda part, width: self.codec.encode(part.view(-1, width)))

    def decode(self, flat: Tensor, rows: Ints, dtype: torch.dtype) -> Tensor:
        """Decoded parcels, flat."""

        def decoded(part: Tensor, width: int) -> Tensor:
            return self.codec.decode(part.view(-1, self.codec.encoded_width(width)), width, dtype)

        return self._turn(flat, rows, 1, 0, decoded)

    def _turn(
        self, flat: Tensor, rows: Ints, before: int, after: int, change: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        area_rows = rows[self.parcels]
        grouped = self.group[before](flat, rows, area_rows)
        totals = np.add.reduceat(area_rows * self.group[before].target_widths, self.begins).tolist()
        parts = zip(grouped.split(totals), self.distinct, strict=True)
        changed = torch.cat([change(part, width).view(-1) for part, width in parts])
        return self.ungroup[after](changed, area_rows, rows)


# The output exchange in four halves, so that its messages travel while other work runs.


@dataclass(slots=True)
class PendingOutput:
    """An output exchange between its two halves.

    Attributes:
        lookup_input: the batch.
        state: what the second half needs.
        buffer_bytes: bytes of the messages, sent and received. Final after the second half.
    """

    lookup_input: LookupInput
    state: Any
    buffer_bytes: int = 0


class OutputExchange(ABC):
    """Sends looked-up rows to the ranks of their samples, and gradients back.

    `begin` and `begin_backward` issue the messages and return at once. `finish` and `finish_backward` wait for them.
    All ranks call the halves of their exchanges in the same order.
    """

    @abstractmethod
    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        """Issues the messages of forward.

        Args:
            exchanged: rows of each exchanged kernel of this rank, for the samples of all ranks.
            replicated: rows of each replicated kernel, for the local batch.
            lookup_input: the batch that was looked up.
        """

    @abstractmethod
    def finish(self, pending: PendingOutput) -> Tensor:
        """Waits for the messages of `begin`. Returns the collection's output for the local batch."""

    @abstractmethod
    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        """Issues the messages of backward: the gradient of what `finish` returned, times ``scale``."""

    @abstractmethod
    def finish_backward(self, pending: PendingOutput) -> Columns:
        """Waits for the messages of `begin_backward`.

        Returns:
            For each exchanged kernel, then each replicated kernel, the gradient of its rows from all ranks.
        """


class Columns:
    """Gradients ``[n, width]`` side by side, read from the left; flat ones end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.shape[-1]]
        self._position, self._example = 0, tensors[0]

    def take(self, width: int) -> Tensor:
        """The next ``width`` columns, contiguous. One call never spans two tensors."""
        if width == 0:
            return self._example.narrow(-1, 0, 0)
        first = self._tensors[0]
        start, self._position = self._position, self._position + width
        taken = first.narrow(-1, start, width).contiguous()
        if self._position == first.shape[-1]:
            self._tensors, self._position = self._tensors[1:], 0
        return taken


class OutputPath(ABC):
    """Brings the pooled rows of the shards that take one path to the ranks of their samples, as flat areas.

    Attributes:
        features: for each rank, the shard features that take this path.
        width: columns of this rank's shard features.
        area_widths: columns of each area that arrives.
        runs: from the areas to the columns of the output.
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
        features: list[list[ShardFeature]] | None = None,
    ) -> None:
        self.layout, self.env, self.codecs = layout, env, codecs
        self.features = features or layout.features_of(self.name)
        self.width = sum(widths_of(self.features[env.rank]))

    @abstractmethod
    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        """Sends this rank's partial rows ``[T, width]``, which are ordered by source rank."""

    def finish(self, begun: Arriving, lookup_input: LookupInput) -> Tensor:
        """The areas for the local batch, flat."""
        return begun.wait()

    @abstractmethod
    def area_rows(self, lookup_input: LookupInput) -> Ints:
        """Rows of each area; the first B of them are samples."""

    @abstractmethod
    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        """Sends this path's columns of the output's gradient, times ``scale``."""

    @abstractmethod
    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        """``[T, width]``: the gradient of the rows that `begin` sent; then that of replicas, if this path sends it."""


def widths_of(features: Sequence[ShardFeature]) -> tuple[int, ...]:
    """Columns of each shard feature."""
    return tuple(feature.shard.num_cols for feature in features)


class Target:
    """Where the columns of blocks are in the output.

    Side by side in one area ``[B, output width]``. In a variable batch, blocks have different numbers of bags: each is
    an area ``[bags, columns]``, one after the other.

    Args:
        layout: the wiring.
        variable: whether batches are variable.

    Attributes:
        widths: columns of each area.
        places: for each block, its area, and its first column there.
    """

    def __init__(self, layout: Layout, variable: bool) -> None:
        self.variable, blocks = variable, layout.blocks
        self.widths = [block.dim for block in blocks] if variable else [layout.output_width]
        self.places = [(n, 0) if variable else (0, block.start) for n, block in enumerate(blocks)]

    def rows(self, local_batch: LocalBatch) -> list[int]:
        """Rows of each area."""
        return [bags.numel() for bags in local_batch.lengths] if self.variable else [local_batch.batch_size]


def runs_of(
    features: Sequence[ShardFeature], sender: int, places: Sequence[tuple[int, int]] | Mapping[int, tuple[int, int]]
) -> list[Run]:
    """From an area with these features side by side to the area and first column of each block in ``places``."""
    runs = []
    for feature, source in zip(features, accumulate(widths_of(features), initial=0), strict=False):
        receiver, start = places[feature.block]
        runs.append(Run(sender, source, start + feature.shard.cols[0], feature.shard.num_cols, receiver))
    return runs


# World size 1: the kernel's rows are the output, and its gradient is the gradient of the rows. Nothing is copied.


class LocalOutput(OutputExchange):
    """Returns the rows of the kernel. Used if `is_enough` returns True."""

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        return PendingOutput(lookup_input, exchanged[0])

    def finish(self, pending: PendingOutput) -> Tensor:
        """``[B, output width]``."""
        rows: Tensor = pending.state
        return rows

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        return PendingOutput(lookup_input, grad)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """The gradient as it is."""
        return Columns([pending.state])


def is_enough(layout: Layout, groups: int) -> bool:
    """Whether one kernel on one rank looks up the output's columns in order, and no bag is averaged.

    Args:
        layout: of the collection.
        groups: kernels of this rank.
    """
    features = layout.rank_features[0]
    in_order = [feature.block for feature in features] == list(range(len(layout.blocks)))
    whole = all(feature.shard.num_cols == layout.blocks[feature.block].dim for feature in features)
    direct = all(route == "direct" for route in layout.table_routes)
    return layout.world_size == 1 and groups == 1 and in_order and whole and direct and not layout.mean_blocks
