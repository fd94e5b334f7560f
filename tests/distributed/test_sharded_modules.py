"""Sharded collections as modules: ids in their outputs, conversions that would detach tables, second backwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ParameterSharding,
    Shard,
    ShardingPlan,
)
from recshard_lab.distributed import EmbeddingCollectionSharder, ShardingEnv
from recshard_lab.distributed.state.table import ShardedTable
from recshard_lab.embedding import FusedEmbeddingCollection
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import attempted

# ---- need_indices ----


def sequences(scheme: str, fused: bool, policy: str, dedup: bool) -> list[str]:
    """What differs from the unsharded collection. Runs on every rank."""
    tables = [EmbeddingConfig(12, 8, f"t{key}", feature_names=[key, "both"]) for key in "ab"]
    rank, wrong = torch.distributed.get_rank(), []
    plan = cases.root_plan(tables, scheme, 2)
    for dtype in (torch.int64, torch.int32):
        stray = [] if policy == "error" else [-1, 40]
        values = torch.tensor([3, 11, 0, 5 + rank, *stray, 7, 7], dtype=dtype)
        lengths = torch.tensor([2, 0, 1, 1, 0, values.numel() - 4])
        batch = KeyedJaggedTensor(["both", "b", "a"], values, lengths=lengths)
        truth = EmbeddingCollection(tables, need_indices=True, out_of_range=policy)
        whole: Any = truth
        if fused:
            whole = FusedEmbeddingCollection(
                tables, torch.optim.SGD, {"lr": 0.1}, need_indices=True, out_of_range=policy
            )
        whole.load_state_dict(truth.state_dict())
        sharders = None if fused else [EmbeddingCollectionSharder({"optimizer": "exact_sgd"}, None, dedup)]
        dmp = DistributedModelParallel(whole, plan=plan, sharders=sharders)
        truth.load_state_dict(dmp.full_state_dict())
        expected, found = truth(batch), dmp(batch)
        assert dmp.module.need_indices()
        for key, own in expected.items():
            same = torch.equal(own.values(), found[key].values())
            same &= torch.equal(own.weights(), found[key].weights())
            same &= own.weights().dtype == found[key].weights().dtype
            wrong += [] if same else [f"{key} {dtype}"]
    return wrong


@pytest.mark.gate
@pytest.mark.parametrize("policy", ["error", "clamp", "ignore"])
@pytest.mark.parametrize("kind", ["plain", "dedup", "fused"])
def test_sequences_carry_their_ids_under_every_scheme(two: Any, kind: str, policy: str) -> None:
    for scheme in [*scheme_names(), "custom"] if kind == "plain" else ["row_wise", "column_wise", "custom"]:
        assert two.run(sequences, scheme, kind == "fused", policy, kind == "dedup") == [[], []], scheme


# ---- conversions ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(8, 4, f"t{n}", feature_names=["a"]) for n in range(2)], is_weighted=True
        )

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.first(self.ebc(batch)["a@t0"])


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to dtype": lambda model: model.to(torch.float64),
    "to device": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
}


def converted(name: str) -> str:
    """The error of a conversion, after which nothing has changed. Runs on every rank."""
    plan = {"ebc": {"t0": ParameterSharding("table_wise", ranks=[0]), "t1": ParameterSharding("table_wise", ranks=[1])}}
    dmp = DistributedModelParallel(Model(), plan=ShardingPlan(plan))  # type: ignore[arg-type]
    before = {key: (p.data_ptr(), p.dtype) for key, p in dmp.named_parameters()}
    error = attempted(lambda: CONVERSIONS[name](dmp))
    assert {key: (p.data_ptr(), p.dtype) for key, p in dmp.named_parameters()} == before
    return error


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_that_would_detach_tables_are_refused_on_every_rank(two: Any, name: str) -> None:
    errors = two.run(converted, name)
    if name == "to_empty":  # ranks that hold no shard of a table have nothing to lose
        assert all(error.startswith("ValueError: table 't") for error in errors)
    else:
        assert errors[0] == errors[1]
        assert "Fix: convert the dense modules alone" in errors[0]


def test_conversions_that_change_nothing_leave_the_tables_attached() -> None:
    dmp = DistributedModelParallel(Model())
    shared = dmp.to("cpu").float().to(torch.float32).share_memory()
    batch = KeyedJaggedTensor(["a"], torch.tensor([1]), torch.tensor([1.0]), lengths=torch.tensor([1]))
    before = shared.full_state_dict()["ebc.embedding_bags.t0.weight"].clone()
    shared(batch).sum().backward()
    after = dict(dmp.named_parameters())["ebc.embedding_bags.t0.weight"]
    assert not torch.equal(before[1], after[1])
    assert torch.equal(before[2:], after[2:])


def test_shards_in_host_memory_stay_there_when_the_model_moves_to_its_device() -> None:
    config, there = EmbeddingBagConfig(8, 4, "t", feature_names=["a"]), torch.device("meta")
    sharding = ParameterSharding("table_wise", "fused_uvm", shards=[Shard(0, (0, 8), (0, 4))])
    weight = torch.zeros(8, 4)
    table = ShardedTable(config, sharding, {0: weight}, {}, ShardingEnv.from_local(1, 0), device=there)
    nn.Sequential(table, nn.Linear(1, 1)).to(there)
    assert table.weight.data_ptr() == weight.data_ptr()
    with pytest.raises(ValueError, match=r"table 't' cannot become torch\.float16"):
        table.to(there, torch.float16)


# ---- backward ----


def backwards(weighted: bool) -> tuple[str, str]:
    """Errors of a second backward through one lookup, and of a gradient of its gradient. Runs on every rank."""
    dmp, other = (DistributedModelParallel(Model()) for _ in range(2))
    weights = torch.ones(1, requires_grad=weighted)
    batch = KeyedJaggedTensor(["a"], torch.tensor([1]), weights, lengths=torch.tensor([1]))
    rows = dmp(batch)
    rows.sum().backward(retain_graph=True)
    table = dmp.full_state_dict()["ebc.embedding_bags.t0.weight"]
    second = attempted(lambda: rows.sum().backward())
    assert torch.equal(table, dmp.full_state_dict()["ebc.embedding_bags.t0.weight"])

    def twice() -> None:
        (grad,) = torch.autograd.grad(other(batch).square().sum(), [weights], create_graph=True)
        grad.square().sum().backward()

    return second, attempted(twice) if weighted else ""


@pytest.mark.parametrize("weighted", [False, True], ids=["ids", "weights with gradients"])
def test_a_second_backward_and_a_second_derivative_are_refused_on_every_rank(two: Any, weighted: bool) -> None:
    for second, derivative in two.run(backwards, weighted):
        assert second.startswith("RuntimeError: backward ran twice through one sharded lookup")
        assert not weighted or "create_graph=True reached a sharded lookup" in derivative
