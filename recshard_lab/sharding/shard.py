"""The rectangle, and the error of every plan that cannot be."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recshard_lab.sharding.tiling import Rect


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

    @property
    def rect(self) -> "Rect":
        """The rectangle without its rank."""
        return (self.rows, self.cols)

    def __str__(self) -> str:
        return f"{rect_text(self.rect)} on rank {self.rank}"


def rect_text(rect: "Rect") -> str:
    """A rectangle as messages spell it.

    >>> rect_text(((0, 1682), (0, 16)))
    'rows [0, 1,682) x cols [0, 16)'
    """
    (r0, r1), (c0, c1) = rect
    return f"rows [{r0:,}, {r1:,}) x cols [{c0:,}, {c1:,})"
