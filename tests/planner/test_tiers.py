"""Two memories of a rank: host memory is slower, has a separate capacity, and is used if that shortens the step."""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recshard_lab import (
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    Topology,
    Workload,
    estimate,
    row_wise,
)
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import HOST, LOOKUP, MEMORY, UPDATE, Rects
from recshard_lab.planner.read.constraint_files import read_constraints
from recshard_lab.planner.search import greedy
from recshard_lab.planner.search.bounds import strong_bound
from recshard_lab.planner.search.options import DoesNotFit, Placement, options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import CacheParams
from tests.grid import examples, grid
from tests.planner.problems import best_plan, searches

BOTH = ["fused", "fused_uvm"]
GIB = 1 << 30


def topology(hbm: float = 4, ddr: float = 64, device: str = "cuda") -> Topology:
    return Topology(8, device, hbm_cap=int(hbm * GIB), ddr_cap=int(ddr * GIB), local_world_size=8)


def tables_of(*rows: int) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(count, 128, name=f"t{i}", feature_names=[f"f{i}"]) for i, count in enumerate(rows)]


def tables_of_gib(*sizes: float) -> list[EmbeddingBagConfig]:
    return tables_of(*(int(size * GIB) // 512 for size in sizes))


def tables() -> list[EmbeddingBagConfig]:
    return tables_of(50_000_000, 100_000_000, 10_000_000, 50_000)  # 82 GB, where 8 ranks have 29


def load(**more: Any) -> Workload:
    given: dict[str, Any] = {"batch_size": 4096, "pooling_factors": 20.0, "zipf_alpha": 1.1, "frequency_ordered": True}
    return Workload(**{**given, **more})


def planned(where: Topology, kernels: list[str] | None, workload: Workload | None = None, **more: Any) -> Any:
    wish = {t.name: ParameterConstraints(compute_kernels=kernels, **more) for t in tables()}
    plan = best_plan(tables(), where, workload=workload or load(), constraints=wish)
    return plan, plan.estimate


def test_rows_of_the_hosts_memory_all_come_over_its_link() -> None:
    model = CostModel(tables(), topology(), load(frequency_ordered=False))
    of, rows, cols = np.array([0, 0]), np.full(2, 50e6), np.full(2, 128.0)
    nothing, host = np.zeros(2), np.array([0.0, 1.0])
    fast, slow = model.rect_loads(Rects(of, rows, cols, nothing, nothing, host=host)).T
    ids, unique, size = model.tables.ids[0] * 8, model.tables.unique[0], 128 * 4
    top = model.topology
    read = size + top.gather_row_bytes
    here = unique * read / top.hbm_mem_bw + (1 - unique) * size / top.cache_bw  # no cache is modelled there
    assert slow[LOOKUP] - fast[LOOKUP] == pytest.approx(ids * (read / top.ddr_mem_bw - here))
    update = 2 * ids * unique * read * (1 / top.ddr_mem_bw - 1 / top.hbm_mem_bw)
    assert slow[UPDATE] - fast[UPDATE] == pytest.approx(update)
    assert slow[HOST] == fast[MEMORY : MEMORY + 2].sum() == 50e6 * size
    assert slow[MEMORY : MEMORY + 2].sum() == fast[HOST] == 0


def test_what_does_not_fit_a_device_fits_with_the_hosts_memory_and_hot_rows_stay_on_the_device() -> None:
    with pytest.raises(PlanError, match="does not fit"):
        planned(topology(), ["fused"])
    plan, found = planned(topology(), BOTH)
    assert found.fits
    assert 0 < found.host_bytes.max() <= found.host_room_bytes
    held = found.host_bytes.sum() + found.memory_bytes[:, 0].sum()
    assert held == pytest.approx(sum(t.weight_bytes for t in tables()), rel=0.1)
    split = [s for s in plan.tables().values() if len({shard.tier for shard in s.shards}) == 2]
    assert split
    for sharding in split:
        cold = min(shard.rows[0] for shard in sharding.shards if shard.tier == "ddr")
        assert all(shard.rows[1] <= cold for shard in sharding.shards if shard.tier == "hbm")
    _, slow = planned(topology(), ["fused_uvm"])
    assert found.step_ms < 0.75 * slow.step_ms
    again = estimate(plan, tables(), topology(), load())
    assert again.step_ms == pytest.approx(found.step_ms)
    assert again.host_bytes == pytest.approx(found.host_bytes)
    assert "in the host's memory: " in str(found)


def test_nothing_goes_to_the_host_where_the_device_has_room_or_nobody_allows_it() -> None:
    plan, found = planned(topology(hbm=80), BOTH)
    assert found.host_bytes is None
    assert {shard.tier for s in plan.tables().values() for shard in s.shards} == {"hbm"}
    plan, found = planned(topology(hbm=80), None)
    assert {s.compute_kernel for s in plan.tables().values()} == {"fused"}


def test_tables_without_known_skew_go_whole() -> None:
    plan, found = planned(topology(), BOTH, load(frequency_ordered=False))
    assert found.fits
    assert all(len({shard.tier for shard in s.shards}) == 1 for s in plan.tables().values())
    assert {s.compute_kernel for s in plan.tables().values()} == {"fused", "fused_uvm"}


def test_a_refusal_names_the_rank_and_the_least_host_memory_with_which_a_plan_is_found() -> None:
    large = tables_of_gib(6, 4, 3)
    wish = {t.name: ParameterConstraints(["table_wise"], BOTH) for t in large}

    def planned_with(ddr: int) -> Any:
        where = Topology(2, "cuda", hbm_cap=5 * GIB, ddr_cap=ddr, reserve_fraction=0.5)
        return best_plan(large, where, workload=load(), constraints=wish)

    words = r"^rank 1 would hold 7.5 GB in host memory: it has 1.1 GB there .*Fix: Topology\(ddr_cap=([\d_]+)\)"
    with pytest.raises(PlanError, match=words) as refused:
        planned_with(2 * GIB)
    message = re.match(words, str(refused.value))
    least = int(message[1])
    assert planned_with(least).estimate.fits
    with pytest.raises(PlanError, match="in host memory"):
        planned_with(int(0.9 * least))


def test_plans_keep_within_the_hosts_memory() -> None:
    ample, found = planned(topology(), BOTH)
    assert found.host_bytes.max() > 5 * GIB
    assert not estimate(ample, tables(), topology(ddr=1), load()).fits
    wide, narrow = (planned(topology(hbm=9, ddr=ddr), BOTH)[1] for ddr in (64, 3.4))
    assert wide.fits
    assert narrow.fits
    assert 0 < narrow.host_bytes.max() <= narrow.host_room_bytes < wide.host_bytes.max()


@pytest.mark.parametrize("annealed", [greedy.ANNEALED, 0])
def test_full_memories_leave_one_plan(monkeypatch: pytest.MonkeyPatch, annealed: int) -> None:
    """Tables of 6, 4 and 3 GiB; 6.5 GiB on the device, 8 GiB in the host's memory. The smallest table is read most."""
    monkeypatch.setattr(greedy, "ANNEALED", annealed)
    sizes = tables_of_gib(6, 4, 3)
    where = Topology(1, "cuda", hbm_cap=int(6.5 * GIB), ddr_cap=8 * GIB, reserve_fraction=0.0)
    read_most = Workload(batch_size=64, pooling_factors={"f2": 50.0}, zipf_alpha=1.1)
    wish = {t.name: ParameterConstraints(compute_kernels=BOTH) for t in sizes}
    plan = best_plan(sizes, where, workload=read_most, constraints=wish)
    assert [plan.tables()[name].compute_kernel for name in ("t0", "t1", "t2")] == ["fused", "fused_uvm", "fused_uvm"]


class Tight:
    """A random problem of whole tables on 2 ranks, and the best step of all placements that fit both memories."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        sizes = [draw.uniform(1, 8) for _ in range(draw.choice([2, 3, 3, 4]))]
        fair, host, slack = sum(sizes) / 2, draw.uniform(0.2, 0.8), draw.uniform(1.2, 2.2)
        hbm, ddr = fair * (1 - host) * slack + 0.3, fair * host * slack
        where = Topology(2, "cuda", hbm_cap=int(hbm * GIB), ddr_cap=int(ddr * GIB), reserve_fraction=0.0)
        self.tables = tables_of_gib(*sizes)
        read = {f"f{i}": draw.uniform(1, 50) for i in range(len(sizes))}
        self.wish = {t.name: ParameterConstraints(["table_wise"], BOTH) for t in self.tables}
        self.model = CostModel(self.tables, where, Workload(draw.choice([64, 1024]), read, zipf_alpha=1.1))
        self.options = options_of(self.model, self.tables, self.wish)
        ways = [[Placement(option, (r,)).loads(where) for option in own for r in range(2)] for own in self.options]
        loads = np.array([sum(way) for way in itertools.product(*ways)])
        loads = np.moveaxis(loads, 1, 0)
        held, steps = self.model.memory_total(loads).max(axis=-1), self.model.step_ms(loads)
        on_device = held <= self.model.usable_bytes
        fits = on_device & (loads[HOST].max(axis=-1) <= self.model.host_room)
        self.best_ms = float(np.where(fits, steps, np.inf).min())
        self.without_host_limit_ms = float(np.where(on_device, steps, np.inf).min())

    def found(self, exact_s: float | None = None) -> greedy.Solution:
        return greedy.solve(self.model, self.tables, self.wish, exact_s=exact_s)

    def step_ms(self, solution: greedy.Solution) -> float:
        return float(
            self.model.step_ms(np.sum([one.loads(self.model.topology) for one in solution.placements], axis=0))
        )


def test_the_search_finds_the_best_of_all_plans_that_fit_both_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = searches(monkeypatch)
    for seed in (*range(examples(10, 40)), 214, 249, 375):
        tight = Tight(seed)
        searched.clear()
        if np.isinf(tight.best_ms):
            with pytest.raises(DoesNotFit):
                tight.found()
        else:
            solution = tight.found()
            assert tight.step_ms(solution) == pytest.approx(tight.best_ms, rel=greedy.NEAR), seed
            assert solution.bound_ms <= tight.best_ms * (1 + 1e-9), seed
        assert len(searched) == 1, "problems that were searched for one plan"


@pytest.mark.parametrize(*grid(seed=[25, 44, 63], gate={"seed": [44, 63]}))
def test_the_exact_solver_proves_plans_that_the_hosts_memory_lengthens(seed: int) -> None:
    tight = Tight(seed)
    solution = tight.found(exact_s=1.0)
    assert tight.step_ms(solution) == pytest.approx(tight.best_ms)
    assert tight.without_host_limit_ms < 0.99 * solution.bound_ms
    assert solution.bound_ms == pytest.approx(tight.best_ms, rel=1e-3)
    bound_ms = strong_bound(Problem(tight.model, tight.options), 1.2 * tight.best_ms)
    assert bound_ms <= tight.best_ms * (1 + 1e-9)


def test_the_exact_solver_chooses_memories_too() -> None:
    small = tables()[2:]
    wish = {t.name: ParameterConstraints(compute_kernels=BOTH) for t in small}
    where = Topology(2, "cuda", hbm_cap=2 * GIB, ddr_cap=16 * GIB, local_world_size=2)
    steps = []
    for solver in ("greedy", "exact"):
        plan = best_plan(small, where, workload=load(), constraints=wish, solver=solver, time_limit_s=10)
        assert plan.estimate.host_bytes is not None
        steps.append(plan.estimate.step_ms)
    assert steps[1] <= steps[0] * 1.001


def test_on_cpus_both_memories_are_one() -> None:
    where = Topology(8, ddr_cap=64 * GIB)
    fast, slow = (
        ShardingPlan({"": {t.name: row_wise(compute_kernel=kernel)(t, where) for t in tables()}}) for kernel in BOTH
    )
    one, other = (estimate(plan, tables(), where, load()) for plan in (fast, slow))
    assert one.ms == pytest.approx(other.ms)
    assert one.memory_bytes == pytest.approx(other.memory_bytes)
    assert other.host_bytes is None


def test_constraint_files_say_where_shards_lie(tmp_path: Path) -> None:
    (tmp_path / "constraints.yaml").write_text("t3: {shards: [[0, 0, 100, 0, 128], [1, 100, 50000, 0, 128, ddr]]}")
    wish = read_constraints(tmp_path / "constraints.yaml")
    plan = best_plan(tables()[3:], topology(80), workload=load(), constraints=wish)
    assert [shard.tier for shard in plan.tables()["t3"].shards] == ["hbm", "ddr"]
    assert plan.estimate.host_bytes[1] == 49_900 * 128 * 4
    (tmp_path / "wrong.yaml").write_text("t3: {shards: [[0, 0, 50000, 0, 128, nvme]]}")
    with pytest.raises(ValueError, match=r"shards': must be a list of \[rank, r0, r1, c0, c1\]"):
        read_constraints(tmp_path / "wrong.yaml")


def test_torchrecs_formulas_here_know_one_memory() -> None:
    wish = {t.name: ParameterConstraints(compute_kernels=["fused_uvm"]) for t in tables()}
    planner = EmbeddingShardingPlanner(topology(80), workload=load(), constraints=wish, cost_model="torchrec")
    with pytest.raises(PlanError, match=r"'t0' may only be on kernel 'fused_uvm'.*allow 'fused' too"):
        planner.plan_tables(tables())
    plan = ShardingPlan({"": {t.name: row_wise(compute_kernel="fused_uvm")(t, topology()) for t in tables()}})
    with pytest.raises(PlanError, match="no formulas for shards in the host's memory"):
        estimate(plan, tables(), topology(), load(), cost_model="torchrec")


# ---- cached tables ----

KERNEL = "fused_uvm_caching"
CACHING = Topology(2, "cuda", hbm_cap=2_000_000, ddr_cap=10**9)
CACHED = EmbeddingBagConfig(10_000, 64, "t", feature_names=["f"])
SKEWED = Workload(256, 10.0, optimizer="exact_row_wise_adagrad", zipf_alpha=1.2)
ROW = 64 * 4 + 4


def cached(share: float, workload: Workload = SKEWED, topology: Topology = CACHING) -> ShardingPlan:
    wish = ParameterConstraints(compute_kernels=[KERNEL], cache_params=CacheParams(load_factor=share))
    return best_plan([CACHED], topology, workload=workload, constraints={"t": wish})


def price(share: float, workload: Workload = SKEWED) -> float:
    """Predicted ms of a row-wise step."""
    sharding = replace(row_wise(compute_kernel=KERNEL)(CACHED, CACHING), cache_params=CacheParams(load_factor=share))
    return estimate(ShardingPlan({"": {"t": sharding}}), [CACHED], CACHING, workload).step_ms  # type: ignore[dict-item]


def test_a_table_that_exceeds_the_devices_memory_is_cached_there() -> None:
    plan = cached(0.1)
    sharding = plan.tables()["t"]
    assert (sharding.compute_kernel, sharding.cache_params) == (KERNEL, CacheParams(load_factor=0.1))
    assert not sharding.replicated
    found = plan.estimate
    assert found.host_bytes.sum() == 10_000 * ROW
    held = found.memory_bytes[:, [found.memory_categories.index(name) for name in ("weights", "optimizer_state")]]
    assert held.sum() == pytest.approx(0.1 * 10_000 * ROW)
    with pytest.raises(PlanError, match="fit"):
        cached(1.0, topology=replace(CACHING, hbm_cap=1_000_000))


def test_a_larger_cache_and_more_skew_cost_less_and_prefetch_hides_misses() -> None:
    assert price(0.5) < price(0.1) < price(0.01)
    missed = [
        price(0.1, replace(SKEWED, zipf_alpha=alpha)) - price(1.0, replace(SKEWED, zipf_alpha=alpha))
        for alpha in (0.5, 1.2)
    ]
    assert 0 < missed[1] < missed[0]
    ahead = replace(SKEWED, pipeline="prefetch")
    assert price(0.01, ahead) == price(1.0, ahead)


def test_torchrecs_formulas_here_have_no_cache() -> None:
    wish = {"t": ParameterConstraints(compute_kernels=[KERNEL])}
    planner = EmbeddingShardingPlanner(Topology(2), workload=SKEWED, constraints=wish, cost_model="torchrec")
    with pytest.raises(PlanError, match=r"'t' may only be on kernel 'fused_uvm_caching'.*allow 'fused' too"):
        planner.plan_tables([CACHED])
