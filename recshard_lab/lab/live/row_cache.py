"""RowCache: what a cache of so many rows in front of a table would hit, told the ids that are really looked up.

Nothing is cached: it keeps book. Least recently used rows go first, a batch at a time, as caches of embedding rows
work: a batch's distinct rows are brought in before its lookups, rows that this batch uses stay, and where it uses more
rows than fit, the rest is read around the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowCache:
    """Counts of a cache that holds `capacity` of `rows` rows.

    Attributes:
        hits: lookups of rows that were held when their batch came.
        misses: the other lookups.
        evictions: rows that made room.

    Raises:
        ValueError: a capacity that is not positive.

    >>> cache = RowCache(rows=10, capacity=2)
    >>> for batch in ([1, 1, 2], [1, 3], [2]):
    ...     cache.use(np.array(batch))
    >>> cache.hits, cache.misses, cache.evictions, sorted(cache.held_rows.tolist())
    (1, 5, 2, [2, 3])
    """

    def __init__(self, rows: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache must hold at least 1 row, got {capacity!r}")
        self.rows, self.capacity = rows, min(capacity, rows)
        self.hits = self.misses = self.evictions = 0
        self.held_rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._held = np.zeros(rows, dtype=bool)
        self._last = np.zeros(rows, dtype=np.int64)  # the batch that used it last
        self._batch = 0

    def use(self, ids: NDArray[np.int64]) -> None:
        """One batch's lookups ``[N]``."""
        self._batch += 1
        hit = int(np.count_nonzero(self._held[ids]))
        self.hits += hit
        self.misses += len(ids) - hit
        used = np.unique(ids)
        self._last[used] = self._batch
        new = used[~self._held[used]]
        short = len(new) - (self.capacity - len(self.held_rows))
        if short > 0:
            idle = self.held_rows[self._last[self.held_rows] < self._batch]
            order = self._last[idle] * self.rows + idle  # of equally old rows the first goes
            victims = idle[np.argpartition(order, short - 1)[:short]] if short < len(idle) else idle
            self._held[victims] = False
            self.evictions += len(victims)
            self.held_rows = self.held_rows[self._held[self.held_rows]]
        brought = new[: self.capacity - len(self.held_rows)]
        self._held[brought] = True
        self.held_rows = np.concatenate([self.held_rows, brought])
