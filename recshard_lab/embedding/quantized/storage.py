"""The bytes of all tables of a collection, in one tensor: kernels take one address and find every table by its start.

Tables of one format and width are neighbours, so that their rows are the rows of one matrix.

Shape letters: E rows of a table, R bytes of a row, P bytes of a row with padding, C rows of all tables of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.embedding.quantized.formats import row_bytes

_TABLE_ALIGNMENT = 128  # the first table of a class starts on a cache line
_CUDA_ROW_ALIGNMENT = 16  # CUDA kernels load 16 bytes at a time


def row_alignment(device: torch.device) -> int:
    """Rows start at multiples of this many bytes."""
    return _CUDA_ROW_ALIGNMENT if device.type == "cuda" else 1


class Place(NamedTuple):
    """Where one table is stored.

    Attributes:
        start: its first byte.
        rows: E.
        dim: columns.
        kind: its number format.
        row_bytes: R.
        stride: P.
        class_start: first byte of the tables of the same format and width, which are neighbours.
        class_rows: C.
    """

    start: int
    rows: int
    dim: int
    kind: DataType
    row_bytes: int
    stride: int
    class_start: int
    class_rows: int


class PackedTables:
    """Tables in one tensor of bytes. All numbers are zero at first.

    Args:
        tables: their configs, in the order of `places`.
        device: ``"meta"`` allocates nothing.

    Raises:
        ValueError: a table that cannot be stored in its number format.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], device: torch.device) -> None:
        self.tables = list(tables)
        self.alignment = row_alignment(device)
        classes: dict[tuple[DataType, int], list[int]] = {}
        for number, table in enumerate(tables):
            classes.setdefault((table.data_type, table.embedding_dim), []).append(number)
        places: dict[int, Place] = {}
        end = 0
        for (kind, dim), members in classes.items():
            used = row_bytes(tables[members[0]])
            stride = -(-used // self.alignment) * self.alignment
            first = start = -(-end // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
            rows = sum(tables[number].num_embeddings for number in members)
            for number in members:
                own = tables[number].num_embeddings
                places[number] = Place(start, own, dim, kind, used, stride, first, rows)
                start += own * stride
            end = start
        self.places = [places[number] for number in range(len(tables))]
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)

    def rows_of(self, number: int) -> Tensor:
        """``[E, R]``: a view of one table, without padding."""
        place = self.places[number]
        return rows_in(self.flat, place.start, place.rows, place)


def rows_in(flat: Tensor, start: int, rows: int, place: Place) -> Tensor:
    """``[rows, R]``: a view of rows like those of `place`, from byte ``start`` of ``flat``, which may be a view too."""
    return flat.narrow(0, start, rows * place.stride).view(rows, place.stride).narrow(1, 0, place.row_bytes)
