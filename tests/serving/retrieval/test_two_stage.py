"""Retrieve, then rank, against scores of single pairs; and the bundle of both stages."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import DLRM
from recshard_lab.serving import Batch, load_bundle
from recshard_lab.serving.retrieval import (
    ExactIndex,
    ItemFeatures,
    RetrieveThenRank,
    encode_items,
    index_of_items,
    save_retrieval_bundle,
)
from recshard_lab.serving.server import serve
from recshard_lab.sparse import KeyedJaggedTensor
from tests.serving.retrieval import jobs

CANDIDATES, RESULTS = 8, 5


def items(start: int = 0, end: int = jobs.ITEMS) -> ItemFeatures:
    """Movies with a year."""
    sparse = jobs.items(start, end)
    return ItemFeatures(sparse.ids, sparse.sparse, {"year": torch.arange(start, end) / 10})


def dlrm() -> DLRM:
    sizes = {"rank_users": (10, "user"), "rank_movies": (jobs.ITEMS, "movie"), "rank_genres": (5, "genre")}
    tables = [EmbeddingBagConfig(rows, 4, name, feature_names=[key]) for name, (rows, key) in sizes.items()]
    torch.manual_seed(1)
    model = DLRM(EmbeddingBagCollection(tables), 2, [6, 4], [7, 1])
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 2)
    return model


def users(*seen: list[int]) -> Batch:
    """User n has age n + 1 and has seen some items."""
    size = len(seen)
    lengths = torch.tensor([1] * size + [len(own) for own in seen], dtype=torch.int64)
    values = torch.tensor([*range(size), *(one for own in seen for one in own)], dtype=torch.int64)
    return Batch(torch.arange(1.0, size + 1).unsqueeze(1), values, lengths)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "7"
    tower = jobs.two_tower()
    save_retrieval_bundle(
        path,
        two_tower=tower,
        index=index_of_items(tower, items()),
        ranker=dlrm(),
        items=items(),
        dense=["age", "year"],
        candidates=CANDIDATES,
        results=RESULTS,
        exclude_feature="seen",
    )
    return path


@torch.no_grad()
def by_definition(user: int, age: float, seen: list[int]) -> list[tuple[float, int]]:
    """(score, item) of one user: candidates by the towers, then one call of the ranker for each."""
    tower, ranker, own = jobs.two_tower(), dlrm(), items()
    query = tower.query(KeyedJaggedTensor(["user"], torch.tensor([user]), lengths=torch.tensor([1])))[0]
    order = (encode_items(tower, own) @ query).argsort(descending=True).tolist()
    ranked = []
    for number in [number for number in order if 1000 + number not in seen][:CANDIDATES]:
        (genres,) = own.bags(torch.tensor([1000 + number]), ["genre"])
        kjt = KeyedJaggedTensor(
            ["user", "movie", "genre"],
            torch.tensor([user, number, *genres.values().tolist()]),
            lengths=torch.tensor([1, 1, len(genres.values())]),
        )
        ranked.append((float(ranker(torch.tensor([[age, number / 10]]), kjt).sigmoid()), 1000 + number))
    return sorted(ranked, reverse=True)[:RESULTS]


def test_a_bundle_of_both_stages_returns_the_best_ranked_candidates(saved: Path) -> None:
    model = load_bundle(saved, check_hashes=True)
    assert isinstance(model, RetrieveThenRank)
    assert model.inputs.dense == ("age",)
    assert model.inputs.names() == ["user", "seen"]
    every = (1000 + torch.arange(jobs.ITEMS)).tolist()
    seen = [[], every[:20], every[2:], every, [5]]
    answer = model.predict(users(*seen))
    assert [len(answer[name]) for name in model.outputs] == [5, 5, 5]
    for user, own in enumerate(seen):
        expected, count = by_definition(user, user + 1.0, own), int(answer["count"][user])
        assert count == len(expected) == min(RESULTS, jobs.ITEMS - len(set(own) & set(every)))
        assert answer["item"][user].tolist() == [item for _, item in expected] + [-1] * (RESULTS - count)
        scores = torch.tensor([score for score, _ in expected] + [0.0] * (RESULTS - count))
        torch.testing.assert_close(answer["score"][user], scores)
    nobody = model.predict(users())
    assert nobody["item"].shape == (0, RESULTS)


def test_items_are_added_while_others_are_served(saved: Path) -> None:
    whole: Any = load_bundle(saved)
    part = RetrieveThenRank(
        whole.users,
        ExactIndex(whole.index.vectors(items(0, 20).ids), items(0, 20).ids),
        whole.ranker,
        items(0, 20),
        candidates=CANDIDATES,
        results=RESULTS,
        exclude_feature="seen",
    )
    wrong, stop = list[Any](), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                part.predict(users([], []))
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for start in range(20, jobs.ITEMS):
            own = items(start, start + 1)
            part.add_items(own, whole.index.vectors(own.ids))
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    batch = users([], [1003])
    for name, ours in part.predict(batch).items():
        torch.testing.assert_close(ours, whole.predict(batch)[name])
    assert len(part.items) == jobs.ITEMS


def test_the_server_answers_both_stages_and_reports_their_seconds_apart(saved: Path) -> None:
    sent = users([1001], [1002, 1003], [])
    expected = load_bundle(saved).predict(sent)
    with serve(saved) as server, server.client() as client:
        before = client.metrics()
        found = client.predict_batch(sent)
        after = client.metrics()
    assert found["item"].tolist() == expected["item"].tolist()
    for stage in ("encode", "retrieve", "rank"):
        count, seconds = (f'recshard_stage_seconds_{kind}{{stage="{stage}"}}' for kind in ("count", "sum"))
        assert after[count] == before.get(count, 0) + 1
        assert after[seconds] > before.get(seconds, 0)


def test_what_does_not_fit_is_refused(saved: Path) -> None:
    whole: Any = load_bundle(saved)
    parts = (whole.users, whole.index, whole.ranker)
    with pytest.raises(ValueError, match="results=9 must lie in 1 to candidates=8"):
        RetrieveThenRank(*parts, items(), candidates=8, results=9)
    with pytest.raises(ValueError, match="item 1036 has no features"):
        RetrieveThenRank(*parts, items(0, 36))
