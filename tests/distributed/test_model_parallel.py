"""DistributedModelParallel: what it keeps, what it defaults to, what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder, ShardingEnv
from recshard_lab.optim import apply_optimizer_in_backward
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, state_jobs
from tests.distributed.jobs import batch_of
from tests.grid import on_ranks
from tests.refusals import not_refused

CONFIGS = [EmbeddingBagConfig(**table) for table in cases.TABLES]


class Tower(nn.Module):
    """A collection deep inside a model."""

    def __init__(self, seed: int, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.ModuleDict({"sparse": EmbeddingBagCollection(tables=CONFIGS, device=device)})
        self.over = nn.Linear(sum(c.embedding_dim * len(c.feature_names) for c in CONFIGS), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.inner["sparse"](features).values())  # type: ignore[no-any-return]


def states_under(plan: str) -> list[str]:
    """What differs on a rank: weights of rank 0 and names after sharding, after a load of unsharded weights, and of
    the state of another sharded model."""
    plans, truth, other = ShardingPlan.from_json(plan), Tower(seed=0).state_dict(), Tower(seed=9).state_dict()
    dmp = DistributedModelParallel(Tower(seed=torch.distributed.get_rank()), plan=plans)
    wrong = [] if list(dmp.state_dict()) == list(truth) else ["names"]
    wrong += state_jobs.same(truth, dmp.full_state_dict())
    dmp.load_state_dict(other)
    again = DistributedModelParallel(Tower(seed=1), plan=plans)
    again.load_state_dict(dmp.state_dict())
    return wrong + state_jobs.same(other, again.full_state_dict())


@on_ranks(2, 3, night=[4], scheme=scheme_names())
def test_weights_of_rank_0_names_and_loaded_states_survive_sharding(ranks: Any, scheme: str) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], ranks.world_size)
    plan = ShardingPlan({"inner.sparse": plan.plan[cases.PATH]})
    assert ranks.run(states_under, plan.to_json()) == [[]] * ranks.world_size


def from_meta(plan: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3 + torch.distributed.get_rank())
    dmp = DistributedModelParallel(Tower(seed=3, device="meta"), plan=ShardingPlan.from_json(plan))
    return {name: value.clone() for name, value in dmp.full_state_dict().items() if "sparse" in name}


def test_meta_tables_start_the_same_under_every_plan(ranks: Any) -> None:
    starts = []
    for scheme in scheme_names():
        plan = ShardingPlan({"inner.sparse": cases.plan_of(cases.TABLES, [scheme], ranks.world_size).plan[cases.PATH]})
        starts += ranks.run(from_meta, plan.to_json())
    for start in starts[1:]:
        assert all(torch.equal(start[name], starts[0][name]) for name in start)
    for config in CONFIGS:
        weight = starts[0][f"inner.sparse.embedding_bags.{config.name}.weight"]
        bound = config.num_embeddings**-0.5
        assert float(weight.abs().max()) <= bound
        assert float(weight.std()) > bound / 4


def test_without_a_process_group_everything_is_defaulted() -> None:
    torch.manual_seed(0)
    model = Tower(seed=0)
    bags = cases.random_steps(0, cases.TABLES, 1, 1, 5)[0][0]
    truth = model(batch_of(bags))
    dmp = DistributedModelParallel(model)
    assert sorted(dmp.plan.tables()) == sorted(config.name for config in CONFIGS)
    assert torch.allclose(dmp(batch_of(bags)), truth, rtol=1e-6)


def defaults_on_ranks() -> tuple[str, set[int], float]:
    dmp = DistributedModelParallel(Tower(seed=torch.distributed.get_rank()))
    bags = cases.random_steps(0, cases.TABLES, 1, 1, 5)[0][0]
    return (
        dmp.plan.to_json(),
        {s.rank for t in dmp.plan.tables().values() for s in t.shards},
        float(dmp(batch_of(bags)).sum().detach()),
    )


def test_on_ranks_the_default_plan_is_the_same_everywhere(ranks: Any) -> None:
    results = ranks.run(defaults_on_ranks)
    assert len({plan for plan, _, _ in results}) == 1
    assert results[0][1] <= set(range(ranks.world_size))
    assert [total for _, _, total in results] == pytest.approx([results[0][2]] * ranks.world_size, rel=1e-5)


def test_a_table_marked_with_its_own_optimizer_takes_that() -> None:
    model = Tower(seed=0)
    bags = model.inner["sparse"].embedding_bags
    apply_optimizer_in_backward(torch.optim.SGD, [bags["movies"].weight], {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_sgd", "learning_rate": 0.0})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dmp = DistributedModelParallel(model, sharders=[sharder])
    batch = cases.random_steps(0, cases.TABLES, 1, 1, 5)[0][0]
    dmp(batch_of(batch)).sum().backward()
    after = dmp.full_state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {"inner.sparse.embedding_bags.movies.weight"}


def test_a_learning_rate_set_from_outside_holds_at_once() -> None:
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=CONFIGS))
    before = dmp.full_state_dict()
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = 0.0
    bags = cases.random_steps(0, cases.TABLES, 1, 1, 5)[0][0]
    dmp(batch_of(bags)).values().sum().backward()
    after = dmp.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---- what is refused ----


def plan_for(**entries: ParameterSharding) -> ShardingPlan:
    return ShardingPlan({"": EmbeddingModuleShardingPlan(entries)})


ONE = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]


@pytest.mark.parametrize(
    ("shards", "named"),
    [
        ([Shard(0, (0, 4), (0, 4))], "4"),
        ([Shard(0, (0, 6), (0, 4)), Shard(0, (5, 10), (0, 4))], "overlap"),
        ([Shard(3, (0, 10), (0, 4))], "rank 3"),
    ],
    ids=["hole", "overlap", "stray rank"],
)
def test_a_plan_that_does_not_tile_is_refused_by_name(shards: list[Shard], named: str) -> None:
    plan = plan_for(t=ParameterSharding("custom", shards=shards))
    with pytest.raises(PlanError, match=named):
        DistributedModelParallel(EmbeddingBagCollection(tables=ONE), plan=plan)


def test_a_plan_for_a_module_that_is_not_there_names_those_that_are() -> None:
    plan = ShardingPlan({"elsewhere": EmbeddingModuleShardingPlan()})
    with pytest.raises(PlanError, match=r"elsewhere.*inner\.sparse"):
        DistributedModelParallel(Tower(seed=0), plan=plan)


def test_what_cannot_be_is_refused_by_name() -> None:
    one, odd = (EmbeddingBagCollection([EmbeddingBagConfig(10, dim, "t", feature_names=["f"])]) for dim in (4, 5))
    env = ShardingEnv.from_local(2, 1)  # several ranks without a process group only describe devices
    assert (env.world_size, env.rank, env.process_group) == (2, 1, None)
    fbgemm = EmbeddingBagCollectionSharder(backend="fbgemm")
    refusals: list[Any] = [
        (lambda: DistributedModelParallel(one)(batch_of({"g": [[1]]})), r"feature 'f' of table 't' is missing.*'g'"),
        (lambda: EmbeddingBagCollectionSharder(fused_params={"momentum": 0.9}), "momentum"),
        (lambda: DistributedModelParallel(odd, sharders=[fbgemm]), r"fbgemm.*'t'"),
        (lambda: ShardingEnv(2, 2), "rank 2 is not in a world of 2"),
        (lambda: DistributedModelParallel(one, env), r"2 ranks without a process group .* Fix:"),
        (lambda: EmbeddingBagCollectionSharder().shard(one, {}, env), "without a process group"),
    ]
    assert not_refused(refusals) == []
