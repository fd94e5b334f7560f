"""Two towers trained by the batch's other candidates: how many held-out likes are among a user's best k movies.

A movie that was liked in the training part is not proposed again. Popular movies are the same for everybody.

Shape letters: U users, M movies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.apparatus.model_runs import DENSE_LR, EPS, SCHEMES, Both, mixed_plan, tables_of
from recshard_lab.data import BatchLoader, RatingsDataset, build_dataset
from recshard_lab.models import TwoTower, build_model, train_task
from recshard_lab.models.two_tower import Peers
from recshard_lab.sparse import KeyedJaggedTensor

MOVIELENS = {"name": "movielens", "variant": "100k"}
TABLE_LR, BATCH, EPOCHS = 0.1, 512, 3


class Likes:
    """The likes of both parts of a data set of ratings, and what they say about proposals."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        splits: Any = build_dataset(config or MOVIELENS)
        self.train, self.held_out = (_liked(part) for part in (splits.train, splits.test))
        self.users, self.movies = self.train.features["user"], self.train.features["movie"]

    def recall(self, scores: Tensor, k: int) -> float:
        """The share of held-out likes among each user's k best of ``scores [U, M]``."""
        seen = torch.zeros(self.users, self.movies, dtype=torch.bool)
        seen[_ids(self.train, "user"), _ids(self.train, "movie")] = True
        best = scores.masked_fill(seen, -torch.inf).topk(k, dim=1).indices
        proposed = torch.zeros_like(seen).scatter_(1, best, True)
        return float(proposed[_ids(self.held_out, "user"), _ids(self.held_out, "movie")].double().mean())

    def popular(self) -> Tensor:
        """``[U, M]``: how often each movie was liked."""
        return torch.bincount(_ids(self.train, "movie"), minlength=self.movies).float().expand(self.users, -1)


def _liked(part: RatingsDataset) -> RatingsDataset:
    return part.select(part.label.nonzero().flatten())


def _ids(part: RatingsDataset, feature: str) -> Tensor:
    column = part.columns[feature]
    assert isinstance(column, Tensor)
    return column


def scores_alone(corrected: bool, config: dict[str, Any] | None = None) -> Tensor:
    """Trained in one process -> ``[U, M]``."""
    likes = Likes(config)
    model, task = _built(likes, corrected, None)
    tables = torch.optim.Adagrad(model.embedding_bag_collection.parameters(), lr=TABLE_LR, eps=EPS)
    dense = torch.optim.Adam([*model.query_proj.parameters(), *model.candidate_proj.parameters()], lr=DENSE_LR)
    _train(task, Both(tables, dense), likes, 0, 1)
    return _scores(model, likes)


def scores_sharded(corrected: bool, config: dict[str, Any] | None = None) -> Tensor:
    """Trained on this rank and its peers, each query against the candidates of all of them -> ``[U, M]``."""
    import torch.distributed as dist

    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, RankPeers

    likes = Likes(config)
    _, task = _built(likes, corrected, RankPeers())
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_adagrad", "learning_rate": TABLE_LR, "eps": EPS})
    plan = mixed_plan(task, SCHEMES, dist.get_world_size())
    dmp = DistributedModelParallel(task, plan=plan, sharders=[sharder])
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=DENSE_LR)
    _train(dmp, dense, likes, dist.get_rank(), dist.get_world_size())
    whole, twin = _built(likes, corrected, None)
    twin.load_state_dict(dmp.full_state_dict())
    return _scores(whole, likes)


def _built(likes: Likes, corrected: bool, peers: Peers | None) -> tuple[TwoTower, nn.Module]:
    tables = tables_of({"user": likes.users, "movie": likes.movies})
    settings = {
        "normalize": True,
        "in_batch_negatives": True,
        "temperature": 0.2,
        "candidate_id": "movie",
        "frequency_buckets": likes.movies if corrected else 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("two_tower", tables, settings)
    assert isinstance(model, TwoTower)
    return model, train_task("two_tower", model, settings, peers=peers)


def _train(task: nn.Module, optimizer: Any, likes: Likes, rank: int, world_size: int) -> None:
    loader = BatchLoader(likes.train, BATCH, rank, world_size, shuffle=True, seed=0)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = task(batch)[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def _scores(model: TwoTower, likes: Likes) -> Tensor:
    return model.query(_each("user", likes.users)) @ model.candidate(_each("movie", likes.movies)).T


def _each(feature: str, rows: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([feature], torch.arange(rows), lengths=torch.ones(rows, dtype=torch.int64))
