"""torch's GradScaler beside sharded tables: every rank refuses a scaled loss of theirs, and nothing else."""

from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.optim import CombinedOptimizer, KeyedOptimizerWrapper
from recshard_lab.sharding import construct_module_sharding_plan
from tests.distributed.jobs import attempted

SCALE, LR = 1024.0, 0.1
REFUSED = "GradScaler multiplied the loss by 1024, and table 't' steps inside backward, before scaler.step divides"


class Model(nn.Module):
    """Tables ``t`` and ``u``, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [rs.EmbeddingBagConfig(10, 8, name=name, feature_names=[f"of_{name}"]) for name in "tu"]
        self.tables, self.over = rs.EmbeddingBagCollection(tables), nn.Linear(16, 1)

    def forward(self, features: rs.KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(self.tables(features).values())
        return out.square().sum(), out


def batch(rank: int | None = None) -> rs.KeyedJaggedTensor:
    rank = torch.distributed.get_rank() if rank is None else rank
    ids = (torch.arange(6) * (rank + 1)) % 10
    return rs.KeyedJaggedTensor(["of_t", "of_u"], ids, lengths=torch.tensor([1, 2, 3, 0]))


def sharded(scheme: str = "row_wise", kernel: str | None = None) -> rs.DistributedModelParallel:
    module = Model()
    arguments: dict[str, Any] = {"compute_kernel": kernel} if kernel else {}
    if scheme == "column_wise":
        arguments["ranks"] = list(range(torch.distributed.get_world_size()))
    generator = getattr(rs, scheme)(**arguments)
    plan = construct_module_sharding_plan(module.tables, dict.fromkeys("tu", generator))
    sharder = EmbeddingBagCollectionSharder({"learning_rate": LR})
    return rs.DistributedModelParallel(module, plan=rs.ShardingPlan({"tables": plan}), sharders=[sharder])


def dense(model: rs.DistributedModelParallel) -> KeyedOptimizerWrapper:
    named = {name: own for name, own in model.named_parameters() if name.startswith("over.")}
    return KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=LR))


def combined(model: rs.DistributedModelParallel) -> CombinedOptimizer:
    return CombinedOptimizer([model.fused_optimizer, dense(model)])


def deferred(model: rs.DistributedModelParallel) -> CombinedOptimizer:
    model.fused_optimizer.defer_steps()
    return combined(model)


OPTIMIZERS = {"dense": dense, "combined": combined, "deferred": deferred}


def truth(steps: int) -> dict[str, torch.Tensor]:
    """The unsharded model's weights after steps with the mean gradient of all ranks."""
    model, many = Model(), torch.distributed.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(many):
            (model(batch(rank))[0] / many).backward()
        optimizer.step()
    return model.state_dict()


def distance(model: rs.DistributedModelParallel, expected: dict[str, torch.Tensor]) -> float:
    state = model.full_state_dict()
    return max(float((state[name] - value).abs().max()) for name, value in expected.items())


def scaled_step(model: rs.DistributedModelParallel, optimizer: Any, scaler: torch.amp.GradScaler) -> str:
    """The error of a step with a scaler."""

    def step() -> None:
        scaler.scale(model(batch())[0]).backward()
        scaler.step(optimizer)
        scaler.update()

    optimizer.zero_grad()
    return attempted(step)


def refused(name: str, scheme: str, scaling: list[int]) -> tuple[str, float, float]:
    """The error where some ranks scale, the distance to the first weights, and to the truth a step without scaling."""
    model = sharded(scheme)
    optimizer = OPTIMIZERS[name](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=torch.distributed.get_rank() in scaling)
    error = scaled_step(model, optimizer, scaler)
    kept = distance(model, Model().state_dict())
    optimizer.zero_grad()
    model(batch())[0].backward()
    optimizer.step()
    return error, kept, distance(model, truth(1))


@pytest.mark.parametrize(
    ("name", "scheme", "scaling"),
    [
        ("dense", "row_wise", [0, 1]),
        ("dense", "data_parallel", [0, 1]),
        ("combined", "column_wise", [0, 1]),
        ("deferred", "row_wise", [0, 1]),
        ("dense", "row_wise", [1]),
    ],
)
def test_every_rank_refuses_what_any_of_them_scales_and_trains_on_without(
    two: Any, name: str, scheme: str, scaling: list[int]
) -> None:
    for error, kept, learned in two.run(refused, name, scheme, scaling):
        assert error.startswith("ValueError: rank 1: GradScaler" if scaling == [1] else "ValueError: ")
        assert REFUSED in error
        assert "Fix: train without a GradScaler, under torch.autocast with dtype=torch.bfloat16" in error
        assert kept == 0
        assert learned < 1e-5


def on_the_dense_kernel() -> tuple[str, float, bool, float]:
    """Tables with gradients, which the scaler divides: error and distance of a step, then of one with inf on a rank."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, scaler = sharded("row_wise", "dense"), ShardedGradScaler("cpu", init_scale=SCALE)
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=LR)
    error = scaled_step(model, optimizer, scaler)
    learned = distance(model, truth(1))
    before = model.full_state_dict()
    optimizer.zero_grad()
    scaler.scale(model(batch())[0]).backward()
    table = model.get_parameter("module.tables.embedding_bags.t.weight")
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        assert table.grad is not None
        table.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    return error, learned, distance(model, before) == 0, scaler.get_scale()


def test_tables_on_the_dense_kernel_train_under_torchs_sharded_scaler(two: Any) -> None:
    for error, learned, skipped, scale in two.run(on_the_dense_kernel):
        assert error == ""
        assert learned < 1e-5
        assert skipped
        assert scale == SCALE / 2
