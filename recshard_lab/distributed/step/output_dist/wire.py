"""A message of rows: the number and widths of rows for each rank, and their encoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.comm import Codec, CommType, Pending, ShardingEnv, issue_all_gather, issue_all_to_all
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Memo, Run, starts_of


@dataclass(frozen=True, slots=True)
class Parcel:
    """``rows`` rows; each holds embedding rows of these ``widths``, side by side."""

    rows: int
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements, flat."""
        return self.rows * sum(self.widths)


Load = Sequence[Parcel]
"""The parcels for one rank, one after the other."""


def size_of(load: Load) -> int:
    """Elements before encoding."""
    return sum(parcel.size for parcel in load)


@dataclass(slots=True)
class Arriving:
    """A message that was issued."""

    pending: Pending
    wire: "Wire"
    parcels: list[Parcel]
    dtype: torch.dtype
    buffer_bytes: int

    def wait(self) -> Tensor:
        """The received rows, flat, sender after sender."""
        return self.wire.decode(self.pending.wait(), self.parcels, self.dtype)


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
        self._by_width = Memo[_ByWidth](keep=2)

    def send(self, flat: Tensor, sends: Sequence[Load], receives: Sequence[Load]) -> Arriving:
        """Sends load k of ``flat`` to rank k."""
        message = self.encode(flat, [parcel for load in sends for parcel in load])
        out, back = [self._size(load) for load in sends], [self._size(load) for load in receives]
        pending = issue_all_to_all(message, out, back, self.env, self.label)
        held = (sum(out) + sum(back)) * message.element_size()
        return Arriving(pending, self, [parcel for load in receives for parcel in load], flat.dtype, held)

    def gather(self, flat: Tensor, parcel: Parcel) -> Arriving:
        """Sends a parcel, of one shape on all ranks, to every rank."""
        message = self.encode(flat, [parcel])
        world = self.env.world_size
        held = message.numel() * (1 + world) * message.element_size()
        return Arriving(issue_all_gather(message, self.env, self.label), self, [parcel] * world, flat.dtype, held)

    def encode(self, flat: Tensor, parcels: Sequence[Parcel]) -> Tensor:
        """Encoded rows, flat."""
        codec = self.codec
        if codec is None or flat.numel() == 0:
            return flat if codec is None else flat.new_empty(0, dtype=codec.wire_dtype)
        width = self._one_width(parcels)
        if width is not None:
            return codec.encode(flat.view(-1, width)).view(-1)
        return self._grouped(parcels).encode(flat, [parcel.rows for parcel in parcels])

    def decode(self, flat: Tensor, parcels: Sequence[Parcel], dtype: torch.dtype) -> Tensor:
        """The rows that `encode` received, within the codec's error."""
        codec = self.codec
        if codec is None or flat.numel() == 0:
            return flat.to(dtype)
        width = self._one_width(parcels)
        if width is not None:
            return codec.decode(flat.view(-1, codec.encoded_width(width)), width, dtype).view(-1)
        return self._grouped(parcels).decode(flat, [parcel.rows for parcel in parcels], dtype)

    def _grouped(self, parcels: Sequence[Parcel]) -> "_ByWidth":
        assert self.codec is not None
        widths, codec = tuple(parcel.widths for parcel in parcels), self.codec
        return self._by_width.get(widths, lambda: _ByWidth(widths, codec))

    def _size(self, load: Load) -> int:
        codec = self.codec
        if codec is None or not codec.row_wise:
            return size_of(load)
        return sum(parcel.rows * sum(codec.encoded_width(width) for width in parcel.widths) for parcel in load)

    def _one_width(self, parcels: Sequence[Parcel]) -> int | None:
        """The width with which the codec can encode the whole message at once."""
        if self.codec is not None and not self.codec.row_wise:
            return 1
        widths = {width for parcel in parcels if parcel.rows for width in parcel.widths}
        return next(iter(widths)) if len(widths) == 1 else None


class _ByWidth:
    """A message grouped by the width of its rows, so that the codec is called once for each width.

    Args:
        widths: of each parcel.
        codec: the format on the wire.
    """

    def __init__(self, widths: Sequence[tuple[int, ...]], codec: Codec) -> None:
        self.codec, self.distinct = codec, sorted({width for parcel in widths for width in parcel})
        self.areas = [(width, n) for width in self.distinct for n, parcel in enumerate(widths) if width in parcel]
        place = {area: number for number, area in enumerate(self.areas)}
        self.sizes, self.parcel_sizes = [], []  # columns of each area and of each parcel: plain, encoded
        self.group, self.ungroup = [], []
        for size_of_row in (lambda width: width, codec.encoded_width):
            columns, runs = [0] * len(self.areas), []
            for n, parcel in enumerate(widths):
                ends = accumulate(map(size_of_row, parcel), initial=0)
                for width, source in zip(parcel, ends, strict=False):
                    area, size = place[width, n], size_of_row(width)
                    runs.append(Run(n, source, columns[area], size, area))
                    columns[area] += size
            totals = [sum(map(size_of_row, parcel)) for parcel in widths]
            self.sizes.append(columns)
            self.parcel_sizes.append(totals)
            self.group.append(ColumnMap(runs, totals, columns, keep=1))
            self.ungroup.append(ColumnMap([run.reversed() for run in runs], columns, totals, keep=1))

    def encode(self, flat: Tensor, rows: Sequence[int]) -> Tensor:
        """Encoded parcels, flat; ``rows`` are those of each parcel."""
        return self._turn(flat, rows, 0, 1, lambda part, width: self.codec.encode(part.view(-1, width)))

    def decode(self, flat: Tensor, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decoded parcels, flat."""

        def decoded(part: Tensor, width: int) -> Tensor:
            return self.codec.decode(part.view(-1, self.codec.encoded_width(width)), width, dtype)

        return self._turn(flat, rows, 1, 0, decoded)

    def _turn(
        self, flat: Tensor, rows: Sequence[int], before: int, after: int, change: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        area_rows = [rows[n] for _, n in self.areas]
        grouped = self.group[before](flat, starts_of(rows, self.parcel_sizes[before]), area_rows)
        totals = dict.fromkeys(self.distinct, 0)
        for (width, _), count, size in zip(self.areas, area_rows, self.sizes[before], strict=True):
            totals[width] += count * size
        parts = zip(grouped.split(list(totals.values())), self.distinct, strict=True)
        changed = torch.cat([change(part, width).view(-1) for part, width in parts])
        return self.ungroup[after](changed, starts_of(area_rows, self.sizes[after]), rows)
