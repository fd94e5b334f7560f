"""Ids and rows as bytes, and errors of stores that outlive the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.stores.base import RowFormat


def id_bytes(ids: Tensor) -> list[bytes]:
    """The 8 bytes of each id, highest first.

    >>> id_bytes(torch.tensor([258]))
    [b'\\x00\\x00\\x00\\x00\\x00\\x00\\x01\\x02']
    """
    data = ids.numpy().astype(">i8").tobytes()
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def ids_of(parts: list[bytes]) -> Tensor:
    """``[M]`` int64 of what `id_bytes` returned."""
    return torch.from_numpy(np.frombuffer(b"".join(parts), ">i8").astype(np.int64))


def records_of(values: Sequence[bytes | None], format: RowFormat) -> Tensor:
    """``[M, record bytes]`` uint8 of the values of M ids. Zeros for None."""
    nothing = bytes(format.record_bytes)
    data = bytearray().join(nothing if value is None else value for value in values)
    return torch.from_numpy(np.frombuffer(data, np.uint8)).view(len(values), format.record_bytes)


def check_format(name: str, place: str, known: str, format: RowFormat) -> None:
    """Raises ValueError if a place has rows of another format."""
    if known != str(format):
        raise ValueError(
            f"tier {name!r}: {place} has rows of {known}, and the table has {format}. Fix: pass another path or url, "
            f"or use the optimizer and number format of those rows"
        )


def check_parts(name: str, place: str, part: str, others: Iterable[str]) -> None:
    """Raises ValueError if a place has rows of another sharding, which this shard would not find.

    Args:
        name: of the tier.
        place: of the table's shards.
        part: this shard, as `part_name` returned it.
        others: shards that are there.

    >>> check_parts("disk", "/rows", part_name((0, 4), (0, 8)), [part_name((4, 8), (0, 8))])
    """
    own = _edges(part)
    for other in others:
        (first, end), (left, right) = _edges(other)
        both = max(first, own[0][0]) < min(end, own[0][1]) and max(left, own[1][0]) < min(right, own[1][1])
        if other != part and both:
            raise ValueError(
                f"tier {name!r}: {place} has rows of {other!r}, which the shard {part!r} would not find. Fix: use "
                f"the sharding of those rows, or pass another path or url"
            )


def part_name(partitions: tuple[int, int], columns: tuple[int, int]) -> str:
    """The name of a shard: its first partition and the one after its last, and the same of its columns."""
    return f"partitions-{partitions[0]}-{partitions[1]}_columns-{columns[0]}-{columns[1]}"


def _edges(part: str) -> list[tuple[int, int]]:
    return [(int(first), int(end)) for _, first, end in (axis.split("-") for axis in part.split("_"))]


def check_place(name: str, stored: str, own: str) -> None:
    """Raises ValueError if a state names another place than this tier's."""
    if stored != own:
        raise ValueError(
            f"the state's tier {name!r} is {stored}, and the table's is {own}. Fix: build the table with the tier of "
            f"the state"
        )
