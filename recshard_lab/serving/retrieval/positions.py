"""Where the vector of each item id is stored.

Shape letters: N items, M items of one call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recshard_lab.serving.retrieval.checks import Ids


class Positions(NamedTuple):
    """Item ids in ascending order and their positions; never changed in place. 16 bytes an item.

    Attributes:
        ids: ``[N]``, ascending.
        at: ``[N]``, the position of each.
    """

    ids: Ids
    at: Ids

    @staticmethod
    def of(ids: Ids, at: Ids) -> Positions:
        """Of ids in any order.

        >>> Positions.of(np.array([7, -2]), np.array([0, 1])).find(np.array([7]))
        array([0])
        """
        order = np.argsort(ids, kind="stable")
        return Positions(ids[order], at[order])

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """``[M]``: which ids are items."""
        if not len(self.ids):
            return np.zeros(len(ids), dtype=bool)
        found: npt.NDArray[np.bool_] = self.ids[np.minimum(self._places(ids), len(self.ids) - 1)] == ids
        return found

    def find(self, ids: Ids) -> Ids:
        """``[M]``: positions of items.

        Raises:
            ValueError: an id that the index does not contain.
        """
        known = self.has(ids)
        if not known.all():
            raise ValueError(
                f"item {ids[~known][0]} is not in the index of {len(self.ids)} items. Fix: index.add(vectors, ids)"
            )
        return self.at[self._places(ids)]

    def added(self, ids: Ids, at: Ids) -> Positions:
        """With further items.

        Raises:
            ValueError: an id that is an item.
        """
        known = self.has(ids)
        if known.any():
            raise ValueError(f"item {ids[known][0]} is already in the index. Fix: index.replace(vectors, ids)")
        order = np.argsort(ids, kind="stable")
        places = self._places(ids[order])
        return Positions(np.insert(self.ids, places, ids[order]), np.insert(self.at, places, at[order]))

    def moved(self, ids: Ids, at: Ids) -> Positions:
        """With other positions of items."""
        changed = self.at.copy()
        changed[self._places(ids)] = at
        return Positions(self.ids, changed)

    def removed(self, ids: Ids) -> Positions:
        """Without some items."""
        places = self._places(ids)
        return Positions(np.delete(self.ids, places), np.delete(self.at, places))

    def _places(self, ids: Ids) -> npt.NDArray[np.intp]:
        return np.searchsorted(self.ids, ids)
