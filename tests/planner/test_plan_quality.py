"""How good plans are: near the exhaustive optimum, no worse than any one scheme, spread evenly."""

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.plan import fitting
from benchmarks.planner import random_model
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import CostModel, Workload, estimate
from recshard_lab.planner.search.greedy import Search
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology, scheme_named, scheme_names
from tests.grid import examples
from tests.planner.problems import best_plan, random_problem, table


def used(tables: list[EmbeddingBagConfig], topology: Topology, workload: Workload) -> set[str]:
    plan = best_plan(tables, topology, workload=workload)
    return {sharding.sharding_type for sharding in plan.tables().values()}


def test_each_scheme_is_used_where_it_should_be() -> None:
    topology = Topology(4, cores_per_host=4, ddr_cap=2 * 10**9)
    huge = table("huge", 10_000_000, 64)  # 2.6 GB: more than a rank has
    assert used([huge], topology, Workload()) <= {"row_wise", "column_wise"}
    narrow = table("narrow", 160_000_000, 4)
    assert used([narrow], topology, Workload()) == {"row_wise"}
    even = [table(f"t{i}", 100_000, 64) for i in range(8)]
    assert "table_wise" in used(even, topology, Workload(4096, 10.0, optimizer="exact_row_wise_adagrad"))
    assert used([table("tiny", 10, 4)], topology, Workload(batch_size=8)) <= {"data_parallel", "table_wise"}


def test_balanced_work_is_spread_evenly() -> None:
    tables = [table(f"t{i}", 100_000, 64) for i in range(16)]
    plan = best_plan(tables, Topology(8, cores_per_host=8), workload=Workload(4096, 10.0))
    ms = plan.estimate.ms.sum(axis=1)
    assert ms.max() < 1.02 * ms.mean()


def one_scheme_largest_first(
    name: str, tables: list[EmbeddingBagConfig], topology: Topology, workload: Workload
) -> float:
    """Step time of all tables under one scheme, largest first onto the ranks with most room; inf if it cannot be."""
    plan: dict[str, Any] = {}
    held = [0] * topology.world_size
    for config in sorted(tables, key=lambda t: -t.weight_bytes):
        emptiest = sorted(range(topology.world_size), key=lambda rank: held[rank])
        ranks = emptiest[:1] if name == "table_wise" else None
        if name == "column_wise":
            ranks = emptiest[: config.embedding_dim // 4]
        plan[config.name] = scheme_named(name).default(config, topology, ranks)
        for shard in plan[config.name].resolved(config, topology.world_size).shards:
            held[shard.rank] += shard.num_elements
    found = estimate(ShardingPlan({"": plan}), tables, topology, workload)  # type: ignore[dict-item]
    return found.step_ms if found.fits else np.inf


def step_ms(tables: Any, topology: Topology, workload: Workload, constraints: Any = None) -> float:
    try:
        plan = best_plan(tables, topology, constraints=constraints, workload=workload, explain=False)
    except PlanError:
        return np.inf
    return plan.estimate.step_ms


def test_the_plan_is_never_worse_than_all_tables_under_one_scheme() -> None:
    compared, ratios = 0, []
    for seed in range(examples(4, 40)):
        tables, topology, workload = random_problem(seed)
        automatic = step_ms(tables, topology, workload)
        for name in scheme_names():
            uniform = one_scheme_largest_first(name, tables, topology, workload)
            assert automatic <= uniform * (1 + 1e-9), (seed, name)
            compared += bool(np.isfinite(uniform))
            every = {config.name: ParameterConstraints(sharding_types=[name]) for config in tables}
            ratios.append(automatic / step_ms(tables, topology, workload, every))  # planned under that scheme
    assert compared > 2 * examples(4, 40)
    assert max(ratios) < 1.03


def test_the_search_between_hosts_compares_plans_by_the_cost_model() -> None:
    """Its linear terms leave out bytes that a rank receives beyond those that it sends."""
    tables, top, workload = fitting(26, 32, 1)
    model = CostModel(tables, top, workload)
    problem = Problem(model, options_of(model, tables, {}))
    search = Search(problem, passes=3)
    placements = search.run().placements
    true_ms = float(model.step_ms(np.sum([placement.loads(top) for placement in placements], axis=0)))
    assert search.best_ms == pytest.approx(true_ms)
    assert problem.step_ms(search.best) < 0.999 * true_ms


@pytest.mark.gate
@pytest.mark.parametrize("skew", [None, 1.05])
def test_few_tables_on_many_ranks_are_planned_near_the_bound(skew: float | None) -> None:
    tables = [table(f"t{i:02d}", int(1000 * 20_000 ** (i * 37 % 26 / 26)), (32, 64, 128)[i % 3]) for i in range(26)]
    workload = Workload(512) if skew is None else Workload(512, zipf_alpha=skew)
    plan = best_plan(tables, Topology.preset("h100", world_size=128), workload=workload)
    assert plan.estimate.gap < 0.1  # where one start alone was placed, it was 0.53 and 0.63


def test_pinning_a_table_gains_hardly_ever() -> None:
    ratios = []
    for seed in range(examples(4, 30)):
        tables, topology, workload = random_problem(seed)
        automatic = step_ms(tables, topology, workload)
        draw = random.Random(seed)
        for config in draw.sample(tables, 2):
            wish = {config.name: ParameterConstraints(sharding_types=[draw.choice(scheme_names())])}
            ratios.append(automatic / step_ms(tables, topology, workload, wish))
    ratios.sort()
    assert ratios[int(0.9 * len(ratios))] < 1.02
    assert ratios[-1] < 1.1  # few tables on twice as many ranks: the search may end in a neighbour of the best


@pytest.mark.gate
@pytest.mark.parametrize("seed", [155, 181])  # the two worst of the benchmark's 200 models, when first counted
def test_the_first_plan_of_tables_that_need_most_of_the_memory_is_near_the_bound(seed: int) -> None:
    """120 tables need 0.82 of the memory of 128 GPUs, and more under the cheapest options: they leave some free."""
    tables, top, workload = random_model(seed)
    model = CostModel(tables, top, workload)
    search = Search(Problem(model, options_of(model, tables, {})), passes=3)
    solution = search.run(any_plan=True)
    loads = np.sum([placement.loads(top) for placement in solution.placements], axis=0)
    assert model.memory_total(loads).max() <= model.usable_bytes
    assert float(model.step_ms(loads)) < 2.1 * solution.bound_ms  # 4.4 times for 181 where all memory was filled first
