"""DistributedModelParallel: what it keeps, what it defaults to, what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    Topology,
    Workload,
    estimate,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder, ShardingEnv
from recshard_lab.optim import apply_optimizer_in_backward
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import batch_of

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


def keep_weights(plan: str) -> tuple[bool, list[str], list[str]]:
    """On a rank: (weights equal rank 0's, names of the state dict sharded, unsharded)."""
    rank = torch.distributed.get_rank()
    truth = Tower(seed=0).state_dict()
    names = list(truth)
    dmp = DistributedModelParallel(Tower(seed=rank), plan=ShardingPlan.from_json(plan))
    whole = dmp.full_state_dict()
    return all(torch.equal(whole[name], truth[name]) for name in names), list(dmp.state_dict()), names


@pytest.mark.parametrize("scheme", scheme_names())
def test_the_weights_of_rank_0_and_the_names_survive_sharding(ranks: Any, scheme: str) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], ranks.world_size)
    plan = ShardingPlan({"inner.sparse": plan.plan[cases.PATH]})
    for same, sharded, unsharded in ranks.run(keep_weights, plan.to_json()):
        assert same
        assert sharded == unsharded


def reshard_by_a_new_plan(scheme: str) -> tuple[list[str], bool]:
    dmp = DistributedModelParallel(Tower(seed=0))
    before = dmp.full_state_dict()
    world = torch.distributed.get_world_size()
    limits = {config.name: ParameterConstraints(sharding_types=[scheme]) for config in CONFIGS}
    planned = EmbeddingShardingPlanner(Topology(world), 8, constraints=limits).plan(dmp)
    dmp.reshard(planned)
    after = dmp.full_state_dict()
    return list(planned.plan), all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("scheme", ["row_wise", "table_wise"])
def test_a_plan_made_of_a_sharded_model_reshards_it(ranks: Any, scheme: str) -> None:
    for paths, same in ranks.run(reshard_by_a_new_plan, scheme):
        assert paths == ["inner.sparse"]
        assert same


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


def load_unsharded(plan: str) -> bool:
    dmp = DistributedModelParallel(Tower(seed=0), plan=ShardingPlan.from_json(plan))
    truth = Tower(seed=9).state_dict()
    dmp.load_state_dict(truth)
    again = DistributedModelParallel(Tower(seed=1), plan=ShardingPlan.from_json(plan))
    again.load_state_dict(dmp.state_dict())
    whole = again.full_state_dict()
    return all(torch.equal(whole[name], truth[name]) for name in truth)


@pytest.mark.parametrize("scheme", scheme_names())
def test_an_unsharded_state_dict_loads_and_so_does_its_own(ranks: Any, scheme: str) -> None:
    plan = ShardingPlan({"inner.sparse": cases.plan_of(cases.TABLES, [scheme], ranks.world_size).plan[cases.PATH]})
    assert all(ranks.run(load_unsharded, plan.to_json()))


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


def test_a_missing_feature_is_named() -> None:
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=ONE))
    with pytest.raises(ValueError, match=r"feature 'f' of table 't' is missing.*'g'"):
        dmp(batch_of({"g": [[1]]}))


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_out_of_range_is_named_with_the_range(bad: int) -> None:
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=ONE))
    with pytest.raises(ValueError, match=rf"feature 'f', sample 1: id {bad} is not a row of table 't'.*0 to 9"):
        dmp(batch_of({"f": [[1], [bad]]}))


def test_an_optimizer_setting_that_nobody_honours_is_named() -> None:
    with pytest.raises(ValueError, match="momentum"):
        EmbeddingBagCollectionSharder(fused_params={"momentum": 0.9})


def test_a_backend_that_cannot_do_the_job_is_refused_by_name() -> None:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=5, feature_names=["f"])]
    sharder = EmbeddingBagCollectionSharder(backend="fbgemm")
    with pytest.raises(ValueError, match=r"fbgemm.*'t'"):
        DistributedModelParallel(EmbeddingBagCollection(tables=tables), sharders=[sharder])


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        ShardingEnv(2, 2)


def test_several_ranks_without_a_process_group_only_describe_devices() -> None:
    env = ShardingEnv.from_local(2, 1)
    assert (env.world_size, env.rank, env.process_group) == (2, 1, None)
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    with pytest.raises(ValueError, match=r"2 ranks without a process group .* Fix:"):
        DistributedModelParallel(EmbeddingBagCollection(tables=tables), env)
    with pytest.raises(ValueError, match="without a process group"):
        EmbeddingBagCollectionSharder().shard(EmbeddingBagCollection(tables=tables), {}, env)


def memory_after_a_step(plan: str, samples: int) -> dict[str, int]:
    configs = [EmbeddingBagConfig(**{**table, "num_embeddings": 64}) for table in cases.TABLES]
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_row_wise_adagrad"})
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    dmp = DistributedModelParallel(collection, plan=ShardingPlan.from_json(plan), sharders=[sharder])
    features = [feature for config in configs for feature in config.feature_names]
    batch = batch_of({feature: [[b % 64, (7 * b) % 64, 63] for b in range(samples)] for feature in features})
    dmp(batch).values().sum().backward()
    return dmp.memory_bytes()


@pytest.mark.parametrize("scheme", scheme_names())
def test_measured_memory_is_what_the_planner_predicts(ranks: Any, scheme: str) -> None:
    """Rows divide evenly, so ids spread as the planner assumes and every byte can be told."""
    tables = [{**table, "num_embeddings": 64} for table in cases.TABLES]
    plan = ShardingPlan({"": cases.plan_of(tables, [scheme], ranks.world_size).plan[cases.PATH]})
    workload = Workload(batch_size=16, pooling_factors=3.0, optimizer="exact_row_wise_adagrad", dense_parameters=0)
    configs = [EmbeddingBagConfig(**table) for table in tables]
    predicted = estimate(plan, configs, Topology(world_size=ranks.world_size), workload)
    for rank, measured in enumerate(ranks.run(memory_after_a_step, plan.to_json(), 16)):
        for number, category in enumerate(predicted.memory_categories):
            expected = float(predicted.memory_bytes[rank, number])
            slack = 0.6 if scheme in ("row_wise", "table_row_wise", "grid_shard", "flex_shard") else 1e-6
            if category == "output_buffers" and scheme == "flex_shard":  # whether a replicated row is touched is chance
                assert measured[category] == pytest.approx(expected, rel=0.05), category
            elif category in ("weights", "optimizer_state", "output_buffers", "dense"):
                assert measured[category] == pytest.approx(expected, rel=1e-6), category
            elif category == "input_buffers":  # which stripe an id falls into is chance
                assert measured[category] == pytest.approx(expected, rel=slack), category
