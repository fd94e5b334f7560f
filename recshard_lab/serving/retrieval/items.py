"""Features of all items: what the candidate tower encodes, and what the ranker reads of each candidate.

Shape letters: N items, M items of one call, D dense columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.models import TwoTower
from recshard_lab.serving.retrieval.checks import checked_ids
from recshard_lab.serving.retrieval.exact import ExactIndex
from recshard_lab.serving.retrieval.index import CandidateIndex
from recshard_lab.serving.retrieval.positions import Positions
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, complete_cumsum


@names_wrong_arguments
class ItemFeatures:
    """Sparse and dense features of N items by their ids. Immutable.

    Args:
        ids: ``[N]`` int64, each once.
        sparse: feature -> one bag of ids for each item, in the order of `ids`.
        dense: column -> ``[N]`` floating point.

    Raises:
        ValueError: an id that occurs twice, or a feature of another length.

    >>> genres = JaggedTensor(torch.tensor([0, 2, 1]), lengths=torch.tensor([2, 1]))
    >>> items = ItemFeatures(torch.tensor([50, -3]), {"genre": genres})
    >>> items.bags(torch.tensor([-3, 50, -3]), ["genre"])[0].values().tolist()
    [1, 0, 2, 1]
    """

    def __init__(
        self, ids: Tensor, sparse: Mapping[str, JaggedTensor], dense: Mapping[str, Tensor] | None = None
    ) -> None:
        numbers = checked_ids(ids)
        self.ids, self.sparse, self.dense = ids, dict(sparse), dict(dense or {})
        for name, bags in self.sparse.items():
            if len(bags.lengths()) != len(ids):
                raise ValueError(f"item feature {name!r} has {len(bags.lengths())} bags for {len(ids)} items")
        for name, column in self.dense.items():
            if column.dim() != 1 or len(column) != len(ids) or not column.is_floating_point():
                raise ValueError(
                    f"item column {name!r} must be [{len(ids)}] floating point, got {column.dtype} {list(column.shape)}"
                )
        self._positions = Positions.of(numbers, np.arange(len(numbers)))
        self._starts = {name: complete_cumsum(bags.lengths()) for name, bags in self.sparse.items()}

    @classmethod
    def from_samples(cls, columns: Mapping[str, Tensor | JaggedTensor], item: str, features: Sequence[str]) -> Self:
        """The features of each item of a data set, from its first sample. Items are in the order of their ids.

        Args:
            columns: name -> ``[N]`` int64 for one id of each sample, or a JaggedTensor of N bags.
            item: the column with the id of the item, one for each sample.
            features: the columns to keep.

        Raises:
            ValueError: a column that is missing, or an `item` column of bags.

        >>> columns = {"movie": torch.tensor([7, 3, 7]), "genre": JaggedTensor(torch.tensor([0, 2, 1, 0]),
        ...     lengths=torch.tensor([2, 1, 1]))}
        >>> items = ItemFeatures.from_samples(columns, "movie", ["movie", "genre"])
        >>> items.ids.tolist(), [bag.tolist() for bag in items.sparse["genre"].to_dense()]
        ([3, 7], [[1], [0, 2]])
        """
        missing = [name for name in (item, *features) if name not in columns]
        if missing:
            raise ValueError(f"the samples have no column {missing[0]!r}. They have: {', '.join(columns)}")
        of_samples = columns[item]
        if not isinstance(of_samples, Tensor):
            raise ValueError(f"column {item!r} has bags of ids. Fix: pass a column with one item for each sample")
        ids, inverse = of_samples.unique(return_inverse=True)
        samples = torch.arange(len(inverse))
        first = torch.full_like(ids, len(inverse)).scatter_reduce_(0, inverse, samples, "amin")
        sparse = {}
        for name in features:
            column = columns[name]
            if isinstance(column, Tensor):
                sparse[name] = JaggedTensor(column[first], lengths=torch.ones_like(first))
            else:
                values, lengths, weights = select_bags(column, complete_cumsum(column.lengths()), first)
                sparse[name] = JaggedTensor(values, weights, lengths=lengths)
        return cls(ids, sparse)

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Tensor) -> Tensor:
        """``[M]`` item ids -> ``[M]`` positions in `ids`.

        Raises:
            ValueError: an item without features.
        """
        numbers = ids.cpu().numpy()
        known = self._positions.has(numbers)
        if not known.all():
            raise ValueError(f"item {numbers[~known][0]} has no features. Fix: add it to ItemFeatures")
        return torch.from_numpy(self._positions.find(numbers))

    def bags(self, ids: Tensor, features: Sequence[str]) -> list[JaggedTensor]:
        """The bags of items ``[M]``, a JaggedTensor with M bags for each feature.

        Raises:
            ValueError: an item or a feature that is not there.
        """
        at = self.positions(ids)
        found = []
        for name in features:
            if name not in self.sparse:
                raise ValueError(f"items have no feature {name!r}. They have: {', '.join(self.sparse) or 'none'}")
            bags = self.sparse[name]
            values, lengths, weights = select_bags(bags, self._starts[name], at)
            found.append(JaggedTensor(values, weights, lengths=lengths))
        return found

    def with_items(self, other: ItemFeatures) -> ItemFeatures:
        """These items and others, whose ids are new.

        Raises:
            ValueError: an item that is in both, or different features.
        """
        if set(other.sparse) != set(self.sparse) or set(other.dense) != set(self.dense):
            raise ValueError(
                f"items have the features {sorted([*self.sparse, *self.dense])}, "
                f"further ones {sorted([*other.sparse, *other.dense])}. Fix: pass the same features"
            )
        known = self._positions.has(other.ids.cpu().numpy())
        if known.any():
            raise ValueError(f"item {int(other.ids[torch.from_numpy(known)][0])} already has features")
        sparse = {name: _joined(bags, other.sparse[name]) for name, bags in self.sparse.items()}
        dense = {name: torch.cat([column, other.dense[name]]) for name, column in self.dense.items()}
        return ItemFeatures(torch.cat([self.ids, other.ids]), sparse, dense)


@names_wrong_arguments
@torch.no_grad()
def encode_items(two_tower: TwoTower, items: ItemFeatures, batch_size: int = 4096) -> Tensor:
    """The candidate tower's vectors ``[N, K]`` of all items, in their order.

    Of a sharded model: call it on every rank with equally many batches. Each rank may have other items.

    Args:
        two_tower: a trained model.
        items: have the candidate tower's features.
        batch_size: items that are encoded at once.

    Raises:
        ValueError: batch_size below 1, or a feature that the items do not have.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not a number of items. Fix: pass 1 or more")
    features = [name for name in two_tower.features if name in items.sparse]
    vectors = []
    for ids in items.ids.split(batch_size):
        bags = items.bags(ids, features)
        kjt = KeyedJaggedTensor(
            features,
            torch.cat([own.values() for own in bags]),
            joined_weights(bags),
            lengths=torch.cat([own.lengths() for own in bags]),
        )
        vectors.append(two_tower.candidate(kjt))
    return torch.cat(vectors)


@names_wrong_arguments
def index_of_items(
    two_tower: TwoTower,
    items: ItemFeatures,
    make: Callable[[Tensor, Tensor], CandidateIndex] | None = None,
    batch_size: int = 4096,
) -> CandidateIndex:
    """An index of all items under a trained TwoTower.

    Args:
        two_tower, items, batch_size: as for `encode_items`.
        make: builds the index of vectors ``[N, K]`` and ids ``[N]``; an `ExactIndex` if left out.
    """
    vectors = encode_items(two_tower, items, batch_size)
    return ExactIndex(vectors, items.ids) if make is None else make(vectors, items.ids)


def select_bags(bags: JaggedTensor, starts: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Some bags, without reading the others: `gather_segments` reads the lengths of all.

    Args:
        bags: N bags.
        starts: ``[N + 1]`` where each begins.
        at: ``[M]`` positions of bags.

    Returns:
        Values, lengths ``[M]`` and weights of these bags.
    """
    lengths = bags.lengths()[at].long()
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    index = torch.repeat_interleave(starts[at] - (ends - lengths), lengths, output_size=total) + torch.arange(total)
    weights = bags.weights_or_none()
    return bags.values()[index], lengths, None if weights is None else weights[index]


def _joined(one: JaggedTensor, two: JaggedTensor) -> JaggedTensor:
    pair = [one, two]
    return JaggedTensor(
        torch.cat([own.values() for own in pair]),
        joined_weights(pair),
        lengths=torch.cat([own.lengths() for own in pair]),
    )


def joined_weights(bags: Sequence[JaggedTensor]) -> Tensor | None:
    """Weights of all bags; of those without weights, 1. None if none has weights."""
    if all(own.weights_or_none() is None for own in bags):
        return None
    given = [(own.weights_or_none(), own.values()) for own in bags]
    return torch.cat([torch.ones(len(values)) if weights is None else weights for weights, values in given])
