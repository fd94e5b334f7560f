"""Learning-rate schedulers of torch over fused tables: 2 ranks train as the unsharded model with plain torch does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    data_parallel,
    row_wise,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.optim import CombinedOptimizer, KeyedOptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage
from recshard_lab.sharding import construct_module_sharding_plan
from tests.distributed.test_deferred_steps import same_steps

STEPS, SAVED_AFTER = 7, 3
METRICS = [1.0, 2.0, 2.0, 0.5, 3.0, 3.0, 3.0]

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, step_size=2, gamma=0.3),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, halved),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=5, eta_min=0.01),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(
        optimizer, max_lr=0.9, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.4, patience=0),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, start_factor=0.2, total_iters=3),
            schedulers.ExponentialLR(optimizer, gamma=0.5),
        ],
        milestones=[3],
    ),
}


def halved(epoch: int) -> float:
    return float(0.5**epoch)


class Model(nn.Module):
    """Two tables and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [EmbeddingBagConfig(9, 4, name=name, feature_names=[name]) for name in ("a", "b")]
        self.ebc = EmbeddingBagCollection(tables)
        self.over = nn.Linear(8, 2)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(batch).values()).square().sum()


def batch_of(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return KeyedJaggedTensor(
        ["a", "b"], torch.randint(9, (12,), generator=generator), lengths=torch.tensor([2, 1, 3, 4, 0, 2])
    )


def advance(schedule: Any, step: int) -> None:
    if isinstance(schedule, schedulers.ReduceLROnPlateau):
        schedule.step(METRICS[step])
    else:
        schedule.step()


def unsharded(name: str, tensor_rate: bool) -> list[dict[str, Tensor]]:
    """Weights after each step: both ranks' batches in one process, torch's optimizer."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.4) if tensor_rate else 0.4)
    schedule, found = SCHEDULERS[name](optimizer), []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(batch_of(step, rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        advance(schedule, step)
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    return found


def build(tensor_rate: bool) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = Model()
    plan = construct_module_sharding_plan(model.ebc, {"a": row_wise(), "b": data_parallel()}, world_size=2)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_sgd", "learning_rate": 0.4})
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}), sharders=[sharder])
    dense = {key: p for key, p in dmp.named_parameters() if key.startswith("over")}
    optimizer = CombinedOptimizer(
        [dmp.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.4))]
    )
    optimizer.save_param_groups(True)
    for group in optimizer.param_groups if tensor_rate else ():
        group["lr"] = torch.tensor(0.4)
    return dmp, optimizer


def sharded(name: str, tensor_rate: bool) -> list[dict[str, Tensor]]:
    """The same on two ranks. The last steps run in a model that loaded the states."""
    rank = torch.distributed.get_rank()
    dmp, optimizer = build(tensor_rate)
    schedule, found = SCHEDULERS[name](optimizer), []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            saved = copy.deepcopy((dmp.full_state_dict(), optimizer.state_dict(), schedule.state_dict()))
            dmp, optimizer = build(tensor_rate)
            schedule = SCHEDULERS[name](optimizer)
            for part, state in zip((dmp, optimizer, schedule), saved, strict=True):
                part.load_state_dict(state)
        optimizer.zero_grad()
        dmp(batch_of(step, rank)).backward()
        optimizer.step()
        advance(schedule, step)
        found.append({key: value.clone() for key, value in dmp.full_state_dict().items()})
    return found


@pytest.mark.gate
@pytest.mark.parametrize(
    ("name", "tensor_rate"), [*((name, False) for name in SCHEDULERS), pytest.param("StepLR", True, id="tensor rate")]
)
def test_schedulers_reach_fused_tables_and_survive_state_dicts(two: Any, name: str, tensor_rate: bool) -> None:
    same_steps(two.run(sharded, name, tensor_rate), unsharded(name, tensor_rate))


def warmed_up() -> list[dict[str, Tensor]]:
    """Weights after each step of a warm-up over tables and dense part. Runs on every rank."""
    dmp, inner = build(False)
    optimizer, found = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=0.8), []
    for step in range(5):
        optimizer.zero_grad()
        dmp(batch_of(step, torch.distributed.get_rank())).backward()
        optimizer.step()
        found.append({key: value.clone() for key, value in dmp.full_state_dict().items()})
    return found


def test_a_warm_up_holds_at_once_in_tables_and_dense_part(two: Any) -> None:
    model, truth = Model(), []
    optimizer = torch.optim.SGD(model.parameters())
    for step, rate in enumerate([0.0, 0.2, 0.4, 0.6, 0.8]):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (sum(model(batch_of(step, rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        truth.append({key: value.clone() for key, value in model.state_dict().items()})
    same_steps(two.run(warmed_up), truth)


def resumed_at_epoch() -> list[float]:
    """A scheduler made after the load, from ``last_epoch``. Runs on every rank."""
    _, optimizer = build(False)
    schedule = schedulers.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    schedule.step()
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = build(False)
    other.load_state_dict(saved)
    schedule = schedulers.StepLR(other, step_size=1, gamma=0.5, last_epoch=1)
    return [group["lr"] for group in other.param_groups]


def test_a_scheduler_may_be_made_after_the_load(two: Any) -> None:
    assert two.run(resumed_at_epoch) == [[0.1, 0.1]] * 2  # 0.4, 0.2, 0.1
