"""Ids and rows as bytes, and errors of stores that outlive the process."""

from __future__ import annotations

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


def records_of(values: list[bytes | None], format: RowFormat) -> Tensor:
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


def check_place(name: str, stored: str, own: str) -> None:
    """Raises ValueError if a state names another place than this tier's."""
    if stored != own:
        raise ValueError(
            f"the state's tier {name!r} is {stored}, and the table's is {own}. Fix: build the table with the tier of "
            f"the state"
        )
