"""Plain collections swapped for fused twins: the same numbers, names and weights, the optimizer in backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab.embedding import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    EmbeddingConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    apply_optimizer_in_backward,
    fuse_embedding_optimizer,
)
from recshard_lab.embedding.kernels import available
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.embedding.lookups import dense_twin
from tests.embedding.tables import FEATURES, MEAN, SUM, batch, deduplicated, tables

WITHOUT_EPS = (EmbOptimType.EXACT_SGD, EmbOptimType.LARS_SGD)
each_backend = pytest.mark.parametrize("backend", available())


def sequences() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(7, 4, "movies", feature_names=["seen", "liked"]),
        EmbeddingConfig(7, 32, "posters", feature_names=["seen"]),
        EmbeddingConfig(5, 8, "genres", feature_names=["genre"]),
    ]


class Model(nn.Module):
    """A collection of either kind, one of them in two places, and a dense part."""

    def __init__(self, **meta: Any) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables(), **meta)
        self.parts = nn.ModuleDict({"rows": EmbeddingCollection(sequences(), **meta)})
        self.again = self.bags
        self.dense = nn.Linear(2, 1)


def numbers(output: KeyedTensor | dict[str, JaggedTensor]) -> Tensor:
    if isinstance(output, KeyedTensor):
        return output.values().flatten()
    return torch.cat([rows.values().flatten() for rows in output.values()])


def able(backend: str, optimizer: EmbOptimType) -> bool:
    try:
        FusedEmbeddingCollection(sequences(), optimizer, {"lr": 0.1}, backend=backend)
    except ValueError:
        return False
    return True


PAIRS = [(backend, optimizer) for optimizer in EmbOptimType for backend in available() if able(backend, optimizer)]


def test_every_optimizer_has_a_backend_for_sequences() -> None:
    assert {optimizer for _, optimizer in PAIRS} == set(EmbOptimType)


@pytest.mark.parametrize(("backend", "optimizer"), PAIRS)
@pytest.mark.parametrize("kind", ["rows", "sums", "weighted means"])
def test_fused_twins_end_at_the_truths_weights_under_every_optimizer(
    backend: str, optimizer: EmbOptimType, kind: str
) -> None:
    weighted, pooling = kind == "weighted means", MEAN if kind == "weighted means" else SUM
    bags = EmbeddingBagCollection(tables(pooling), is_weighted=weighted)
    truth = EmbeddingCollection(sequences()) if kind == "rows" else bags
    settings = {"lr": 0.1} if optimizer in WITHOUT_EPS else {"lr": 0.1, "eps": 1e-3}
    fused = fuse_embedding_optimizer(truth, optimizer, settings, torch.device("cpu"), backend=backend)
    assert fused.backend == backend
    dense = dense_twin(fused.optimizer_spec, list(truth.parameters()))
    for seed in range(5):
        features = batch(seed, weighted=weighted)
        expected, output = truth(features), fused(features)
        torch.testing.assert_close(numbers(output), numbers(expected), atol=1e-5, rtol=1e-5)
        mixing = torch.randn_like(numbers(expected))
        (numbers(expected) * mixing).sum().backward()
        (numbers(output) * mixing).sum().backward()
        dense.step()
        dense.zero_grad()
    assert list(fused.state_dict()) == list(truth.state_dict())
    for name, weight in truth.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight, atol=2e-5, rtol=1e-4)


@each_backend
@pytest.mark.parametrize("policy", ["error", "clamp", "ignore"])
def test_sequence_outputs_are_the_plain_collections(backend: str, policy: str) -> None:
    truth = EmbeddingCollection(sequences(), need_indices=True, out_of_range=policy)
    fused = fuse_embedding_optimizer(truth, torch.optim.SGD, {"lr": 0.1}, backend=backend)
    assert isinstance(fused, EmbeddingCollectionInterface)
    assert (fused.need_indices(), fused.out_of_range) == (True, policy)
    assert fused.embedding_names_by_table() == truth.embedding_names_by_table()
    batches = [batch(1), deduplicated(2)[0], batch(0, size=0)]
    if policy != "error":
        ids = batch(3).values().clone()
        ids[::3] = 99
        batches.append(KeyedJaggedTensor(FEATURES, ids, lengths=batch(3).lengths()))
    for features in batches:
        expected, output = truth(features), fused(features)
        assert list(output) == list(expected)
        for name in expected:
            assert torch.equal(output[name].values(), expected[name].values())
            assert torch.equal(output[name].weights(), expected[name].weights())
            assert torch.equal(output[name].lengths(), expected[name].lengths())
    assert fused.out_of_range_count() == truth.out_of_range_count()


def test_every_collection_of_a_model_is_swapped_and_nothing_else() -> None:
    model = Model().eval()
    before, dense = copy.deepcopy(model.state_dict()), model.dense
    fused = fuse_embedding_optimizer(model, torch.optim.Adagrad, {"lr": 0.1}, torch.device("cpu"))
    assert fused is model
    assert model.dense is dense
    assert type(model.bags) is FusedEmbeddingBagCollection
    assert type(model.parts["rows"]) is FusedEmbeddingCollection
    assert model.again is model.bags
    assert not model.bags.training
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["dense.weight", "dense.bias"]


def test_twins_of_collections_on_meta_are_drawn() -> None:
    model = fuse_embedding_optimizer(Model(device="meta"), torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    weight = model.state_dict()["parts.rows.embeddings.movies.weight"]
    assert weight.device.type == "cpu"
    assert weight.any()


class Own(EmbeddingCollection):
    """A class derived from a collection."""


def frozen() -> nn.Module:
    model = Model()
    model.bags.embedding_bags["movies"].weight.requires_grad_(False)
    return model


def stepped_in_backward() -> nn.Module:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.parts.parameters(), {"lr": 0.1})
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no EmbeddingBagCollection"),
        (lambda: nn.Sequential(EmbeddingCollection(sequences()), Own(sequences())), "module '1' is a Own"),
        (frozen, "bags.embedding_bags.movies.weight is frozen"),
        (stepped_in_backward, "parts.rows.embeddings.movies.weight has an optimizer in backward already"),
    ],
)
def test_what_a_twin_would_lose_is_refused_and_nothing_changes(make: Any, says: str) -> None:
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=says):
        fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1})
    assert [type(module) for module in model.modules()] == kinds
