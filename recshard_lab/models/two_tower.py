"""Two towers for retrieval: queries and candidates become vectors of one space. Matching vectors are close.

    query features     -- their rows side by side -- MLP --> u [B, K]
                                                              score = <u, v>
    candidate features -- their rows side by side -- MLP --> v [B, K]

A candidate's vector does not depend on the query, so it is computed once and searched by an index
(``recshard_lab.serving.retrieval``).
Huang et al. 2013 (DSSM, CIKM); in this form Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus
Item Recommendations" (RecSys).

Shape letters: B batch, K width of the common space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, embedding_names_by_table
from recshard_lab.models.layers import MLP
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor


@names_wrong_arguments
class TwoTower(nn.Module):
    """Two MLPs over one embedding collection.

    Args:
        embedding_bag_collection: the tables of both towers. May be on the meta device.
        layer_sizes: widths of both MLPs; the last one is K, and its layer is linear.
        device: of the MLPs.
        query_tables: names of the tables of the query tower. Default: the first table. The candidate tower has all
            other tables.
        normalize: whether vectors have length 1, so that scores are cosines (Yi et al., section 4.2).

    Raises:
        ValueError: no layer, an unknown table, or a tower without a table.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = [
    ...     EmbeddingBagConfig(name="users", num_embeddings=10, embedding_dim=8, feature_names=["user"]),
    ...     EmbeddingBagConfig(name="movies", num_embeddings=20, embedding_dim=8, feature_names=["movie"]),
    ... ]
    >>> model = TwoTower(EmbeddingBagCollection(tables), [16, 4])
    >>> ids = KeyedJaggedTensor(["user", "movie"], torch.tensor([3, 1, 4, 7]), lengths=torch.tensor([1, 1, 1, 1]))
    >>> query, candidate = model(ids)
    >>> query.shape, candidate.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        layer_sizes: Sequence[int],
        device: torch.device | str | None = None,
        *,
        query_tables: Sequence[str] | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        device = device_named(device)
        tables = embedding_bag_collection.embedding_bag_configs()
        names = [table.name for table in tables]
        chosen = names[:1] if query_tables is None else list(query_tables)
        if not set(chosen) <= set(names) or not 0 < len(set(chosen)) < len(names):
            raise ValueError(
                f"query_tables must be some of {names}, but not all, got {chosen}. Fix: leave a table for candidates"
            )
        if not len(layer_sizes):
            raise ValueError("layer_sizes is empty. Fix: pass widths such as [64, 32]; the last is that of the vectors")
        self.embedding_bag_collection = embedding_bag_collection
        self.normalize = normalize
        keys = dict(zip(names, embedding_names_by_table(tables), strict=True))
        self.query_keys = [key for name in names if name in chosen for key in keys[name]]
        self.candidate_keys = [key for name in names if name not in chosen for key in keys[name]]
        self.features = [feature for table in tables for feature in table.feature_names]
        width = {key: table.embedding_dim for table in tables for key in keys[table.name]}
        self.query_proj, self.candidate_proj = (
            MLP(sum(width[key] for key in keys), list(layer_sizes), device=device, activation_on_last=False)
            for keys in (self.query_keys, self.candidate_keys)
        )

    @names_wrong_arguments
    def forward(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """ids of B samples -> query vectors ``[B, K]``, candidate vectors ``[B, K]``"""
        rows = self.embedding_bag_collection(kjt)
        return self._through(self.query_proj, rows, self.query_keys), self._candidates(rows)

    @names_wrong_arguments
    def query(self, kjt: KeyedJaggedTensor) -> Tensor:
        """ids of B queries -> ``[B, K]``. Features of candidates may be missing."""
        rows = self.embedding_bag_collection(with_all(kjt, self.features))
        return self._through(self.query_proj, rows, self.query_keys)

    @names_wrong_arguments
    def candidate(self, kjt: KeyedJaggedTensor) -> Tensor:
        """ids of B candidates -> ``[B, K]``. Features of queries may be missing."""
        return self._candidates(self.embedding_bag_collection(with_all(kjt, self.features)))

    def _candidates(self, rows: KeyedTensor) -> Tensor:
        return self._through(self.candidate_proj, rows, self.candidate_keys)

    def _through(self, tower: MLP, rows: KeyedTensor, keys: Sequence[str]) -> Tensor:
        vectors: Tensor = tower(torch.cat([rows[key] for key in keys], dim=1))
        return functional.normalize(vectors, dim=1) if self.normalize else vectors


def with_all(kjt: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """The batch, with empty bags for missing features."""
    there = kjt.keys()
    missing = [feature for feature in features if feature not in there]
    if not missing:
        return kjt
    none = kjt.lengths().new_zeros(len(missing) * kjt.stride())
    return KeyedJaggedTensor(
        [*kjt.keys(), *missing], kjt.values(), kjt.weights_or_none(), lengths=torch.cat([kjt.lengths(), none])
    )


# Training of two towers: against the other candidates of the batch, or with labels only.
#
# In-batch negatives (Yi et al. 2019, section 3): each query should score its candidate above the candidates of all
# other queries. Popular candidates occur in more batches, so training would lower their scores. The correction
# subtracts the logarithm of the chance that a candidate is in the batch (eq. 3). It is estimated during training
# (algorithm 2).
#
# The batch is that of *all* ranks. `peers` gathers the candidates. The model does not depend on ranks.
#
# Shape letters: b samples of this rank, B of all ranks, K width of the common space.


class Peers(Protocol):
    """Ranks whose local batches form one batch."""

    @property
    def world_size(self) -> int:
        """W."""

    def gather(self, own: Tensor) -> tuple[Tensor, int]:
        """``[b, ...]`` -> the rows of all ranks ``[B, ...]``, and the index at which this rank's begin.

        Backward returns each row's gradient to its rank, summed over the ranks that used it.
        """

    def total(self, own: Tensor) -> Tensor:
        """The sum over ranks, without a gradient."""


class Alone:
    """A single process."""

    world_size = 1

    def gather(self, own: Tensor) -> tuple[Tensor, int]:
        return own, 0

    def total(self, own: Tensor) -> Tensor:
        return own


class StreamingFrequency(nn.Module):
    """The chance that an id is in a batch, from the steps between its occurrences (Yi et al. 2019, algorithm 2)::

        interval[id] <- (1 - rate) * interval[id] + rate * (step - last[id]);  last[id] <- step;  chance = 1 / interval

    Args:
        num_buckets: ids that are equal modulo this number share a bucket.
        rate: alpha, in (0, 1].

    Raises:
        ValueError: `num_buckets` below 1, or a rate outside (0, 1].

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
        """Counts the ids ``[B]`` of a step."""
        self.step += 1
        seen = torch.unique(ids % len(self.last))
        since = (self.step - self.last[seen]).float()
        known = self.last[seen] > 0
        before = torch.where(known, self.interval[seen], since)
        self.interval[seen] = (1 - self.rate) * before + self.rate * since
        self.last[seen] = self.step

    def log_chance(self, ids: Tensor) -> Tensor:
        """``[B] -> [B]``, at most 0. An id that never occurred counts as one that occurs now for the first time."""
        interval = self.interval[ids % len(self.last)]
        never = (self.step + 1).to(interval.dtype)
        return -torch.where(interval > 0, interval, never).clamp(min=1).log()


@names_wrong_arguments
class TwoTowerTrainTask(nn.Module):
    """Two towers with their loss, with the interface that pipelines expect.

    Args:
        two_tower: the model.
        in_batch_negatives: True is the softmax over the candidates of the batch, for samples with label 1. Samples with
            label 0 only add candidates. False is the cross entropy of each sample's score with its label.
        temperature: scores are divided by it. With `normalize`, about 0.05 is common.
        candidate_id: feature with one id per candidate. Equal candidates of other samples are then not negatives, and
            frequent candidates can be corrected.
        frequency: the correction for frequent candidates; needs `candidate_id`.
        peers: the ranks that share a batch (`recshard_lab.distributed.RankPeers`). Default: this process only.

    Raises:
        ValueError: a temperature that is not above 0, a `candidate_id` that is not a feature of candidates, or a
            `frequency` without `candidate_id`.

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
            raise ValueError("frequency counts candidates by their id. Fix: pass candidate_id=")
        self.two_tower, self.in_batch_negatives = two_tower, in_batch_negatives
        self.temperature, self.candidate_id = temperature, candidate_id
        self.frequency = frequency
        self.peers: Peers = peers if peers is not None else Alone()

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss; then, without gradients, loss, scores ``[b]`` of each query with its candidate, and labels ``[b]``.

        The mean of the losses over ranks is the loss of the batch of all ranks.

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
            raise ValueError(
                f"candidate_id {self.candidate_id!r} must have one id per sample, but some samples do not. "
                f"Fix: choose a feature with one id per sample"
            )
        ids: Tensor = bags.values().long()
        return ids
