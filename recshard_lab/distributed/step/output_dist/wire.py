"""A message of rows: the number and widths of rows for each rank, and their encoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from recshard_lab.comm import Codec, CommType, Pending, ShardingEnv, issue_all_gather, issue_all_to_all


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
        coded = []
        for rows, parcel in zip(flat.split([p.size for p in parcels]), parcels, strict=True):
            runs = _runs(parcel.widths)
            columns = rows.view(parcel.rows, -1).split([w * n for w, n in runs], 1) if rows.numel() else ()
            parts = [
                codec.encode(part.reshape(-1, w)).view(parcel.rows, -1)
                for part, (w, _) in zip(columns, runs, strict=bool(columns))
            ]
            coded += [torch.cat(parts, 1).view(-1)] if parts else []
        return torch.cat(coded)

    def decode(self, flat: Tensor, parcels: Sequence[Parcel], dtype: torch.dtype) -> Tensor:
        """The rows that `encode` received, within the codec's error."""
        codec = self.codec
        if codec is None or flat.numel() == 0:
            return flat.to(dtype)
        width = self._one_width(parcels)
        if width is not None:
            return codec.decode(flat.view(-1, codec.encoded_width(width)), width, dtype).view(-1)
        plain = []
        for rows, parcel in zip(flat.split([self._size([p]) for p in parcels]), parcels, strict=True):
            runs = _runs(parcel.widths)
            sizes = [codec.encoded_width(w) * n for w, n in runs]
            columns = rows.view(parcel.rows, -1).split(sizes, 1) if rows.numel() else ()
            parts = [
                codec.decode(part.reshape(-1, codec.encoded_width(w)), w, dtype).view(parcel.rows, -1)
                for part, (w, _) in zip(columns, runs, strict=bool(columns))
            ]
            plain += [torch.cat(parts, 1).view(-1)] if parts else []
        return torch.cat(plain)

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


def _runs(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(width, number of times in a row)."""
    return [(width, len(list(same))) for width, same in groupby(widths)]
