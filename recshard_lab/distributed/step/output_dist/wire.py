"""A message of rows: the number and widths of rows for each rank, and their encoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import Codec, CommType, Pending, ShardingEnv, issue_all_gather, issue_all_to_all
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Ints, Memo, Run, starts_of


class Parcels:
    """What each rank gets in a message: parcels of rows, one after the other. Their numbers of rows change by step.

    Args:
        widths: for each rank and parcel, the widths of the embedding rows that stand side by side in a row of it.

    >>> Parcels([[(4,), (8, 8)], []]).sizes(np.array([3, 2]))
    [44, 0]
    """

    def __init__(self, widths: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self.widths = [parcel for own in widths for parcel in own]
        self.columns = np.array([sum(parcel) for parcel in self.widths], dtype=np.int64)
        self._ends = np.cumsum([0, *map(len, widths)])
        distinct = {width for parcel in self.widths for width in parcel}
        self.one_width = distinct.pop() if len(distinct) == 1 else None

    def sizes(self, rows: Ints, columns: Ints | None = None) -> list[int]:
        """Elements for each rank, before encoding.

        Args:
            rows: of each parcel.
            columns: of each parcel, if it has others than before encoding.
        """
        ends = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(rows * (self.columns if columns is None else columns), out=ends[1:])
        sizes: list[int] = np.diff(ends[self._ends]).tolist()
        return sizes


Load = tuple[Parcels, Ints]
"""Parcels, and the rows of each."""


@dataclass(slots=True)
class Arriving:
    """A message that was issued."""

    pending: Pending
    wire: "Wire"
    load: Load
    dtype: torch.dtype
    buffer_bytes: int

    def wait(self) -> Tensor:
        """The received rows, flat, sender after sender."""
        return self.wire.decode(self.pending.wait(), self.load, self.dtype)


class Wire:
    """Encodes, sends and decodes the rows of one direction.

    Args:
        env: the ranks.
        label: the name in traces.
        codec: the format on the wire.
    """

    def __init__(self, env: ShardingEnv, label: str, codec: Codec) -> None:
        self.env, self.label = env, label
        self.codec = None if codec.comm_type is CommType.FP32 else codec
        self._by_width, self._columns = Memo[_ByWidth](keep=2), Memo[Ints](keep=2)

    def send(self, flat: Tensor, sends: Load, receives: Load) -> Arriving:
        """Sends the parcels of ``flat`` to their ranks."""
        message = self.encode(flat, sends)
        out, back = self._sizes(*sends), self._sizes(*receives)
        pending = issue_all_to_all(message, out, back, self.env, self.label)
        held = (sum(out) + sum(back)) * message.element_size()
        return Arriving(pending, self, receives, flat.dtype, held)

    def gather(self, flat: Tensor, own: Parcels, every: Parcels, rows: int) -> Arriving:
        """Sends a parcel to every rank.

        Args:
            flat: the parcel.
            own: its layout.
            every: the layout of what arrives, such a parcel from each rank.
            rows: of each parcel.
        """
        message = self.encode(flat, (own, np.array([rows])))
        held = message.numel() * (1 + self.env.world_size) * message.element_size()
        load = every, np.full(self.env.world_size, rows)
        return Arriving(issue_all_gather(message, self.env, self.label), self, load, flat.dtype, held)

    def encode(self, flat: Tensor, load: Load) -> Tensor:
        """Encoded rows, flat."""
        codec = self.codec
        if codec is None or flat.numel() == 0:
            return flat if codec is None else flat.new_empty(0, dtype=codec.wire_dtype)
        width = self._one_width(load[0])
        if width is not None:
            return codec.encode(flat.view(-1, width)).view(-1)
        return self._grouped(load[0]).encode(flat, load[1])

    def decode(self, flat: Tensor, load: Load, dtype: torch.dtype) -> Tensor:
        """The rows that `encode` received, within the codec's error."""
        codec = self.codec
        if codec is None or flat.numel() == 0:
            return flat.to(dtype)
        width = self._one_width(load[0])
        if width is not None:
            return codec.decode(flat.view(-1, codec.encoded_width(width)), width, dtype).view(-1)
        return self._grouped(load[0]).decode(flat, load[1], dtype)

    def _grouped(self, parcels: Parcels) -> "_ByWidth":
        codec = self.codec
        assert codec is not None
        return self._by_width.get(parcels, lambda: _ByWidth(parcels.widths, codec))

    def _sizes(self, parcels: Parcels, rows: Ints) -> list[int]:
        codec = self.codec
        if codec is None or not codec.row_wise:
            return parcels.sizes(rows)
        widths = parcels.widths
        encoded = self._columns.get(
            parcels, lambda: np.array([sum(map(codec.encoded_width, parcel)) for parcel in widths], dtype=np.int64)
        )
        return parcels.sizes(rows, encoded)

    def _one_width(self, parcels: Parcels) -> int | None:
        """The width with which the codec can encode the whole message at once."""
        return 1 if self.codec is not None and not self.codec.row_wise else parcels.one_width


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
        self.sizes, self.parcel_sizes = [], []  # columns of each area and of each parcel: plain, encoded
        self.group, self.ungroup = [], []
        for size_of_row in (lambda width: width, codec.encoded_width):
            columns, runs = [0] * len(areas), []
            for n, parcel in enumerate(widths):
                ends = accumulate(map(size_of_row, parcel), initial=0)
                for width, source in zip(parcel, ends, strict=False):
                    area, size = place[width, n], size_of_row(width)
                    runs.append(Run(n, source, columns[area], size, area))
                    columns[area] += size
            totals = [sum(map(size_of_row, parcel)) for parcel in widths]
            self.sizes.append(np.array(columns, dtype=np.int64))
            self.parcel_sizes.append(np.array(totals, dtype=np.int64))
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
        grouped = self.group[before](flat, starts_of(rows, self.parcel_sizes[before]), area_rows)
        totals = np.add.reduceat(area_rows * self.sizes[before], self.begins).tolist()
        parts = zip(grouped.split(totals), self.distinct, strict=True)
        changed = torch.cat([change(part, width).view(-1) for part, width in parts])
        return self.ungroup[after](changed, starts_of(area_rows, self.sizes[after]), rows)
