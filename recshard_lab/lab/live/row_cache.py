"""RowCache: simulates a cache of rows in front of a table from the ids of real lookups. No row is cached.

It evicts the least recently used rows, one batch at a time, as caches of embedding rows do. A batch's distinct rows are
loaded before its lookups, and rows that the batch uses stay. If the batch uses more rows than fit, the rest bypasses
the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowCache:
    """Counters of a cache for `capacity` of `rows` rows.

    Attributes:
        hits: lookups of rows that were in the cache before their batch.
        misses: the other lookups.
        evictions: rows that were removed.

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
        self._last = np.zeros(rows, dtype=np.int64)  # number of the last batch that used it
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
            order = self._last[idle] * self.rows + idle  # of equally old rows the first is removed
            victims = idle[np.argpartition(order, short - 1)[:short]] if short < len(idle) else idle
            self._held[victims] = False
            self.evictions += len(victims)
            self.held_rows = self.held_rows[self._held[self.held_rows]]
        brought = new[: self.capacity - len(self.held_rows)]
        self._held[brought] = True
        self.held_rows = np.concatenate([self.held_rows, brought])
