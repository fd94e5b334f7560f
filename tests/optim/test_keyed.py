"""Keyed and combined optimizers: torch's own numbers, states under the parameters' names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import EmbeddingBagConfig, FusedEmbeddingBagCollection, KeyedJaggedTensor
from recshard_lab.optim import CombinedOptimizer, EmptyFusedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from tests.refusals import not_refused


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def wrap(module: nn.Module, factory: Any = adam) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(module.named_parameters()), factory)


def parts(module: nn.Sequential) -> CombinedOptimizer:
    return CombinedOptimizer([("0", wrap(module[0])), ("1", wrap(module[1], sgd))])


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 5) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(6, 3)).square().mean().backward()
        optimizer.step()


def test_a_wrapped_optimizer_steps_as_torchs_own() -> None:
    one, two = model(), model()
    train(one, wrap(one), 4)
    train(two, adam(two.parameters()), 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("make", [wrap, parts], ids=["wrapped", "combined"])
def test_a_state_is_named_by_parameter_and_training_goes_on_from_it(make: Any) -> None:
    one, two = model(), model(9)
    first = make(one)
    train(one, first, 3)
    saved = copy.deepcopy(first.state_dict())
    assert sorted(saved["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert set(saved["state"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "param_groups" not in saved
    two.load_state_dict(one.state_dict())
    second = make(two)
    second.init_state()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    second.load_state_dict(saved)
    train(one, first, 3, seed=6)
    train(two, second, 3, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_param_groups_are_saved_by_name_when_asked_for() -> None:
    one, two = model(), model()
    first, second = parts(one), parts(two)
    for optimizer in (first, second):
        optimizer.init_state()
        optimizer.save_param_groups(True)
    first.param_groups[1]["lr"] = 0.7
    saved = first.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [["0.bias", "0.weight"], ["1.bias", "1.weight"]]
    second.load_state_dict(saved)
    assert [group["lr"] for group in second.param_groups] == [0.1, 0.7]


@pytest.mark.parametrize("make", [wrap, parts], ids=["wrapped", "combined"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda own: own["state"].pop("1.bias"), r"it lacks \['(1\.)?bias'\]"),
        (lambda own: own["state"].update({"2.bias": {}}), r"it has \['2.bias'\], unknown here"),
        (lambda own: own["state"]["0.weight"].pop("exp_avg"), r"the state of '.*weight': it lacks \['exp_avg'\]$"),
        (lambda own: own["state"]["0.weight"].update(other=torch.zeros(4, 3)), r"weight': it has \['other'\], unknown"),
        (
            lambda own: own["state"]["0.weight"].update(exp_avg=torch.zeros(4, 2)),
            r"shape \[4, 2\], expected shape \[4, 3\]",
        ),
        (lambda own: own.pop("state"), r"has the key 'state', this one has only \[\]"),
        (lambda own: own["state"].update({"0.weight": 3}), r"weight' must be a dictionary with the keys .*got 3"),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_nothing_changes(make: Any, damage: Any, message: str) -> None:
    module = model()
    optimizer = make(module)
    train(module, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    damage(wrong)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()["state"]
    for name, entry in before["state"].items():
        assert all(torch.equal(value, after[name][key]) for key, value in entry.items())


def test_states_and_names_without_a_parameter_of_their_own_are_refused() -> None:
    module, (own, other) = model(), (nn.Parameter(torch.ones(size)) for size in (3, 2))
    optimizer = wrap(module)
    train(module, optimizer, 1)
    refusals: list[tuple[Any, str]] = [
        (lambda: wrap(model()).load_state_dict(optimizer.state_dict()), r"no state yet.*call init_state\(\) first"),
        (lambda: KeyedOptimizer({"w": own}, {other: {}}, []), r"entries for \[\(2,\)\], which are not among .*\['w'\]"),
        (lambda: CombinedOptimizer([wrap(m) for m in module]), "parameter named 'weight'.*give one of them a prefix"),
    ]
    assert not_refused(refusals) == []


def test_objects_with_a_state_of_their_own_are_saved_by_it() -> None:
    weight, inner = nn.Parameter(torch.ones(2)), nn.Linear(1, 1)
    optimizer = KeyedOptimizer({"w": weight}, {weight: {"nested": {"n": 1, "module": inner}}}, [])
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"]["w"]["nested"]["module"]) == {"weight", "bias"}
    saved["state"]["w"]["nested"] |= {"n": 7, "module": {"weight": torch.tensor([[5.0]]), "bias": torch.zeros(1)}}
    optimizer.load_state_dict(saved)
    assert optimizer.state[weight]["nested"]["n"] == 7
    assert inner.weight.tolist() == [[5.0]]


def test_a_torch_scheduler_reaches_every_part() -> None:
    module = model()
    optimizer = parts(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(module, optimizer, 1)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]


def test_an_empty_fused_optimizer_goes_into_a_combination() -> None:
    module = model()
    optimizer = CombinedOptimizer([EmptyFusedOptimizer(), wrap(module)])
    train(module, optimizer, 1)
    assert len(optimizer.param_groups) == 1
    with pytest.raises(NotImplementedError, match="join both in a CombinedOptimizer"):
        optimizer.add_param_group({"params": []})


# ---- the optimizer of an unsharded fused collection ----

TABLE = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
BATCH = KeyedJaggedTensor(["f"], torch.tensor([0]), lengths=torch.tensor([1]))


def test_a_copy_has_its_own_optimizer() -> None:
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.SGD, {"lr": 0.5})
    own = fused.fused_optimizer()
    twin = copy.deepcopy(fused)
    assert twin.fused_optimizer() is not own
    own.param_groups[0]["lr"] = 2.0
    own.step()
    assert (fused.optimizer_spec.learning_rate, twin.optimizer_spec.learning_rate) == (2.0, 0.5)


def test_states_are_those_of_the_kernel() -> None:
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.Adam, {"lr": 0.5})
    fused(BATCH).values().sum().backward()
    states = fused.fused_optimizer().state_dict()["state"]["t.weight"]
    assert {"t.weight.momentum_1", "t.weight.momentum_2"} <= set(states)
    assert states["t.weight.momentum_1"].data_ptr() == fused.optimizer_states()["t"]["momentum1"].data_ptr()
