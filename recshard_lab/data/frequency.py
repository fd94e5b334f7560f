"""Ids sorted by use: row 0 is the most used, as splits by access need it.

    counted ids      7 7 7 2 2 5          rows by use   7 2 5 0 1 3 4 6 ...     (unused ids keep their order)
    place of an id   7 -> 0, 2 -> 1, 5 -> 2, 0 -> 3, ...

A permutation of each table's rows, applied to ids before the model sees them. It belongs to the weights: keep its
`state_dict` beside them (as ``extra`` of a checkpoint), and apply the same one to all later ids.

Shape letters: E rows, N ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.sparse import KeyedJaggedTensor


class Table(Protocol):
    """What is asked of a table's config."""

    name: str
    num_embeddings: int
    feature_names: list[str]


class FrequencyOrder:
    """Renumbers ids by use; a transform of batches, for `BatchLoader(transform=...)` or by hand.

    Args:
        places: table -> ``[E]`` int64, the new id of each id: a permutation.
        features: feature -> table.

    Raises:
        ValueError: not a permutation, or a feature of an unknown table.

    >>> order = FrequencyOrder({"movies": torch.tensor([2, 0, 1])}, {"seen": "movies"})
    >>> bags = KeyedJaggedTensor(["seen"], torch.tensor([1, 1, 2]), lengths=torch.tensor([2, 1]))
    >>> order(bags).values(), order.inverse()(order(bags)).values()
    (tensor([0, 0, 1]), tensor([1, 1, 2]))
    """

    @names_wrong_arguments
    def __init__(self, places: Mapping[str, Tensor], features: Mapping[str, str]) -> None:
        for name, place in places.items():
            if place.dtype is not torch.int64 or place.dim() != 1:
                raise ValueError(f"table {name!r}: places must be [E] of int64, got {list(place.shape)}, {place.dtype}")
            if not torch.equal(place.sort().values, torch.arange(place.numel())):
                raise ValueError(f"table {name!r}: places must be a permutation of 0 to {place.numel() - 1}")
        for feature, name in features.items():
            if name not in places:
                raise ValueError(f"feature {feature!r} belongs to table {name!r}, of which no places are given")
        self.places, self.features = dict(places), dict(features)

    @classmethod
    @names_wrong_arguments
    def measured(cls, batches: Iterable[Any], tables: Sequence[Table]) -> FrequencyOrder:
        """By counting the ids of batches.

        Args:
            batches: KeyedJaggedTensors, or batches that have one as ``sparse_features``.
            tables: whose ids are counted and renumbered.

        Raises:
            ValueError: no batch, a feature that is missing or that two tables read, an id outside the table.
        """
        owner: dict[str, Table] = {}
        for table in tables:
            for feature in table.feature_names:
                if feature in owner:
                    raise ValueError(
                        f"feature {feature!r} is read by tables {owner[feature].name!r} and {table.name!r}: its ids "
                        f"can be renumbered for one of them only. Fix: leave one out"
                    )
                owner[feature] = table
        uses = {table.name: torch.zeros(table.num_embeddings, dtype=torch.int64) for table in tables}
        seen = 0
        for batch in batches:
            bags = _features(batch).to_dict()
            for feature, table in owner.items():
                if feature not in bags:
                    raise ValueError(f"batch {seen} has no feature {feature!r}, which table {table.name!r} reads")
                ids = _rows(bags[feature].values(), table.num_embeddings, feature)
                uses[table.name] += torch.bincount(ids.cpu(), minlength=table.num_embeddings)
            seen += 1
        if not seen:
            raise ValueError("no batches: give at least one")
        places = {name: _inverse(count.argsort(descending=True, stable=True)) for name, count in uses.items()}
        return cls(places, {feature: table.name for feature, table in owner.items()})

    @names_wrong_arguments
    def __call__(self, batch: Any) -> Any:
        """The batch with new ids; features that it does not know stay as they are.

        Args:
            batch: a KeyedJaggedTensor, or a dataclass that has one as ``sparse_features``.

        Raises:
            ValueError: another kind of batch, or an id outside the table.
        """
        features = _features(batch)
        if self.features.keys().isdisjoint(features.keys()):
            return batch
        starts, values = features.offset_per_key(), features.values()
        parts = []
        for place, key in enumerate(features.keys()):
            own = values[starts[place] : starts[place + 1]]
            if key in self.features:
                order = self.places[self.features[key]].to(values.device)
                own = order[_rows(own, order.numel(), key)].to(values.dtype)
            parts.append(own)
        renumbered = features._apply(lambda tensor: tensor)
        renumbered._values = torch.cat(parts)
        return renumbered if features is batch else replace(batch, sparse_features=renumbered)

    def inverse(self) -> FrequencyOrder:
        """What gives the old ids back."""
        return FrequencyOrder({name: _inverse(place) for name, place in self.places.items()}, self.features)

    @names_wrong_arguments
    def reorder(self, table: str, rows: Tensor) -> Tensor:
        """Rows ``[E, ...]`` of a table (its weights, say) in the new order.

        Raises:
            ValueError: an unknown table, or another number of rows.
        """
        if table not in self.places:
            raise ValueError(f"no table {table!r} is renumbered; these are: {', '.join(self.places)}")
        place = self.places[table]
        if rows.shape[0] != place.numel():
            raise ValueError(f"table {table!r} has {place.numel():,} rows, got {rows.shape[0]:,}")
        return rows[_inverse(place).to(rows.device)]

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and names, for ``torch.save`` or the ``extra`` of a checkpoint."""
        return {"places": dict(self.places), "features": dict(self.features)}

    @classmethod
    @names_wrong_arguments
    def from_state_dict(cls, state: Mapping[str, Any]) -> FrequencyOrder:
        """Restores the order from `state_dict`.

        Raises:
            ValueError: another state.
        """
        if not {"places", "features"} <= set(state):
            raise ValueError(f"the state of a FrequencyOrder has 'places' and 'features', got {sorted(state)!r:.80}")
        return cls(state["places"], state["features"])


def _inverse(place: Tensor) -> Tensor:
    inverse = torch.empty_like(place)
    inverse[place] = torch.arange(place.numel())
    return inverse


def _rows(ids: Tensor, num_rows: int, feature: str) -> Tensor:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"feature {feature!r}: ids must be int32 or int64, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise ValueError(f"feature {feature!r}: ids must be 0 to {num_rows - 1:,}, got {ids.min()} to {ids.max()}")
    return ids.long()


def _features(batch: Any) -> KeyedJaggedTensor:
    features = getattr(batch, "sparse_features", batch)
    if not isinstance(features, KeyedJaggedTensor) or (features is not batch and not is_dataclass(batch)):
        raise ValueError(
            f"a batch must be a KeyedJaggedTensor, or a dataclass with one as sparse_features; got {batch!r:.60}"
        )
    return features
