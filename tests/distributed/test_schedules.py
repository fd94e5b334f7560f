"""A learning-rate schedule over fused tables and the dense part together."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import DistributedModelParallel
from recshard_lab.optim import CombinedOptimizer, KeyedOptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import batch_of
from tests.distributed.optimizer_jobs import collection_of, plan_at


class Tower(nn.Module):
    """Tables under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection_of(cases.TABLES)
        width = sum(table["embedding_dim"] * len(table["feature_names"]) for table in cases.TABLES)
        self.over = nn.Linear(width, 1)
        nn.init.constant_(self.over.weight, 0.1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.over(self.sparse(features).values())  # type: ignore[no-any-return]


def warmed_up(plan: str, bags: list[Any]) -> list[tuple[float, float, float]]:
    """Runs on every rank: after each step (rate, largest move of a table, largest move of the dense part)."""
    rank = torch.distributed.get_rank()
    dmp = DistributedModelParallel(Tower(), plan=plan_at("sparse", plan))
    dense = {name: p for name, p in dmp.named_parameters() if id(p) in {id(q) for q in dmp.dense_parameters()}}
    parts = [dmp.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=9.0))]
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    optimizer = WarmupOptimizer(CombinedOptimizer(parts), stages, lr=0.8)
    found = []
    for _ in range(4):
        rate = optimizer.param_groups[0]["lr"]
        before = {name: value.clone() for name, value in dmp.full_state_dict().items()}
        optimizer.zero_grad()
        dmp(batch_of(bags[rank])).mean().backward()
        optimizer.step()
        moves = {name: float((value - before[name]).abs().max()) for name, value in dmp.full_state_dict().items()}
        tables = max(move for name, move in moves.items() if "sparse" in name)
        found.append((rate, tables, max(move for name, move in moves.items() if "over" in name)))
    return found


@pytest.mark.gate
def test_a_warm_up_over_tables_and_dense_part_holds_at_once(three: Any) -> None:
    plan = cases.plan_of(cases.TABLES, scheme_names(), three.world_size)
    bags = cases.random_steps(5, cases.TABLES, three.world_size, steps=1, samples=4)[0]
    for found in three.run(warmed_up, plan.to_json(), bags):
        assert [rate for rate, _, _ in found] == pytest.approx([0.0, 0.2, 0.4, 0.6])
        _, tables, dense = zip(*found, strict=True)
        assert tables[0] == dense[0] == 0.0  # a rate of zero moves nothing, in backward neither
        assert min(tables[1:]) > 0
        assert min(dense[1:]) > 0


def schedules(plan: str, bags: list[Any]) -> list[torch.Tensor]:
    """Runs on every rank: how far a table moves in each step, under a loss whose gradient is always the same."""
    rank = torch.distributed.get_rank()
    dmp = DistributedModelParallel(collection_of(cases.TABLES), plan=plan_at("", plan))
    optimizer = WarmupOptimizer(
        CombinedOptimizer([dmp.fused_optimizer]), [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=0.8
    )
    moves = []
    for _ in range(6):
        before = dmp.full_state_dict()["embedding_bags.users.weight"].clone()
        dmp(batch_of(bags[rank])).values().sum().backward()
        optimizer.step()
        moves.append(dmp.full_state_dict()["embedding_bags.users.weight"] - before)
    return moves


@pytest.mark.parametrize("scheme", scheme_names())
def test_tables_move_by_the_rate_of_the_moment(three: Any, scheme: str) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], three.world_size)
    bags = cases.random_steps(5, cases.TABLES, three.world_size, steps=1, samples=4)[0]
    for moves in three.run(schedules, plan.to_json(), bags):
        for number, factor in enumerate([0.0, 1.0, 2.0, 3.0, 4.0, 4.0]):
            torch.testing.assert_close(moves[number], factor * moves[1], rtol=1e-4, atol=1e-5)
        assert moves[1].any()
