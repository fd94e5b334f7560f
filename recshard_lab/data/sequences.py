"""Histories of users in the order of time, and batches that train a model to predict the next item.

A user's last item is held out: the model trains on the items before it and is evaluated by it (leave-one-out).

Shape letters: U users, n items, b users of one rank in one batch, N items of their histories, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.data.batch import Batch
from recshard_lab.data.ratings import RatingsDataset, rank_slice
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, gather_segments


@dataclass(frozen=True)
class HeldOut:
    """The users of one evaluation batch.

    Args:
        histories: one feature, the last items of b users before the held-out one.
        seen: all items of each user before the held-out one; the ranking excludes them.
        items: the held-out items ``[b]``.
    """

    histories: KeyedJaggedTensor
    seen: JaggedTensor
    items: Tensor


@names_wrong_arguments
class SequenceDataset:
    """The history of each user, by time, with the last item held out.

    `train_epochs` trains on it, like on a `RatingsDataset`. A batch holds whole users: features "history", "next" and
    "negative" with equal lengths, and labels ``[2N]``, 1 for each next item and then 0 for each negative item.
    Negative items are drawn uniformly from all items, by the seed of the pass.

    Args:
        ratings: needs timestamps, and one id per sample in both columns.
        max_length: T, items of a history that a batch holds. Longer histories keep the last T.
        user, item: names of the columns.

    Attributes:
        num_items: rows of the item table.
        held_out: the last item of each user, ``[U]``. Users with fewer than 3 items are left out.
        source: names the data, for figures.

    Raises:
        ValueError: no timestamps, an unknown or multi-hot column, a length below 1, or no user with 3 items.

    >>> from recshard_lab.data import SyntheticRatings
    >>> sequences = SequenceDataset(SyntheticRatings(1000, num_users=50, num_movies=80), max_length=10)
    >>> batch = next(sequences.batches(4))
    >>> batch.sparse_features.keys(), batch.sparse_features.stride()
    (['history', 'next', 'negative'], 4)
    """

    feature_names = ("history", "next", "negative")

    def __init__(self, ratings: RatingsDataset, max_length: int = 50, user: str = "user", item: str = "movie") -> None:
        if ratings.timestamps is None:
            raise ValueError("the ratings have no timestamps, which order a history. Fix: use ratings with timestamps")
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, but a history has at least 1 item. Fix: use 1 or more")
        users, items = (_one_id_each(ratings, name) for name in (user, item))
        order = torch.argsort(ratings.timestamps, stable=True)
        order = order[torch.argsort(users[order], stable=True)]
        counts = torch.bincount(users, minlength=ratings.features[user])
        ends = counts.cumsum(0)
        kept = (counts >= 3).nonzero().flatten()
        if not len(kept):
            raise ValueError("no user has 3 items, to train on, to predict and to hold out. Fix: add ratings")
        ordered, ends, counts = items[order], ends[kept], counts[kept]
        self.num_items, self.max_length, self.source = ratings.features[item], max_length, ratings.source
        self.held_out = ordered[ends - 1]
        self.seen = _segments(ordered, ends - counts, counts - 1)
        short = (counts - 1).clamp(max=max_length)
        self._recent = _segments(ordered, ends - 1 - short, short)
        short = (counts - 2).clamp(max=max_length)
        self._history = _segments(ordered, ends - 2 - short, short)
        self._next = _segments(ordered, ends - 1 - short, short)

    def __len__(self) -> int:
        """U."""
        return len(self.held_out)

    def __repr__(self) -> str:
        items = int(self.seen.lengths().sum()) + len(self)
        return f"SequenceDataset({self.source}; {len(self):,} users, {items:,} items of {self.num_items:,})"

    @checks_arguments
    def num_batches(self, batch_size: int, drop_last: bool = False) -> int:
        """Number of global batches (steps) in one pass over the users.

        Raises:
            ValueError: a batch size below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}. Fix: use 1 or more users")
        return len(self) // batch_size if drop_last else -(-len(self) // batch_size)

    @checks_arguments
    def batches(
        self,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """One pass over the users, as the shares of one rank.

        The shares of all ranks together are the batch of ``world_size=1``, negative items included.

        Args:
            batch_size: users of a global batch.
            rank, world_size: the share of each batch to return.
            shuffle: visit the users in an order drawn from `seed`.
            seed: of the order and of the negative items.
            drop_last: leave out a last batch of fewer users.

        Raises:
            ValueError: a batch size below 1, or a rank outside the world.
        """
        steps = self.num_batches(batch_size, drop_last)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, but ranks are 0 to {world_size - 1}. Fix: use one of them")
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=draw) if shuffle else torch.arange(len(self))
        lengths = self._history.lengths()
        negative = torch.randint(self.num_items, (int(lengths.sum()),), generator=draw)
        columns = [self._history, self._next, JaggedTensor(negative, lengths=lengths)]
        for users in order.split(batch_size)[:steps]:
            begin, end = rank_slice(len(users), rank, world_size)
            own = [gather_segments(column.values(), lengths, users[begin:end])[:2] for column in columns]
            kjt = KeyedJaggedTensor(
                list(self.feature_names),
                torch.cat([values for values, _ in own]),
                lengths=torch.cat([counts for _, counts in own]),
                stride=end - begin,
            )
            labels = torch.cat([torch.ones(len(own[0][0])), torch.zeros(len(own[0][0]))])
            yield Batch(torch.zeros(len(labels), 0), kjt, labels, 2 * int(lengths[users].sum()), world_size)

    @checks_arguments
    def held_out_batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[HeldOut]:
        """The users once, in order, as the shares of one rank.

        Args:
            batch_size: users of a global batch.
            rank, world_size: the share of each batch to return; it may be empty.
        """
        for step in range(self.num_batches(batch_size)):
            first = step * batch_size
            begin, end = rank_slice(min(batch_size, len(self) - first), rank, world_size)
            users = torch.arange(first + begin, first + end)
            recent = gather_segments(self._recent.values(), self._recent.lengths(), users)
            seen = gather_segments(self.seen.values(), self.seen.lengths(), users)
            histories = KeyedJaggedTensor(["history"], recent[0], lengths=recent[1], stride=len(users))
            yield HeldOut(histories, JaggedTensor(seen[0], lengths=seen[1]), self.held_out[users])


def _one_id_each(ratings: RatingsDataset, name: str) -> Tensor:
    column = ratings.columns.get(name)
    if not isinstance(column, Tensor):
        problem = "does not exist" if column is None else "has several ids per sample"
        single = [key for key, other in ratings.columns.items() if isinstance(other, Tensor)]
        raise ValueError(f"column {name!r} {problem}. Fix: use one of {', '.join(single)}")
    return column


def _segments(values: Tensor, starts: Tensor, lengths: Tensor) -> JaggedTensor:
    """The segments ``values[starts[i] : starts[i] + lengths[i]]`` as bags."""
    ends = lengths.cumsum(0)
    place = torch.repeat_interleave(starts - (ends - lengths), lengths) + torch.arange(int(ends[-1]))
    return JaggedTensor(values[place], lengths=lengths.int())
