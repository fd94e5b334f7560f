"""A GradScaler refuses losses of unsharded tables that step inside backward, and scales all others as before."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.embedding import FusedEmbeddingCollection, apply_optimizer_in_backward

REFUSED = r"GradScaler multiplied the loss by 1024, and {} steps inside backward.* Fix: train without a GradScaler"
TABLE = REFUSED.format("table 't'")


def scaler(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler, **more: Any) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=1024.0, **more)


def batch() -> rs.KeyedJaggedTensor:
    return rs.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 7]), lengths=torch.tensor([1, 2]))


class Model(nn.Module):
    def __init__(self, kind: str = "bags") -> None:
        super().__init__()
        torch.manual_seed(0)
        config: Any = rs.EmbeddingConfig if kind == "sequences" else rs.EmbeddingBagConfig
        tables = [config(10, 8, name="t", feature_names=["f"])]
        optimizer: Any = torch.optim.SGD, {"lr": 0.1}
        if kind == "sequences":
            self.tables: Any = FusedEmbeddingCollection(tables, *optimizer)
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
    model, own = Model(kind), scaler()
    before = model(batch()).detach()  # a dynamic table has rows for these ids now
    for scaled in (own.scale(model(batch())), own.scale([model(batch())])[0], *own.scale(iter([model(batch())]))):
        with pytest.raises(ValueError, match=TABLE):
            scaled.backward()
    assert torch.equal(model(batch()), before)
    model(batch()).backward()
    assert model(batch()) < before  # it learns without the scaler


def test_an_optimizer_in_backward_refuses_a_scaled_loss() -> None:
    model = nn.Linear(4, 3)
    apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.1})
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

    model = Model()

    class Own(torch.amp.GradScaler):
        """Defined after the first table."""

        def scale(self, outputs: Any) -> Any:
            return outputs * 1024.0

        def get_scale(self) -> float:
            return 1024.0

    for kind in (Halves, ShardedGradScaler, Own):
        with pytest.raises(ValueError, match=TABLE):
            scaler(kind).scale(model(batch())).backward()


def test_a_disabled_scaler_trains_as_without_one() -> None:
    model, truth = Model(), Model()
    truth(batch()).backward()
    scaler(enabled=False).scale(model(batch())).backward()
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(truth), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_tables_inside_a_checkpoint_are_found(reentrant: bool) -> None:
    model = Model()
    before = weights(model)

    def run(ones: torch.Tensor) -> torch.Tensor:
        return model.over(model.tables(batch()).values() * ones).sum()

    ones = torch.ones(8, requires_grad=True)
    scaled = scaler().scale(torch.utils.checkpoint.checkpoint(run, ones, use_reentrant=reentrant))
    with pytest.raises(ValueError, match=TABLE):
        scaled.backward()
    assert unchanged(model, before)
    torch.utils.checkpoint.checkpoint(run, ones, use_reentrant=reentrant).backward()
    assert not torch.equal(before[0], weights(model)[0])


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_another_model_is_scaled_as_before_beside_tables_that_train(plain: nn.Module) -> None:
    model, alone, truth = Model(), deepcopy(plain), Model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, alone)]
    own = scaler()
    rows = torch.arange(12.0).view(3, 4) / 10
    for _ in range(3):
        optimizers[0].zero_grad()
        scaled = own.scale(plain(rows).square().sum())
        torch.autograd.backward([scaled, model(batch())])  # one backward of both
        own.step(optimizers[0])
        own.update()
        optimizers[1].zero_grad()
        alone(rows).square().sum().backward()
        optimizers[1].step()
        truth(batch()).backward()
    assert all(torch.allclose(one, other) for one, other in zip(weights(plain), weights(alone), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(truth), strict=True))
