"""Messages of rows: the number and widths of rows for each rank, their encoding, and the exchange that sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import Codec, CommType, Pending, QuantizedCommCodecs, ShardingEnv, issue_all_to_all
from recshard_lab.distributed.step.columns import ColumnMap, Ints, Run

FORWARD, BACKWARD = "output_dist/rows", "output_dist_backward/rows"

Change = Callable[[Tensor], Tensor]


class MessageLayout:
    """What each rank gets in a message: parcels of rows, one after the other. Their numbers of rows change by step.

    Args:
        widths: for each rank and parcel, the widths of the embedding rows that stand side by side in a row of it.
        codec: the format on the wire.

    >>> MessageLayout([[(4,), (8, 8)], []]).sizes(np.array([3, 2]))
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
            # a codec by element has no rows: any width encodes the same
            self._one_width = 1
        self._ends = np.cumsum([0, *map(len, widths)])  # [W + 1] parcels before each rank

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of encoded rows of ``dtype``."""
        return dtype if self.codec is None else self.codec.wire_dtype

    def sizes(self, rows: Ints) -> list[int]:
        """Elements for each rank, before encoding; ``rows`` are those of each parcel."""
        return self._sum(rows * self.columns)

    def wire_sizes(self, rows: Ints) -> list[int]:
        """The same, encoded."""
        return self._sum(rows * self._wire_columns)

    def _sum(self, elements: Ints) -> list[int]:
        # differences of a running sum: a rank without parcels gets 0
        sizes: list[int] = np.diff(np.concatenate([[0], elements.cumsum()])[self._ends]).tolist()
        return sizes

    def encoder(self, rows: Ints, device: torch.device) -> Change | None:
        """Encodes flat parcels of so many ``rows``; None where they are sent as they are."""
        codec, width = self.codec, self._one_width
        if codec is None:
            return None
        if not rows @ self.columns:
            return lambda flat: flat.new_empty(0, dtype=codec.wire_dtype)
        if width is not None:
            return lambda flat: codec.encode(flat.view(-1, width)).view(-1)
        return self._by_width.encoder(rows, device)

    def decoder(self, rows: Ints, device: torch.device, dtype: torch.dtype) -> Change | None:
        """Decodes what `encoder` encoded, within the codec's error."""
        codec, width = self.codec, self._one_width
        if codec is None:
            return None
        if not rows @ self.columns:
            return lambda flat: flat.to(dtype)
        if width is not None:
            encoded = codec.encoded_width(width)
            return lambda flat: codec.decode(flat.view(-1, encoded), width, dtype).view(-1)
        return self._by_width.decoder(rows, device, dtype)

    @cached_property
    def _by_width(self) -> _ByWidth:
        assert self.codec is not None
        return _ByWidth(self.widths, self.codec)


@dataclass(slots=True)
class Message:
    """A message of rows whose size is known.

    Attributes:
        send: issues the encoded message.
        elements: of the encoded message.
        like: a tensor of its dtype and device.
        encode: rows, flat -> the message; None where they are sent as they are.
        decode: what arrives -> rows, flat; None where they are sent as they are.
        bytes: sent and received.
    """

    send: Callable[[Tensor], Pending]
    elements: int
    like: Tensor
    encode: Change | None
    decode: Change | None
    bytes: int

    def drain(self) -> None:
        """Sends as many bytes after an error: the other ranks wait for them."""
        self.send(self.like.new_empty(self.elements))


class Exchange:
    """Sends rows to the ranks of their samples, and their gradients back, which gradients of replicas follow.

    Args:
        parcels: for each rank, the widths in each of its parcels.
        env: the ranks.
        codecs: number formats of both directions.
        like: a tensor of the dtype and device of rows.
        copies: columns of each replicated shard feature.
        hop: the end of both labels in traces.
    """

    def __init__(
        self,
        parcels: Sequence[Sequence[tuple[int, ...]]],
        env: ShardingEnv,
        codecs: QuantizedCommCodecs,
        like: Tensor,
        copies: Sequence[int] = (),
        hop: str = "",
    ) -> None:
        # forward, every rank gets the columns stored here; backward, each gets back its own and all replicas' gradients
        own, tail, ranks = parcels[env.rank], [(width,) for width in copies], env.world_size
        self.sent, self.received = MessageLayout([own] * ranks, codecs.forward), MessageLayout(parcels, codecs.forward)
        self.sent_back = MessageLayout([[*there, *tail] for there in parcels], codecs.backward)
        self.received_back = MessageLayout([[*own, *tail]] * ranks, codecs.backward)
        self._env, self._hop, self._like = env, hop, like
        self._edges = np.cumsum([len(there) for there in parcels])[:-1]  # first parcel of each rank but the first
        self._own = len(own)

    def forward(self, counts: Ints, arriving: Ints) -> Message:
        """The message of rows.

        Args:
            counts: ``[W, parcels]`` rows for each rank.
            arriving: the rows of each parcel that arrives.
        """
        return self._message(self.sent, counts.reshape(-1), self.received, arriving, FORWARD)

    def with_tails(self, flat: Tensor, rows: Ints, tail: Tensor) -> Tensor:
        """``flat``, parcels of so many ``rows``, with ``tail`` behind those of each rank."""
        sizes = self.received.sizes(rows)
        if len(set(sizes)) == 1:
            return torch.cat([flat.view(len(sizes), sizes[0]), tail.expand(len(sizes), -1)], 1).view(-1)
        return torch.cat([part for own in flat.split(sizes) for part in (own, tail)])

    def backward(self, rows: Ints, counts: Ints, tail_rows: Sequence[int] = ()) -> Message:
        """The message of the gradients of what arrived.

        Args:
            rows: of each parcel.
            counts: ``[W, parcels + copies]`` the rows that arrive.
            tail_rows: rows of each replicated shard feature; the gradients are as `with_tails` returns them.
        """
        if tail_rows:
            rows = np.concatenate([part for own in np.split(rows, self._edges) for part in (own, tail_rows)])
        return self._message(self.sent_back, rows, self.received_back, counts.reshape(-1), BACKWARD)

    def _message(self, sent: MessageLayout, rows: Ints, received: MessageLayout, arriving: Ints, label: str) -> Message:
        sends, receives, device = sent.wire_sizes(rows), received.wire_sizes(arriving), self._like.device
        like = self._like.to(sent.wire_dtype(self._like.dtype))
        send = partial(
            issue_all_to_all, send_splits=sends, recv_splits=receives, env=self._env, label=label + self._hop
        )
        decode = received.decoder(arriving, device, self._like.dtype)
        held = (sum(sends) + sum(receives)) * like.element_size()
        return Message(send, sum(sends), like, sent.encoder(rows, device), decode, held)

    def begins(self, counts: Ints) -> Ints:
        """``[2, W]``: where the parcels of each rank begin among the gradients that arrive, and those of replicas."""
        sizes = counts * self.received_back.columns[: counts.shape[1]]
        # [W, 2], end to end in the message: the parcels of a rank, then its replicas' gradients
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
        # an area is the columns of one width in one parcel; areas of one width are adjacent
        areas = [(width, n) for width in self.distinct for n, parcel in enumerate(widths) if width in parcel]
        place = {area: number for number, area in enumerate(areas)}
        self.parcels = np.array([n for _, n in areas], dtype=np.int64)  # of each area
        self.begins = [next(i for i, area in enumerate(areas) if area[0] == width) for width in self.distinct]
        self.group, self.ungroup = [], []  # plain, encoded
        # both directions change between the two forms, so each has its map
        for size_of_row in (lambda width: width, codec.encoded_width):
            columns, runs = [0] * len(areas), []
            for n, parcel in enumerate(widths):
                ends = accumulate(map(size_of_row, parcel), initial=0)
                for width, source in zip(parcel, ends, strict=False):
                    area, size = place[width, n], size_of_row(width)
                    runs.append(Run(n, source, columns[area], size, area))
                    columns[area] += size
            totals = [sum(map(size_of_row, parcel)) for parcel in widths]
            self.group.append(ColumnMap(runs, totals, columns))
            self.ungroup.append(ColumnMap([run.reversed() for run in runs], columns, totals))

    def encoder(self, rows: Ints, device: torch.device) -> Change:
        """Encodes parcels of so many ``rows``, flat."""
        return self._turn(rows, device, 0, 1, lambda part, width: self.codec.encode(part.view(-1, width)))

    def decoder(self, rows: Ints, device: torch.device, dtype: torch.dtype) -> Change:
        """Decodes them."""

        def decoded(part: Tensor, width: int) -> Tensor:
            return self.codec.decode(part.view(-1, self.codec.encoded_width(width)), width, dtype)

        return self._turn(rows, device, 1, 0, decoded)

    def _turn(
        self, rows: Ints, device: torch.device, before: int, after: int, change: Callable[[Tensor, int], Tensor]
    ) -> Change:
        area_rows = rows[self.parcels]  # an area has the rows of its parcel
        group = self.group[before].bind(rows, area_rows, device)
        ungroup = self.ungroup[after].bind(area_rows, rows, device)
        # numbers of each width; none is without an area, so reduceat is right
        totals = np.add.reduceat(area_rows * self.group[before].target_widths, self.begins).tolist()

        def turn(flat: Tensor) -> Tensor:
            parts = zip(group(flat).split(totals), self.distinct, strict=True)
            return ungroup(torch.cat([change(part, width).view(-1) for part, width in parts]))

        return turn


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
