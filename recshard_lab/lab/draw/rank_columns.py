"""Where ranks stand: one column per rank, the same in the placement and the memory view, so that eyes can compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recshard_lab.lab.draw.svg import Svg, fit

MARGIN = 14


def nodes_of(ranks: int, local: int | None) -> list[tuple[int, int, str]]:
    """(first rank, end, name) of every node; none where all ranks are on one.

    >>> nodes_of(4, 2)
    [(0, 2, 'node 0'), (2, 4, 'node 1')]
    """
    if not local or local >= ranks or ranks % local:
        return []
    return [(first, first + local, f"node {first // local}") for first in range(0, ranks, local)]


@dataclass(frozen=True)
class Columns:
    """``count`` columns of equal width across a picture."""

    count: int
    width: float  # of the picture

    @property
    def gap(self) -> float:
        return 10 if self.count <= 8 else 6 if self.count <= 16 else 1.5 if self.count <= 64 else 0.6

    @property
    def each(self) -> float:
        """Width of one column; a lone column does not fill the page."""
        room = self.width - 2 * MARGIN - self.gap * (self.count - 1)
        return min(room / max(self.count, 1), 300)

    @property
    def legible(self) -> bool:
        """Whether a column is wide enough for words."""
        return self.each >= 34

    def left(self, rank: int) -> float:
        return MARGIN + rank * (self.each + self.gap)

    @property
    def right(self) -> float:
        return self.left(max(self.count - 1, 0)) + self.each

    def frame(self, svg: Svg, y: float, sets: Sequence[tuple[int, int, str]]) -> None:
        """Brackets over runs of columns (first, end, name), such as the ranks of a node."""
        for first, end, name in sets:
            left, right = self.left(first), self.left(end - 1) + self.each
            svg.path(f"M{left:.1f} {y + 5:.1f}v-5h{right - left:.1f}v5", 'fill="none" stroke="currentColor"')
            words = fit([name, name.split()[-1]], right - left, 10) if right - left >= 8 else ""
            svg.text((left + right) / 2, y - 4, words, anchor="middle", size=10, bold=True)

    def label_ranks(self, svg: Svg, y: float, bold: int | None = None, numbers: Sequence[int] | None = None) -> None:
        """Writes "rank 3" under the columns, or every n-th number where there is no room.

        Args:
            bold: a column that stands out.
            numbers: of the ranks, where they are not in order.
        """
        every = 1 if self.each >= 16 else 4 if self.each >= 6 else 8 if self.each >= 3.4 else 16
        for rank in range(0, self.count, every):
            number = rank if numbers is None else numbers[rank]
            words = f"rank {number}" if self.each >= 44 else str(number)
            svg.text(self.left(rank) + self.each / 2, y, words, anchor="middle", bold=rank == bold)
        if self.each < 44:
            svg.text(MARGIN, y + 14, "rank", soft=True)
