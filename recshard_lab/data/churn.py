"""Planted clicks whose ids leave for good: users go, and new users with ids that never occurred take their places.

Shape letters: b samples, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.arguments import checks_arguments
from recshard_lab.data.batch import Samples
from recshard_lab.data.clicks import SyntheticClicks, mixed, uniform

_U64 = np.uint64


class ChurningClicks(SyntheticClicks):
    """`SyntheticClicks` in which the ids of some features are replaced over time. A sample's number is its time.

    A churning feature has as many live ids as `rows` says. Each of them has the popularity of its place in the Zipf
    distribution. An id leaves after a fixed number of samples, which begins at another time for each place. Its
    successor is a new id with a new effect on the clicks. Ids are any int64 values: such a feature needs a dynamic
    table.

    Args:
        num_samples: number of samples.
        rows: live ids of each feature.
        churning: the features whose ids are replaced. Default: the first one, ``"cat_0"``.
        replaced: share of the live ids that leave during `per` samples.
        per: number of samples.
        options: other arguments of `SyntheticClicks`.

    Raises:
        ValueError: as of `SyntheticClicks`, an unknown feature, a `replaced` outside 0 to 1, a `per` below 1.

    >>> clicks = ChurningClicks(2000, rows=[50, 9], replaced=1.0, per=1000)
    >>> first, later = (set(clicks.ids(range(start, start + 1000))[:, 0].tolist()) for start in (0, 1000))
    >>> clicks.keys, 50 < len(first) <= 100, len(first & later) < len(first)
    (['cat_0', 'cat_1'], True, True)
    """

    @checks_arguments
    def __init__(
        self,
        num_samples: int,
        rows: Sequence[int],
        *,
        churning: Sequence[str] = ("cat_0",),
        replaced: float = 0.01,
        per: int = 100_000,
        **options: Any,
    ) -> None:
        if not 0 <= replaced <= 1 or per < 1:
            raise ValueError(f"replaced must be from 0 to 1 and per from 1, got {replaced} and {per}")
        keys = [f"cat_{number}" for number in range(len(rows))]
        for name in churning:
            if name not in keys:
                raise ValueError(f"churning has {name!r}, which is not a feature. Fix: use one of {', '.join(keys)}")
        self.churning, self.replaced, self.per = list(churning), replaced, per
        self._columns = [keys.index(name) for name in churning]
        super().__init__(num_samples, rows, **options)
        self.source += f", of {', '.join(churning)} {100 * replaced:g}% replaced per {per:,} samples"

    def ids(self, samples: Samples) -> NDArray[np.int64]:
        """The one id of each feature, int64 ``[b, F]``. Those of churning features are any int64 values."""
        ids = super().ids(samples)
        numbers = np.arange(samples.start, samples.stop) if isinstance(samples, range) else samples
        for column in self._columns:
            place = mixed(ids[:, column].astype(_U64) + self._feature[column])
            generation = np.floor(numbers * (self.replaced / self.per) + uniform(place)).astype(_U64)
            ids[:, column] = mixed(place + mixed(generation + _U64(1))).view(np.int64)
        return ids
