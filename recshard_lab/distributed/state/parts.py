"""The tensors that move with a table: its weights and its optimizer states.

Each part has one tensor per shard. Its *extent* determines the shape::

    element     one number per weight      [rows, cols]     weights, Adagrad's sums
    row         one number per row         [rows]           row-wise Adagrad's sums; column shards of a row have copies
    table       one number per table       [1] or []        iteration counts; all shards have copies

As matrices they are tilings (with copies) that `moves.move` can move.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from recshard_lab.sharding import Shard

Extent: TypeAlias = Literal["element", "row", "table"]


@dataclass(frozen=True)
class Part:
    """One tensor of every shard of a table.

    Args:
        name: "weight", or fbgemm's name of the state ("momentum1").
        extent: "element", "row" or "table".
        dtype: its dtype.
        width: numbers of each row, where ``extent`` is "row".
        ratio: rows of this part, and the rows of the table that they are for, where ``extent`` is "row".
    """

    name: str
    extent: Extent
    dtype: torch.dtype
    width: int = 1
    ratio: tuple[int, int] = (1, 1)

    @property
    def is_matrix(self) -> bool:
        """Whether tensors have two axes."""
        return self.extent == "element" or self.width > 1

    @classmethod
    def of(cls, name: str, tensor: Tensor, num_rows: int, num_cols: int) -> "Part":
        """The part of a shard's tensor.

        Raises:
            ValueError: a shape that is neither ``[rows, cols]``, ``[rows]``, ``[rows, 1]`` nor a single number.

        >>> Part.of("momentum1", torch.zeros(5), num_rows=5, num_cols=4).extent
        'row'
        """
        shape = tuple(tensor.shape)
        extents: list[tuple[Extent, list[tuple[int, ...]]]] = [
            ("element", [(num_rows, num_cols)]),
            ("row", [(num_rows,), (num_rows, 1)]),
            ("table", [(), (1,)]),
        ]
        for extent, shapes in extents:
            if shape in shapes:
                return cls(name, extent, tensor.dtype)
        raise ValueError(
            f"state {name!r} of a {num_rows} x {num_cols} shard has shape {list(shape)}: expected one number per "
            f"weight, row or table"
        )

    def matrix(self, tensor: Tensor) -> Tensor:
        """The tensor as a matrix: ``[rows, cols]``, ``[rows, 1]`` or ``[1, 1]``, as in `shards`."""
        return tensor if self.is_matrix else tensor.view(-1, 1)

    def shards(self, shards: Sequence[Shard]) -> list[Shard]:
        """The matrices of these shards as shards of the whole matrix."""
        if self.extent == "element":
            return list(shards)
        if self.extent == "row":
            many, each = self.ratio
            rows = [(shard.rows[0] * many // each, shard.rows[1] * many // each) for shard in shards]
            return [Shard(s.rank, own, (0, self.width), s.tier) for s, own in zip(shards, rows, strict=True)]
        return [Shard(shard.rank, (0, 1), (0, 1), shard.tier) for shard in shards]

    def size(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Shape of the whole matrix of a table ``[num_rows, num_cols]``."""
        rows = num_rows * self.ratio[0] // self.ratio[1]
        return {"element": (num_rows, num_cols), "row": (rows, self.width), "table": (1, 1)}[self.extent]

    def bytes_of(self, shard: Shard) -> int:
        """Bytes per shard."""
        rows, cols = self.size(shard.num_rows, shard.num_cols)
        return rows * cols * self.dtype.itemsize


def primary_rows(shards: Sequence[Shard], extent: Extent = "row") -> list[tuple[int, Shard]]:
    """The primary copies of a tiling with copies: (position, its primary rows), each element exactly once.

    For extents "row" and "table", the first shard in the list that contains a row; for "element", the first of equal
    shards.

    >>> primary_rows([Shard(1, (0, 4), (0, 1)), Shard(0, (0, 2), (0, 1)), Shard(0, (2, 6), (0, 1))])
    [(0, Shard(rank=1, rows=(0, 4), cols=(0, 1))), (2, Shard(rank=0, rows=(4, 6), cols=(0, 1)))]
    """
    if extent == "element":
        distinct = {shard.rect: number for number, shard in reversed(list(enumerate(shards)))}
        return [(number, shards[number]) for number in sorted(distinct.values())]
    primaries = []
    edges = sorted({edge for shard in shards for edge in shard.rows})
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(edges):
        position = next((n for n, shard in enumerate(shards) if shard.rows[0] <= start and end <= shard.rows[1]), None)
        if position is not None:
            if position in starts and starts[position][1] == start:
                starts[position][1] = end
                continue
            if position in starts:
                primaries.append((position, _rows(shards[position], *starts.pop(position))))
            starts[position] = [start, end]
    primaries += [(position, _rows(shards[position], *span)) for position, span in starts.items()]
    return sorted(primaries, key=lambda entry: entry[1].rows)


def _rows(shard: Shard, start: int, end: int) -> Shard:
    return Shard(shard.rank, (start, end), shard.cols, shard.tier)
