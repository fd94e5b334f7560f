"""Fused collections, built or swapped for plain ones, give the truth's outputs, and its weights after an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recshard_lab as rs
from recshard_lab import embedding
from recshard_lab.embedding.kernels import available
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.embedding.lookups import dense_twin
from tests.embedding.tables import FEATURES, MEAN, SUM, batch, deduplicated, tables

each_backend = pytest.mark.parametrize("backend", available())


@each_backend
@given(seed=st.integers(0, 999), size=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_per_sample_weights_get_autograds_gradients(backend: str, seed: int, size: int) -> None:
    truth = rs.EmbeddingBagCollection(tables(MEAN), is_weighted=True)
    fused = rs.FusedEmbeddingBagCollection(
        tables(MEAN), torch.optim.SGD, {"lr": 0.1}, is_weighted=True, backend=backend
    )
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
def test_the_learning_rate_can_follow_a_schedule(backend: str) -> None:
    table = rs.EmbeddingBagConfig(2, 4, "t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
    fused = rs.FusedEmbeddingBagCollection(
        [table], embedding.EmbOptimType.EXACT_SGD, {"learning_rate": 1.0}, backend=backend
    )
    fused.set_learning_rate(0.25)
    fused(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))).values().sum().backward()
    assert fused.state_dict()["embedding_bags.t.weight"].tolist() == [[0.0] * 4, [-0.25] * 4]


@each_backend
def test_a_copy_trains_alone_and_its_state_follows(backend: str) -> None:
    fused = rs.FusedEmbeddingBagCollection(tables(), embedding.RowWiseAdagrad, {"lr": 0.3}, backend=backend)
    twin = copy.deepcopy(fused)
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    for seed in range(3):
        twin(batch(seed)).values().sum().backward()
    for name, value in fused.state_dict().items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, twin.state_dict()[name])


def test_backward_through_one_lookup_steps_once() -> None:
    output = rs.FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.3})(batch()).values().sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice through one fused lookup"):
        output.backward()


def test_moving_or_casting_a_fused_collection_is_refused() -> None:
    fused = rs.FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.3})
    for move in (lambda: fused.half(), lambda: fused.to("meta"), lambda: fused.to_empty(device="cpu")):
        with pytest.raises(ValueError, match="cannot move after it is made"):
            move()
    assert fused.to("cpu").float() is fused


WITHOUT_EPS = (embedding.EmbOptimType.EXACT_SGD, embedding.EmbOptimType.LARS_SGD)


def sequences() -> list[rs.EmbeddingConfig]:
    return [
        rs.EmbeddingConfig(7, 4, "movies", feature_names=["seen", "liked"]),
        rs.EmbeddingConfig(7, 32, "posters", feature_names=["seen"]),
        rs.EmbeddingConfig(5, 8, "genres", feature_names=["genre"]),
    ]


class Model(nn.Module):
    """A collection of either kind, one of them in two places, and a dense part."""

    def __init__(self, **meta: Any) -> None:
        super().__init__()
        self.bags = rs.EmbeddingBagCollection(tables(), **meta)
        self.parts = nn.ModuleDict({"rows": rs.EmbeddingCollection(sequences(), **meta)})
        self.again = self.bags
        self.dense = nn.Linear(2, 1)


def numbers(output: KeyedTensor | dict[str, JaggedTensor]) -> Tensor:
    if isinstance(output, KeyedTensor):
        return output.values().flatten()
    return torch.cat([rows.values().flatten() for rows in output.values()])


def able(backend: str, optimizer: embedding.EmbOptimType) -> bool:
    try:
        embedding.FusedEmbeddingCollection(sequences(), optimizer, {"lr": 0.1}, backend=backend)
    except ValueError:
        return False
    return True


PAIRS = [
    (backend, optimizer) for optimizer in embedding.EmbOptimType for backend in available() if able(backend, optimizer)
]


def test_every_optimizer_has_a_backend_for_sequences() -> None:
    assert {optimizer for _, optimizer in PAIRS} == set(embedding.EmbOptimType)


@pytest.mark.parametrize(("backend", "optimizer"), PAIRS)
@pytest.mark.parametrize("kind", ["rows", "sums", "weighted means"])
def test_fused_twins_end_at_the_truths_weights(backend: str, optimizer: embedding.EmbOptimType, kind: str) -> None:
    weighted, pooling = kind == "weighted means", MEAN if kind == "weighted means" else SUM
    bags = rs.EmbeddingBagCollection(tables(pooling), is_weighted=weighted)
    truth = rs.EmbeddingCollection(sequences()) if kind == "rows" else bags
    settings = {"lr": 0.1} if optimizer in WITHOUT_EPS else {"lr": 0.1, "eps": 1e-3}
    fused = embedding.fuse_embedding_optimizer(truth, optimizer, settings, torch.device("cpu"), backend=backend)
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
    truth = rs.EmbeddingCollection(sequences(), need_indices=True, out_of_range=policy)
    fused = embedding.fuse_embedding_optimizer(truth, torch.optim.SGD, {"lr": 0.1}, backend=backend)
    assert isinstance(fused, embedding.EmbeddingCollectionInterface)
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
    fused = embedding.fuse_embedding_optimizer(model, torch.optim.Adagrad, {"lr": 0.1}, torch.device("cpu"))
    assert fused is model
    assert model.dense is dense
    assert type(model.bags) is rs.FusedEmbeddingBagCollection
    assert type(model.parts["rows"]) is embedding.FusedEmbeddingCollection
    assert model.again is model.bags
    assert not model.bags.training
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["dense.weight", "dense.bias"]


def test_twins_of_collections_on_meta_are_drawn() -> None:
    model = embedding.fuse_embedding_optimizer(Model(device="meta"), torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    weight = model.state_dict()["parts.rows.embeddings.movies.weight"]
    assert weight.device.type == "cpu"
    assert weight.any()


class Own(rs.EmbeddingCollection):
    """A class derived from a collection."""


def frozen() -> nn.Module:
    model = Model()
    model.bags.embedding_bags["movies"].weight.requires_grad_(False)
    return model


def stepped_in_backward() -> nn.Module:
    model = Model()
    embedding.apply_optimizer_in_backward(torch.optim.SGD, model.parts.parameters(), {"lr": 0.1})
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no EmbeddingBagCollection"),
        (lambda: nn.Sequential(rs.EmbeddingCollection(sequences()), Own(sequences())), "module '1' is a Own"),
        (frozen, "bags.embedding_bags.movies.weight is frozen"),
        (stepped_in_backward, "parts.rows.embeddings.movies.weight has an optimizer in backward already"),
    ],
)
def test_what_a_twin_would_lose_is_refused_and_nothing_changes(make: Any, says: str) -> None:
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=says):
        embedding.fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1})
    assert [type(module) for module in model.modules()] == kinds


# ---- a GradScaler refuses losses of tables that step inside backward ----

REFUSED = r"GradScaler multiplied the loss by 1024, and {} steps inside backward.* Fix: train without a GradScaler"
TABLE = REFUSED.format("table 't'")


def scaler(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler, **more: Any) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=1024.0, **more)


def three_ids() -> rs.KeyedJaggedTensor:
    return rs.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 7]), lengths=torch.tensor([1, 2]))


class Scored(nn.Module):
    def __init__(self, kind: str = "bags") -> None:
        super().__init__()
        torch.manual_seed(0)
        config: Any = rs.EmbeddingConfig if kind == "sequences" else rs.EmbeddingBagConfig
        tables = [config(10, 8, name="t", feature_names=["f"])]
        optimizer: Any = torch.optim.SGD, {"lr": 0.1}
        if kind == "sequences":
            self.tables: Any = embedding.FusedEmbeddingCollection(tables, *optimizer)
        elif kind == "dynamic":
            tables = [rs.DynamicEmbeddingConfig("t", 8, 128, feature_names=["f"])]
            self.tables = rs.DynamicEmbeddingBagCollection(tables, *optimizer)
        else:
            self.tables = rs.FusedEmbeddingBagCollection(tables, *optimizer)
        self.over = nn.Linear(8, 1)

    def forward(self, features: rs.KeyedJaggedTensor) -> torch.Tensor:
        out = self.tables(features)
        return (self.over(out["f"].values() if isinstance(out, dict) else out.values()) ** 2).sum()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def unchanged(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("kind", ["bags", "sequences", "dynamic"])
def test_a_fused_collection_refuses_a_scaled_loss_and_does_not_step(kind: str) -> None:
    model, own = Scored(kind), scaler()
    before = model(three_ids()).detach()  # a dynamic table has rows for these ids now
    for scaled in (
        own.scale(model(three_ids())),
        own.scale([model(three_ids())])[0],
        *own.scale(iter([model(three_ids())])),
    ):
        with pytest.raises(ValueError, match=TABLE):
            scaled.backward()
    assert torch.equal(model(three_ids()), before)
    model(three_ids()).backward()
    assert model(three_ids()) < before  # it learns without the scaler


def test_an_optimizer_in_backward_refuses_a_scaled_loss() -> None:
    model = nn.Linear(4, 3)
    embedding.apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.1})
    before = weights(model)
    with pytest.raises(ValueError, match=REFUSED.format(r"a parameter of shape \[3, 4\]")):
        scaler().scale(model(torch.ones(2, 4)).sum())
    assert unchanged(model, before)
    model(torch.ones(2, 4)).sum().backward()
    assert torch.allclose(model.weight, before[0] - 0.2)


class Halves(torch.amp.GradScaler):
    """Defined before the first table."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs) / 2


def test_scalers_of_derived_classes_refuse_it_too() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = Scored()

    class Own(torch.amp.GradScaler):
        """Defined after the first table."""

        def scale(self, outputs: Any) -> Any:
            return outputs * 1024.0

        def get_scale(self) -> float:
            return 1024.0

    for kind in (Halves, ShardedGradScaler, Own):
        with pytest.raises(ValueError, match=TABLE):
            scaler(kind).scale(model(three_ids())).backward()


def test_a_disabled_scaler_trains_as_without_one() -> None:
    model, truth = Scored(), Scored()
    truth(three_ids()).backward()
    scaler(enabled=False).scale(model(three_ids())).backward()
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(truth), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_tables_inside_a_checkpoint_are_found(reentrant: bool) -> None:
    model = Scored()
    before = weights(model)

    def run(ones: torch.Tensor) -> torch.Tensor:
        return model.over(model.tables(three_ids()).values() * ones).sum()

    ones = torch.ones(8, requires_grad=True)
    scaled = scaler().scale(torch.utils.checkpoint.checkpoint(run, ones, use_reentrant=reentrant))
    with pytest.raises(ValueError, match=TABLE):
        scaled.backward()
    assert unchanged(model, before)
    torch.utils.checkpoint.checkpoint(run, ones, use_reentrant=reentrant).backward()
    assert not torch.equal(before[0], weights(model)[0])


def test_another_model_is_scaled_as_before_beside_tables_that_train() -> None:
    torch.manual_seed(1)
    plain, model, truth, rows = nn.Linear(4, 1), Scored(), Scored(), torch.rand(3, 4)
    loss = plain(rows).square().sum()
    expected = torch.autograd.grad(loss, plain.weight, retain_graph=True)[0] * 1024
    torch.autograd.backward([scaler().scale(loss), model(three_ids())])  # one backward of both
    torch.testing.assert_close(plain.weight.grad, expected)
    truth(three_ids()).backward()
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(truth), strict=True))
