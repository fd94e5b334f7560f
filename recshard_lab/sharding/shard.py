"""The rectangle, and the error of every plan that cannot be."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recshard_lab.sharding.tiling import Rect


class PlanError(ValueError):
    """A plan that cannot be: it leaves a hole, overlaps, names an unknown table or rank, or does not fit."""


HBM, DDR = "hbm", "ddr"
TIERS = (HBM, DDR)
"""Memories of a rank: its device's own, and the host's. On ranks that are CPUs both are the same memory."""


@dataclass(frozen=True, order=True, slots=True, repr=False)
class Shard:
    """One rectangle of one table: ``rows [r0, r1) x cols [c0, c1)`` on ``rank``, in one of its memories.

    Args:
        tier: "hbm", the device's memory; "ddr", the host's, larger and slower.

    >>> Shard(rank=1, rows=(0, 500), cols=(0, 64)).num_elements
    32000
    """

    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    tier: str = HBM

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

    def __repr__(self) -> str:
        slow = "" if self.tier == HBM else f", tier={self.tier!r}"
        return f"Shard(rank={self.rank!r}, rows={self.rows!r}, cols={self.cols!r}{slow})"


def rect_text(rect: "Rect") -> str:
    """A rectangle as messages spell it.

    >>> rect_text(((0, 1682), (0, 16)))
    'rows [0, 1,682) x cols [0, 16)'
    """
    (r0, r1), (c0, c1) = rect
    return f"rows [{r0:,}, {r1:,}) x cols [{c0:,}, {c1:,})"
