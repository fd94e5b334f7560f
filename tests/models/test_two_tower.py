"""Two towers against loops over single samples: vectors, in-batch losses, corrections."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import StreamingFrequency, TwoTower, TwoTowerTrainTask
from recshard_lab.sparse import KeyedJaggedTensor
from tests.models.bags import batch_of
from tests.refusals import not_refused

USERS, MOVIES, GENRES = [3, 1, 4, 1, 5], [7, 2, 7, 9, 2], [[0], [1, 2], [], [3], [1]]


def collection() -> EmbeddingBagCollection:
    sizes = {"users": (10, 4, "user"), "movies": (20, 4, "movie"), "genres": (5, 3, "genre")}
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, dim, name, feature_names=[key]) for name, (rows, dim, key) in sizes.items()]
    )


def model(**own: Any) -> TwoTower:
    torch.manual_seed(0)
    return TwoTower(collection(), [6, 3], **own)


def ids(keys: tuple[str, ...] = ("user", "movie", "genre")) -> KeyedJaggedTensor:
    bags = {"user": [[u] for u in USERS], "movie": [[m] for m in MOVIES], "genre": GENRES}
    return batch_of({key: bags[key] for key in keys})


def batch(labels: list[float]) -> Any:
    return SimpleNamespace(sparse_features=ids(), labels=torch.tensor(labels))


def vectors(two: TwoTower) -> tuple[Tensor, Tensor]:
    """Sample by sample."""
    weight = {name: bag.weight for name, bag in two.embedding_bag_collection.embedding_bags.items()}
    users, movies = weight["users"], weight["movies"]
    genres = [weight["genres"][bag].sum(0) if bag else torch.zeros(3) for bag in GENRES]

    def through(tower: Any, x: Tensor) -> Tensor:
        first, second = tower.layers
        y = second.weight @ (first.weight @ x + first.bias).clamp(min=0) + second.bias
        return y / y.square().sum().sqrt() if two.normalize else y

    query = [through(two.query_proj, users[user]) for user in USERS]
    rows = [torch.cat([movies[movie], genre]) for movie, genre in zip(MOVIES, genres, strict=True)]
    return torch.stack(query), torch.stack([through(two.candidate_proj, row) for row in rows])


@pytest.mark.parametrize("normalize", [False, True])
def test_each_tower_sees_its_own_features(normalize: bool) -> None:
    two = model(normalize=normalize)
    found, expected = two(ids()), vectors(two)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(two.query(ids(("user",))), expected[0])
    torch.testing.assert_close(two.candidate(ids(("movie", "genre"))), expected[1])


def test_labels_alone_give_the_cross_entropy_of_each_score() -> None:
    two = model()
    labels = [1.0, 0.0, 1.0, 0.0, 1.0]
    loss, (told, scores, given) = TwoTowerTrainTask(two, temperature=0.5)(batch(labels))
    query, candidate = vectors(two)
    expected = (query * candidate).sum(1) / 0.5
    torch.testing.assert_close(scores, expected.detach())
    each = [-(s.sigmoid().log() if y else (1 - s.sigmoid()).log()) for s, y in zip(expected, labels, strict=True)]
    torch.testing.assert_close(loss, torch.stack(each).mean())
    assert given.tolist() == labels
    assert not told.requires_grad


@pytest.mark.parametrize("by_id", [False, True])
def test_each_positive_competes_with_the_batchs_other_candidates(by_id: bool) -> None:
    two = model()
    labels = [1.0, 0.0, 1.0, 0.0, 1.0]
    task = TwoTowerTrainTask(two, in_batch_negatives=True, candidate_id="movie" if by_id else None)
    loss = task(batch(labels))[0]
    query, candidate = vectors(two)
    losses = []
    for sample, label in enumerate(labels):
        rivals = [n for n in range(5) if n == sample or not by_id or MOVIES[n] != MOVIES[sample]]
        scores = torch.stack([query[sample] @ candidate[n] for n in rivals])
        if label:
            losses.append(scores.exp().sum().log() - query[sample] @ candidate[sample])
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    assert all(p.grad is not None for p in two.parameters())


def test_frequent_candidates_are_corrected_for() -> None:
    two = model()
    frequency = StreamingFrequency(20, rate=0.5)
    task = TwoTowerTrainTask(two, in_batch_negatives=True, candidate_id="movie", frequency=frequency)
    for step in range(3):
        frequency.update(torch.tensor([7, 2] if step % 2 else [7]))
    task.eval()  # the estimate stays
    loss = task(batch([1.0] * 5))[0]
    # movie 7 in every step; 2 in the second of three, first seen then: interval 2; 9 never: interval 4
    interval = torch.tensor([{7: 1.0, 2: 2.0, 9: 4.0}[movie] for movie in MOVIES])
    query, candidate = vectors(two)
    scores = query @ candidate.T + interval.log()
    losses = []
    for sample in range(5):
        rivals = [n for n in range(5) if n == sample or MOVIES[n] != MOVIES[sample]]
        losses.append(scores[sample, rivals].exp().sum().log() - scores[sample, sample])
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    task.train()
    task(batch([1.0] * 5))
    assert int(frequency.step) == 4


def test_a_batch_without_a_positive_teaches_nothing() -> None:
    loss = TwoTowerTrainTask(model(), in_batch_negatives=True)(batch([0.0] * 5))[0]
    assert float(loss.detach()) == 0.0


def test_what_does_not_fit_is_refused() -> None:
    def task(**own: Any) -> TwoTowerTrainTask:
        return TwoTowerTrainTask(model(), **own)

    refusals: list[tuple[Any, str]] = [
        (
            lambda: TwoTower(collection(), [3], query_tables=["movie"]),
            r"must be some of .*, but not all, got \['movie'\]",
        ),
        (lambda: TwoTower(collection(), [3], query_tables=["users", "movies", "genres"]), "leave a table for candida"),
        (lambda: TwoTower(collection(), []), "layer_sizes is empty"),
        (lambda: task(temperature=0), "temperature must be above 0, got 0"),
        (lambda: task(candidate_id="user"), r"candidate_id must be one of \['movie', 'genre'\], got 'user'"),
        (lambda: task(frequency=StreamingFrequency(10)), "frequency counts candidates by their id"),
        (lambda: task(in_batch_negatives=True, candidate_id="genre")(batch([1.0] * 5)), "'genre' must have one id per"),
    ]
    assert not_refused(refusals) == []
