"""Training two towers: by the other candidates of the batch, or by labels alone.

In-batch negatives (Yi et al. 2019, section 3): each query is to score its own candidate above those of all other
queries. Popular candidates are there more often, and would be pushed down for it: the logarithm of the chance that a
candidate is in the batch is taken off its score (eq. 3), estimated as batches go by (algorithm 2).

The batch is that of *all* ranks: how candidates come together is `peers`' affair, the model knows no ranks.

Shape letters: b samples of this rank, B of all ranks, K width of the common space.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.models.two_tower import TwoTower


class Peers(Protocol):
    """The ranks whose batches are one batch."""

    @property
    def world_size(self) -> int:
        """W."""

    def gather(self, own: Tensor) -> tuple[Tensor, int]:
        """``[b, ...]`` -> that of all ranks ``[B, ...]``, and where this rank's begins.

        Backward brings each row's gradient home, summed over the ranks that used it.
        """

    def total(self, own: Tensor) -> Tensor:
        """The sum over ranks, without a gradient."""


class Alone:
    """One process on its own."""

    world_size = 1

    def gather(self, own: Tensor) -> tuple[Tensor, int]:
        return own, 0

    def total(self, own: Tensor) -> Tensor:
        return own


class StreamingFrequency(nn.Module):
    """The chance that an id is in a batch, from the steps between its appearances (Yi et al. 2019, algorithm 2)::

        interval[id] <- (1 - rate) * interval[id] + rate * (step - last[id]);  last[id] <- step;  chance = 1 / interval

    Args:
        num_buckets: ids share a bucket when they are equal modulo this.
        rate: alpha, in (0, 1].

    Raises:
        ValueError: no bucket, or another rate.

    >>> frequency = StreamingFrequency(10, rate=1.0)
    >>> for step in range(4):
    ...     frequency.update(torch.tensor([3] if step % 2 else [3, 5]))
    >>> frequency.log_chance(torch.tensor([3, 5])).exp().tolist()
    [1.0, 0.5]
    """

    step: Tensor
    last: Tensor
    interval: Tensor

    def __init__(self, num_buckets: int, rate: float = 0.05) -> None:
        super().__init__()
        if not 1 <= num_buckets < 1 << 40 or not 0.0 < rate <= 1.0:
            raise ValueError(f"num_buckets must be at least 1 and rate in (0, 1], got {num_buckets} and {rate}")
        self.rate = rate
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(num_buckets, dtype=torch.int64))
        self.register_buffer("interval", torch.zeros(num_buckets))

    @torch.no_grad()
    def update(self, ids: Tensor) -> None:
        """Takes in the ids ``[B]`` of a step."""
        self.step += 1
        seen = torch.unique(ids % len(self.last))
        since = (self.step - self.last[seen]).float()
        known = self.last[seen] > 0
        before = torch.where(known, self.interval[seen], since)
        self.interval[seen] = (1 - self.rate) * before + self.rate * since
        self.last[seen] = self.step

    def log_chance(self, ids: Tensor) -> Tensor:
        """``[B] -> [B]``, at most 0; of an id never seen, that of one seen now for the first time."""
        interval = self.interval[ids % len(self.last)]
        never = (self.step + 1).to(interval.dtype)
        return -torch.where(interval > 0, interval, never).clamp(min=1).log()


@names_wrong_arguments
class TwoTowerTrainTask(nn.Module):
    """Two towers with their loss, called as pipelines call a model.

    Args:
        two_tower: the model.
        in_batch_negatives: softmax over the candidates of the batch, for samples with label 1; those with label 0 only
            lend their candidates. False is the cross entropy of each sample's score with its label.
        temperature: scores are divided by it; with `normalize` something like 0.05.
        candidate_id: feature with one id a candidate. Equal candidates of other samples are then no negatives, and
            can be corrected for being frequent.
        frequency: the correction for frequent candidates; needs `candidate_id`.
        peers: the ranks that share a batch; this process alone when left out (`recshard_lab.distributed.RankPeers`).

    Raises:
        ValueError: a temperature not above 0, a feature that is not the candidate's, a correction without ids.

    >>> from types import SimpleNamespace
    >>> from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    >>> from recshard_lab.sparse import KeyedJaggedTensor
    >>> tables = [
    ...     EmbeddingBagConfig(name="users", num_embeddings=10, embedding_dim=8, feature_names=["user"]),
    ...     EmbeddingBagConfig(name="movies", num_embeddings=20, embedding_dim=8, feature_names=["movie"]),
    ... ]
    >>> task = TwoTowerTrainTask(TwoTower(EmbeddingBagCollection(tables), [16, 4]), in_batch_negatives=True)
    >>> ids = KeyedJaggedTensor(["user", "movie"], torch.tensor([3, 1, 4, 7]), lengths=torch.tensor([1, 1, 1, 1]))
    >>> loss, (_, scores, labels) = task(SimpleNamespace(sparse_features=ids, labels=torch.ones(2)))
    >>> loss.shape, scores.shape
    (torch.Size([]), torch.Size([2]))
    """

    def __init__(
        self,
        two_tower: TwoTower,
        *,
        in_batch_negatives: bool = False,
        temperature: float = 1.0,
        candidate_id: str | None = None,
        frequency: StreamingFrequency | None = None,
        peers: Peers | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 < temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if candidate_id is not None and candidate_id not in two_tower.candidate_keys:
            raise ValueError(f"candidate_id must be one of {two_tower.candidate_keys}, got {candidate_id!r}")
        if frequency is not None and candidate_id is None:
            raise ValueError("frequency counts candidates by their id: say candidate_id=...")
        self.two_tower, self.in_batch_negatives = two_tower, in_batch_negatives
        self.temperature, self.candidate_id = temperature, candidate_id
        self.frequency = frequency
        self.peers: Peers = peers if peers is not None else Alone()

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss, then loss, scores ``[b]`` of query and own candidate, and labels ``[b]`` without gradients.

        Averaged over ranks, the losses are that of all ranks' batch.

        Args:
            batch: has ``sparse_features`` and ``labels``.
        """
        query, candidate = self.two_tower(batch.sparse_features)
        labels = batch.labels.float()
        scores = (query * candidate).sum(1) / self.temperature
        if self.in_batch_negatives:
            each, counted = self._softmax(query, candidate, batch), labels
        else:
            each = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
            counted = torch.ones_like(labels)
        samples = self.peers.total(counted.sum().detach()).clamp(min=1)
        loss = (each * counted).sum() * (self.peers.world_size / samples)
        return loss, (loss.detach(), scores.detach(), batch.labels.detach())

    def _softmax(self, query: Tensor, candidate: Tensor, batch: Any) -> Tensor:
        """``[b]``: each query's cross entropy over the candidates of all ranks."""
        every, first = self.peers.gather(candidate)
        logits = query @ every.T / self.temperature
        own = torch.arange(first, first + len(query), device=query.device)
        if self.candidate_id is not None:
            mine = self._ids(batch)
            ids, _ = self.peers.gather(mine)
            if self.frequency is not None:
                if self.training:
                    self.frequency.update(ids)
                logits = logits - self.frequency.log_chance(ids)
            equal = mine.unsqueeze(1) == ids
            equal[torch.arange(len(mine), device=mine.device), own] = False
            logits = logits.masked_fill(equal, float("-inf"))
        return functional.cross_entropy(logits, own, reduction="none")

    def _ids(self, batch: Any) -> Tensor:
        bags = batch.sparse_features[self.candidate_id]
        if not bool((bags.lengths() == 1).all()):
            raise ValueError(f"candidate_id {self.candidate_id!r} must have one id a sample, some samples do not")
        ids: Tensor = bags.values().long()
        return ids
