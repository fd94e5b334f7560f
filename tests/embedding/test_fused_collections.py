"""The fused collection gives the unsharded truth's outputs, and its weights after an ordinary optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    RowWiseAdagrad,
)
from recshard_lab.embedding.kernels import available
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.tables import MEAN, batch, tables

each_backend = pytest.mark.parametrize("backend", available())


@each_backend
@given(seed=st.integers(0, 999), size=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_per_sample_weights_get_autograds_gradients(backend: str, seed: int, size: int) -> None:
    truth = EmbeddingBagCollection(tables(MEAN), is_weighted=True)
    fused = FusedEmbeddingBagCollection(tables(MEAN), torch.optim.SGD, {"lr": 0.1}, is_weighted=True, backend=backend)
    fused.load_state_dict(truth.state_dict())
    gradients = []
    for collection in (truth, fused):
        features = batch(seed, size, weighted=True)
        weights = features.weights().requires_grad_()
        features = KeyedJaggedTensor(features.keys(), features.values(), weights, lengths=features.lengths())
        collection(features).values().square().sum().backward()
        gradients.append(torch.zeros_like(weights) if weights.grad is None else weights.grad)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


@each_backend
def test_looking_up_without_backward_changes_nothing(backend: str) -> None:
    fused = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.3}, backend=backend)
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    with torch.no_grad():
        fused(batch())
    fused(batch())
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())


@each_backend
def test_state_is_the_kernels_own_memory(backend: str) -> None:
    fused = FusedEmbeddingBagCollection(tables(), RowWiseAdagrad, {"lr": 0.3}, backend=backend)
    assert {table: state["momentum1"].shape for table, state in fused.optimizer_states().items()} == {
        "movies": (7,),
        "posters": (7,),
        "genres": (5,),
    }
    fused(batch()).values().sum().backward()
    assert fused.optimizer_states()["movies"]["momentum1"].any()
    fused.load_state_dict({name: torch.full_like(value, 0.5) for name, value in fused.state_dict().items()})
    assert fused(batch())["genre"].max() >= 0.5
    assert not any(parameter.requires_grad for parameter in fused.parameters())


@each_backend
def test_the_learning_rate_can_follow_a_schedule(backend: str) -> None:
    table = EmbeddingBagConfig(2, 4, "t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
    fused = FusedEmbeddingBagCollection([table], EmbOptimType.EXACT_SGD, {"learning_rate": 1.0}, backend=backend)
    fused.set_learning_rate(0.25)
    fused(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))).values().sum().backward()
    assert fused.state_dict()["embedding_bags.t.weight"].tolist() == [[0.0] * 4, [-0.25] * 4]


@each_backend
def test_a_copy_trains_alone_and_its_state_follows(backend: str) -> None:
    fused = FusedEmbeddingBagCollection(tables(), RowWiseAdagrad, {"lr": 0.3}, backend=backend)
    twin = copy.deepcopy(fused)
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    for seed in range(3):
        twin(batch(seed)).values().sum().backward()
    for name, value in fused.state_dict().items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, twin.state_dict()[name])


def test_backward_through_one_lookup_steps_once() -> None:
    output = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.3})(batch()).values().sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice through one fused lookup"):
        output.backward()


def test_moving_or_casting_a_fused_collection_is_refused() -> None:
    fused = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.3})
    for move in (lambda: fused.half(), lambda: fused.to("meta"), lambda: fused.to_empty(device="cpu")):
        with pytest.raises(ValueError, match="cannot move after it is made"):
            move()
    assert fused.to("cpu").float() is fused
