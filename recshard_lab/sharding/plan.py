"""A sharding plan is a tiling: every shard of every table is a rectangle on a rank.

::

    Shard(rank=1, rows=(0, 500), cols=(0, 64))    rows [r0, r1) x columns [c0, c1), held by rank 1

Table-wise is one rectangle, row-wise W horizontal stripes, column-wise vertical stripes; data-parallel is the
whole rectangle on every rank, and the only kind whose rectangles may lie on top of one another.
"""

from dataclasses import dataclass


class PlanError(ValueError):
    """A plan that cannot be: it leaves a hole, overlaps, names an unknown table or rank, or does not fit."""


@dataclass(frozen=True, order=True, slots=True)
class Shard:
    """One rectangle of one table: ``rows [r0, r1) x cols [c0, c1)`` on ``rank``.

    >>> Shard(rank=1, rows=(0, 500), cols=(0, 64)).num_elements
    32000
    """

    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_cols(self) -> int:
        return self.cols[1] - self.cols[0]

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_cols
