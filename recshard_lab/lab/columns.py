"""Where ranks stand: one column per rank, the same in the placement and the memory view, so that eyes can compare."""

from __future__ import annotations

from dataclasses import dataclass

from recshard_lab.lab.svg import Svg

MARGIN = 14


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

    def label_ranks(self, svg: Svg, y: float, bold: int | None = None) -> None:
        """Writes "rank 3" under the columns, or every n-th number where there is no room."""
        every = 1 if self.each >= 16 else 4 if self.each >= 6 else 8 if self.each >= 3.4 else 16
        for rank in range(0, self.count, every):
            words = f"rank {rank}" if self.each >= 44 else str(rank)
            svg.text(self.left(rank) + self.each / 2, y, words, anchor="middle", bold=rank == bold)
        if self.each < 44:
            svg.text(MARGIN, y + 14, "rank", soft=True)
