"""What belongs to a table and moves with it: its weights, and the optimizer state beside them.

A part is stored by rectangle, as the weights are. What a rectangle stores of it is its *extent*::

    element     one number a weight        [rows, cols]     weights, Adagrad's sums
    row         one number a row           [rows]           row-wise Adagrad's sums: under column splits every
                                                            rectangle of a row has the same copy
    table       one number a table         [1] or []        iteration counts: every rectangle has the same copy

Seen as a matrix, each is a tiling (with copies) that `reshard.move` can move.
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
    """One tensor of every rectangle of a table.

    Args:
        name: "weight", or the state's name as fbgemm spells it ("momentum1").
        extent: what it has one number for.
        dtype: its number format.
    """

    name: str
    extent: Extent
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor, num_rows: int, num_cols: int) -> "Part":
        """The part that a rectangle's tensor belongs to.

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
            f"state {name!r} of a {num_rows} x {num_cols} piece has shape {list(shape)}: nobody moves that"
        )

    def matrix(self, tensor: Tensor) -> Tensor:
        """``[rows, cols]``, ``[rows, 1]`` or ``[1, 1]``: the tensor itself, seen as `shards` describes it."""
        return tensor if self.extent == "element" else tensor.view(-1, 1)

    def shards(self, shards: Sequence[Shard]) -> list[Shard]:
        """Where the matrices of these rectangles lie in the whole one."""
        if self.extent == "element":
            return list(shards)
        if self.extent == "row":
            return [Shard(shard.rank, shard.rows, (0, 1), shard.tier) for shard in shards]
        return [Shard(shard.rank, (0, 1), (0, 1), shard.tier) for shard in shards]

    def size(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Shape of the whole matrix of a table ``[num_rows, num_cols]``."""
        return {"element": (num_rows, num_cols), "row": (num_rows, 1), "table": (1, 1)}[self.extent]

    def bytes_of(self, shard: Shard) -> int:
        """Bytes that one rectangle stores."""
        rows, cols = self.size(shard.num_rows, shard.num_cols)
        return rows * cols * self.dtype.itemsize


def owned(shards: Sequence[Shard], extent: Extent = "row") -> list[tuple[int, Shard]]:
    """Of matrices with copies, who speaks for which rows: (position, rows it owns), every cell exactly once.

    Of what has one number a row or a table, the first column piece of a row does (the first in the list among equals);
    of what has one number a weight, the first of equal rectangles.

    >>> owned([Shard(1, (0, 4), (0, 1)), Shard(0, (0, 2), (0, 1)), Shard(0, (2, 6), (0, 1))])
    [(0, Shard(rank=1, rows=(0, 4), cols=(0, 1))), (2, Shard(rank=0, rows=(4, 6), cols=(0, 1)))]
    """
    if extent == "element":
        distinct = {shard.rect: number for number, shard in reversed(list(enumerate(shards)))}
        return [(number, shards[number]) for number in sorted(distinct.values())]
    found = []
    edges = sorted({edge for shard in shards for edge in shard.rows})
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(edges):
        position = next((n for n, shard in enumerate(shards) if shard.rows[0] <= start and end <= shard.rows[1]), None)
        if position is not None:
            if position in starts and starts[position][1] == start:
                starts[position][1] = end
                continue
            if position in starts:
                found.append((position, _rows(shards[position], *starts.pop(position))))
            starts[position] = [start, end]
    found += [(position, _rows(shards[position], *span)) for position, span in starts.items()]
    return sorted(found, key=lambda entry: entry[1].rows)


def _rows(shard: Shard, start: int, end: int) -> Shard:
    return Shard(shard.rank, (start, end), shard.cols, shard.tier)
