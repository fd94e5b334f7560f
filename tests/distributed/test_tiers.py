"""Rows in the host's memory: the same results, through training, checkpoints and moves from memory to memory."""

from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import (
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
    row_wise,
)
from recshard_lab.data import FrequencyOrder
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, hot_jobs, state_jobs
from tests.distributed.jobs import Case
from tests.distributed.test_cuda import GPUS, needs_gpu
from tests.distributed.test_hot_rows import TABLES, named, zipf_steps
from tests.distributed.test_parity import check
from tests.grid import on_ranks


def half_and_half(tables: list[dict[str, Any]], world: int) -> str:
    """Of every table the first rows everywhere or on one rank in its own memory, the others in the host's."""
    entries = {}
    for number, table in enumerate(tables):
        rows, cols = table["num_embeddings"], (0, table["embedding_dim"])
        hot = rows // 3
        holders = range(world) if number == 0 else [number % world]
        shards = [Shard(rank, (0, hot), cols) for rank in holders]
        middle = (hot + rows) // 2
        shards += [Shard(world - 1, (hot, middle), cols, "ddr"), Shard(0, (middle, rows), cols, "ddr")]
        entries[table["name"]] = ParameterSharding("row_wise", shards=shards)
    return ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()


@pytest.mark.gate
def test_a_plan_by_measured_use_equals_the_unsharded_model(two: Any) -> None:
    """Ids renumbered by use, hot rows in device memory, the others in the host's: as the planner places them."""
    world = 2
    configs = [EmbeddingBagConfig(**table) for table in TABLES]
    steps = zipf_steps(TABLES, world, 5, 24)
    plain = [as_batch(bags) for step in steps for bags in step]
    order = FrequencyOrder.measured(plain, configs)
    load = Workload.measured(map(order, plain), configs, frequency_ordered=True, optimizer="exact_row_wise_adagrad")
    limits = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused", "fused_uvm"])
    where = Topology(world, "cuda", hbm_cap=20_000, ddr_cap=10**6, reserve_fraction=0.0)  # 15 KB are for messages
    planner = EmbeddingShardingPlanner(where, workload=load, constraints={one.name: limits for one in configs})
    plan = planner.plan_tables(configs)
    assert {"hbm", "ddr"} in [{shard.tier for shard in entry.shards} for entry in plan.tables().values()]
    renumbered = [[as_bags(order(as_batch(bags))) for bags in step] for step in steps]
    assert renumbered != steps
    moved = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(plan.tables())}).to_json()
    check(Case(TABLES, moved, renumbered, "exact_row_wise_adagrad"), two)


@on_ranks(2, 4, scheme=scheme_names())
def test_every_scheme_in_the_hosts_memory_equals_the_unsharded_model(ranks: Any, scheme: str) -> None:
    world = ranks.world_size
    plan = cases.plan_of(cases.TABLES, [scheme], world, "fused_uvm")
    assert all(s.tier == "ddr" for entry in plan.tables().values() for s in entry.shards)
    steps = cases.random_steps(1, cases.TABLES, world, steps=4, samples=6)
    check(Case(cases.TABLES, plan.to_json(), steps, "exact_row_wise_adagrad"), ranks)


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_a_table_in_both_memories_equals_the_unsharded_model(ranks: Any, sequence: bool) -> None:
    tables = [{k: v for k, v in own.items() if not sequence or k != "pooling"} for own in TABLES]
    steps = zipf_steps(tables, ranks.world_size, 6, 6)
    plan = half_and_half(tables, ranks.world_size)
    check(Case(tables, plan, steps, "exact_row_wise_adagrad", sequence=sequence), ranks)


def as_batch(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    lengths = torch.tensor([len(bag) for own in bags.values() for bag in own])
    return KeyedJaggedTensor(
        list(bags), torch.tensor([i for own in bags.values() for bag in own for i in bag]), lengths=lengths
    )


def as_bags(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in own.to_dense()] for key, own in batch.to_dict().items()}


def test_a_device_apart_from_the_host_would_get_the_same_numbers(ranks: Any) -> None:
    """The way over the link, walked on ranks that have none: what it brings must be what was there."""
    world = ranks.world_size
    for scheme in ("column_wise", "row_wise"):
        plan = cases.plan_of(cases.TABLES, [scheme], world, "fused_uvm").to_json()
        steps = cases.random_steps(1, cases.TABLES, world, steps=3, samples=6)
        case = Case(cases.TABLES, plan, steps, "exact_row_wise_adagrad")
        for crossed, direct, crossings in ranks.run(hot_jobs.over_the_link, case):
            assert crossings > 0
            assert state_jobs.same(crossed, direct) == []


def test_tables_move_from_memory_to_memory(ranks: Any) -> None:
    world = ranks.world_size
    case = Case(TABLES, named(row_wise(), TABLES, world), zipf_steps(TABLES, world, 6, 6), "exact_row_wise_adagrad")
    case.eps = 1e-3
    plans = [half_and_half(TABLES, world), named(row_wise(compute_kernel="fused_uvm"), TABLES, world), case.plan]
    for wrong, moved, still, state, truth in ranks.run(state_jobs.train_moving, case, plans, 3):
        assert not wrong
        assert moved == pytest.approx(still, abs=1e-5)
        torch.testing.assert_close(state, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
def test_gpus_look_up_rows_in_the_hosts_memory(optimizer: str) -> None:
    steps = zipf_steps(TABLES, GPUS, 4, 6)
    plans = [half_and_half(TABLES, GPUS), named(row_wise(compute_kernel="fused_uvm"), TABLES, GPUS)]
    with recshard_lab.launch(GPUS) as launched:
        for plan in plans:
            check(Case(TABLES, plan, steps, optimizer, device="cuda", backend="native"), launched)


def test_where_rows_lie_is_part_of_a_plan_and_of_its_json() -> None:
    topology, config = Topology(2), EmbeddingBagConfig(**TABLES[0])
    slow = row_wise(compute_kernel="fused_uvm")(config, topology)
    assert {shard.tier for shard in slow.shards} == {"ddr"}
    assert slow != row_wise()(config, topology)
    assert ParameterSharding("row_wise", shards=slow.shards).compute_kernel == "fused_uvm"
    for text in (half_and_half(TABLES, 2), ShardingPlan({"": {"movies": slow}}).to_json()):
        assert ShardingPlan.from_json(text).to_json() == text
    assert "in ddr" in ShardingPlan.from_json(half_and_half(TABLES, 2)).show()
    with pytest.raises(PlanError, match="has a shard in tier 'ddr'"):
        ParameterSharding("row_wise", "dense", shards=slow.shards)
    with pytest.raises(PlanError, match="unknown tier 'nvme'"):
        ParameterSharding("row_wise", shards=[Shard(0, (0, 37), (0, 8), "nvme")])


def test_columns_in_both_memories_are_refused_where_rows_must_be_added_up() -> None:
    case = [Shard(0, (0, 37), (0, 4)), Shard(0, (0, 37), (4, 8), "ddr")]
    module = recshard_lab.EmbeddingBagCollection([EmbeddingBagConfig(**TABLES[0])])
    plan = ShardingPlan({"": {"movies": ParameterSharding("custom", shards=case)}})
    sharder = recshard_lab.distributed.EmbeddingBagCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}
    )
    with pytest.raises(ValueError, match="'movies' has pieces of its columns in both memories"):
        recshard_lab.DistributedModelParallel(module, plan=plan, sharders=[sharder])


def test_replicas_of_one_table_may_be_in_different_memories(ranks: Any) -> None:
    world, tables = ranks.world_size, cases.TABLES
    entries = {}
    for number, table in enumerate(tables):
        whole = (0, table["num_embeddings"]), (0, table["embedding_dim"])
        tiers = ["ddr" if (rank + number) % 3 == 0 else "hbm" for rank in range(world)]
        shards = [Shard(rank, *whole, tier) for rank, tier in enumerate(tiers)]
        entries[table["name"]] = ParameterSharding("data_parallel", shards=shards)
    plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()
    steps = cases.random_steps(1, tables, world, steps=4, samples=6)
    check(Case(tables, plan, steps, "exact_row_wise_adagrad"), ranks)
