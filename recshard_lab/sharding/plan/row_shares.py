"""How a table's lookups spread over its rows, in id order: the input of splits that balance lookups.

The share of the lookups that reads rows ``[0, r)`` is a piecewise linear curve. The ids may be in any order: `of_ids`
measures them as they are, `zipf` assumes that they are sorted by use.

Shape letters: E rows, n segments of the curve, N ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.sharding.plan.types import PlanError

Array = NDArray[np.float64]

MAX_SEGMENTS = 512  # of a measured curve


def in_turn(batches: Any) -> Iterator[Any]:
    """An iterator over the batches."""
    try:
        return iter(batches)
    except TypeError:
        raise ValueError(f"batches must be a list or another iterable, got {batches!r:.60}. Fix: [batch]") from None


def ids_in(batch: Any) -> NDArray[Any]:
    """Whole numbers as a flat numpy array. Tensors may be on any device.

    Raises:
        ValueError: something else.
    """
    try:
        found = np.asarray(batch.detach().cpu() if hasattr(batch, "detach") else batch).reshape(-1)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"ids must be an array or a tensor of whole numbers: {error}. Fix: torch.tensor(ids)"
        ) from None
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"ids must be whole numbers, got {found.dtype}. Fix: ids.long()")
    return found


@checks_arguments
@dataclass(frozen=True)
class RowShares:
    """The share of the lookups that reads the first rows of a table.

    Args:
        edges: rows ``[n + 1]`` from 0 to E, ascending; lookups spread evenly over the rows between two edges.
        shares: ``[n + 1]`` share of the lookups that reads rows ``[0, edges[i])``, from 0 to 1, non-decreasing.

    Raises:
        ValueError: lists of different lengths, or with other first and last values.

    >>> hot = RowShares(edges=(0, 10, 100), shares=(0.0, 0.9, 1.0))
    >>> round(float(hot.share(0, 10)), 3), round(float(hot.share(10, 55)), 3), hot.rows_for(0.45)
    (0.9, 0.05, 5)
    """

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        edges, shares = np.array(self.edges, dtype=float), np.array(self.shares, dtype=float)
        if len(edges) != len(shares) or len(edges) < 2:
            raise ValueError(
                f"edges and shares must have one length of at least 2, got {len(edges)} and {len(shares)}. Fix: give "
                f"one share for each edge"
            )
        if edges[0] != 0 or not (np.diff(edges) > 0).all() or not np.isfinite(edges).all():
            raise ValueError(f"edges must ascend from 0 to the table's rows, got {self.edges!r:.80}. Fix: sort them")
        if shares[0] != 0 or abs(shares[-1] - 1) > 1e-6 or not (np.diff(shares) >= 0).all():
            raise ValueError(f"shares must rise from 0 to 1, got {self.shares!r:.80}. Fix: divide by the last")

    @classmethod
    def of_curve(cls, edges: Sequence[float] | Array, mass: Sequence[float] | Array) -> "RowShares":
        """From the lookups between the edges, in any unit; uniform if all are 0."""
        ends, lookups = np.asarray(edges, dtype=float), np.asarray(mass, dtype=float)
        if not lookups.sum() > 0:
            lookups = np.diff(ends)
        shares = np.concatenate([[0.0], np.cumsum(lookups)])
        return cls(tuple(ends.tolist()), tuple((shares / shares[-1]).tolist()))

    @classmethod
    @checks_arguments
    def of_ids(cls, batches: Iterable[Any], num_embeddings: int) -> "RowShares":
        """Counts ids, in at most 512 segments: half with equal lookups, half of geometrically growing width.

        Args:
            batches: arrays or tensors of ids, one per batch, integers of any shape.
            num_embeddings: rows of the table, E.

        Raises:
            ValueError: no ids, or an id outside the table.

        >>> float(RowShares.of_ids([[0, 0, 0, 7]], num_embeddings=8).share(0, 1))
        0.75
        """
        _check_rows(num_embeddings)
        try:
            uses = np.zeros(num_embeddings)
        except MemoryError:
            raise ValueError(
                f"num_embeddings={num_embeddings}: counts of these rows do not fit in memory. Fix: RowShares.zipf"
            ) from None
        for batch in in_turn(batches):
            ids = ids_in(batch)
            if ids.size and not 0 <= ids.min() <= ids.max() < num_embeddings:
                raise ValueError(
                    f"ids must be rows 0 to {num_embeddings - 1:,}, got {ids.min()} to {ids.max()}. Fix: pass the "
                    f"table's num_embeddings"
                )
            rows, times = np.unique(ids, return_counts=True)
            uses[rows] += times
        total = uses.cumsum()
        if not total[-1]:
            raise ValueError("the batches contain 0 ids, at least 1 is required. Fix: pass batches of this feature")
        even = np.searchsorted(total, np.linspace(0, total[-1], MAX_SEGMENTS // 2)[1:-1]) + 1
        edges = np.unique(
            [0, *np.geomspace(1, num_embeddings, MAX_SEGMENTS // 2).round().astype(int), *even, num_embeddings]
        )
        return cls.of_curve(edges, np.diff(np.concatenate([[0.0], total])[edges]))

    @classmethod
    @checks_arguments
    def zipf(cls, num_embeddings: int, alpha: float) -> "RowShares":
        """For ids sorted by use: row k is read in proportion to ``(k + 1) ** -alpha``.

        >>> top = RowShares.zipf(num_embeddings=1000, alpha=1.0)
        >>> 0.38 < float(top.share(0, 10)) < 0.40  # (1 + 1/2 + ... + 1/10) / (1 + 1/2 + ... + 1/1000)
        True
        """
        _check_rows(num_embeddings)
        if not 0 <= alpha < 100:
            raise ValueError(f"alpha must be from 0 to 100, got {alpha!r}. Fix: alpha=1.05")
        first = np.arange(0.0, min(16, num_embeddings) + 1)
        edges, mass = first, first[1:] ** -alpha
        if num_embeddings > 16:
            rest = np.unique(np.geomspace(16, num_embeddings, 97).round())
            middle = rest + 0.5
            power = 1.0 - alpha
            primitive = np.log(middle) if abs(power) < 1e-9 else middle**power / power
            edges, mass = np.concatenate([edges, rest[1:]]), np.concatenate([mass, np.diff(primitive)])
        return cls.of_curve(edges, mass)

    @property
    def num_rows(self) -> int:
        """Rows of the table, E."""
        return int(self.edges[-1])

    @checks_arguments
    def share(self, start: float | Array, end: float | Array) -> Array:
        """The share of the lookups that reads rows ``[start, end)``; numbers or arrays."""
        return np.asarray(np.interp(end, self.edges, self.shares) - np.interp(start, self.edges, self.shares))

    @names_wrong_arguments
    def rows_for(self, share: float) -> int:
        """The minimum number of rows, from row 0, that receive this share of the lookups."""
        if not 0 <= float(share) <= 1:
            raise ValueError(f"share must be from 0 to 1, got {share!r}. Fix: 0.9 is 90%")
        shares, keep = np.unique(self.shares, return_index=True)
        return int(np.ceil(np.interp(share, shares, np.array(self.edges)[keep]) - 1e-9))

    @checks_arguments
    def distinct(self, start: float | Array, end: float | Array, num_ids: float) -> Array:
        """Expected distinct rows of ``[start, end)`` among `num_ids` ids of the whole table.

        ``sum over rows of 1 - exp(-N p)``: ids are assumed to be drawn independently.
        """
        if not 0 <= num_ids < float("inf"):
            raise ValueError(f"num_ids must be finite and not negative, got {num_ids!r}. Fix: num_ids=1000")
        edges, mass = np.array(self.edges), np.diff(self.shares)
        width = np.diff(edges)
        touched = np.concatenate([[0.0], np.cumsum(width * -np.expm1(-num_ids * mass / width))])
        return np.asarray(np.interp(end, edges, touched) - np.interp(start, edges, touched))

    @names_wrong_arguments
    def sizes(self, count: int, *, first_row: int = 0, evenness: float = 1.0, end_row: int | None = None) -> list[int]:
        """Rows of `count` row shards, from `first_row` on, that serve equal numbers of lookups.

        Args:
            count: number of shards.
            first_row: first row of the first shard.
            end_row: end of the last shard. Default: the table's end.
            evenness: 1 for equal lookups, 0 for equal rows. Values between weight both.

        Returns:
            Rows of each shard; 0 means that the shard is empty. They sum to ``end_row - first_row``.

        Raises:
            PlanError: `count` below 1, rows outside the table, or an evenness outside [0, 1].

        >>> RowShares.zipf(num_embeddings=1000, alpha=1.0).sizes(4)
        [3, 20, 131, 846]
        """
        count, first_row, evenness = index(count), index(first_row), float(evenness)
        end = self.num_rows if end_row is None else index(end_row)
        if count < 1 or not 0 <= first_row < end <= self.num_rows or not 0 <= evenness <= 1:
            raise PlanError(
                f"sizes(count={count!r}, first_row={first_row!r}, end_row={end_row!r}, evenness={evenness!r}): "
                f"expected count >= 1, rows within [0, {self.num_rows:,}), and an evenness from 0 to 1. Fix: sizes(4)"
            )
        edges = np.array([first_row, *(edge for edge in self.edges if first_row < edge < end), end])
        lookups = np.interp(edges, self.edges, self.shares) - np.interp(first_row, self.edges, self.shares)
        rows = (edges - first_row) / (edges[-1] - first_row)
        load = evenness * lookups / lookups[-1] + (1 - evenness) * rows if lookups[-1] > 0 else rows
        load, keep = np.unique(load, return_index=True)
        boundaries = np.interp(np.arange(1, count) / count, load, edges[keep]).round().astype(int)
        return np.diff([first_row, *boundaries.tolist(), end]).tolist()


def _check_rows(num_embeddings: int) -> None:
    if not 1 <= num_embeddings < 2**63:
        raise ValueError(f"num_embeddings must be from 1 to 2 ** 63 - 1, got {num_embeddings!r}. Fix: the table's rows")
