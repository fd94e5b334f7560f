"""Skewed ids: estimates price rows by their lookups, and plans use this. Without a given skew, none is assumed."""

from typing import Any

import numpy as np
import pytest

from recshard_lab import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    ParameterConstraints,
    ShardingPlan,
    Topology,
    Workload,
    estimate,
    flex_shard,
    row_wise,
)
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.planner.model.loads import IDS, Rects
from recshard_lab.planner.model.overlap import FIGURES
from recshard_lab.sharding import RowShares, tiling
from tests.planner.problems import best_plan
from tests.refusals import not_refused

#: launches would hide what lookups cost at this size
GPUS = Topology.preset("h100x8", **dict.fromkeys((*FIGURES["host"], "kernel_ms", "peer_ms", "straggler_sigma"), 0.0))
ALPHA = 1.1


def tables(sequence: bool = False) -> list[Any]:
    kind: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
    sizes = (5_000_000, 20_000_000, 1_000_000, 50_000)
    return [
        kind(name=f"t{i}", num_embeddings=rows, embedding_dim=64, feature_names=[f"f{i}"])
        for i, rows in enumerate(sizes)
    ]


def load(ordered: Any = True, **more: Any) -> Workload:
    given: dict[str, Any] = {"batch_size": 8192, "pooling_factors": 20.0, "zipf_alpha": ALPHA, **more}
    return Workload(frequency_ordered=ordered, **given)


def plan_by(generator: Any, configs: list[Any], topology: Topology = GPUS) -> ShardingPlan:
    return ShardingPlan({"": {config.name: generator(config, topology) for config in configs}})


def ids_by_rank(plan: ShardingPlan, configs: list[Any], workload: Workload) -> np.ndarray:
    model = CostModel(configs, GPUS, workload)
    return plan_loads(model, plan.pairs(configs))[IDS]


def test_ids_of_a_rank_are_those_of_its_rows() -> None:
    config = tables()[2]
    plan = plan_by(row_wise(boundaries=[10, 1000, 100_000], ranks=[0, 1, 2, 3]), [config])
    each = np.arange(1.0, config.num_embeddings + 1) ** -ALPHA
    truth = [each[a:b].sum() / each.sum() for a, b in ((0, 10), (10, 1000), (1000, 100_000), (100_000, None))]
    found = ids_by_rank(plan, [config], load())
    assert found[:4] / found.sum() == pytest.approx(truth, abs=0.002)
    unsaid = ids_by_rank(plan, [config], load(False))
    assert unsaid[:4] / unsaid.sum() == pytest.approx(np.array([10, 990, 99_000, 900_000]) / 1e6)


@pytest.mark.parametrize("sequence", [False, True])
def test_pieces_of_a_table_together_look_up_what_the_table_does(sequence: bool) -> None:
    configs, workload = tables(sequence), load()
    model = CostModel(configs, GPUS, workload)
    of = np.repeat(np.arange(4), 3)
    rows = np.array([config.num_embeddings for config in configs], dtype=float)
    first = np.stack([np.zeros(4), rows // 100, rows // 2], axis=1).ravel()
    sizes = np.stack([rows // 100, rows // 2 - rows // 100, rows - rows // 2], axis=1).ravel()
    nothing, cols = np.zeros(12), np.full(12, 64.0)
    parts = model.rect_loads(Rects(of, sizes, cols, nothing, nothing, first=first))[IDS].reshape(4, 3).sum(axis=1)
    whole = model.rect_loads(Rects(np.arange(4), rows, cols[:4], nothing[:4], nothing[:4], first=nothing[:4]))[IDS]
    assert parts == pytest.approx(whole)


def test_a_plan_of_unsorted_ids_replicates_no_hot_rows() -> None:
    plans = [best_plan(tables(), GPUS, workload=load(ordered)) for ordered in (False, frozenset())]
    assert plans[0] == plans[1]
    assert "flex_shard" not in {sharding.sharding_type for sharding in plans[0].tables().values()}


@pytest.mark.parametrize("sequence", [False, True])
def test_a_planner_that_knows_the_skew_plans_better_than_one_that_does_not(sequence: bool) -> None:
    """Both plans priced with the skew; the blind one cuts rows where all the lookups are."""
    configs = tables(sequence)
    blind = best_plan(configs, GPUS, workload=load(False))
    seeing = best_plan(configs, GPUS, workload=load())
    seeing.validate(configs, 8)
    costs = [estimate(plan, configs, GPUS, load()).step_ms for plan in (blind, seeing)]
    assert costs[1] < 0.85 * costs[0]
    uneven = [s for s in seeing.tables().values() if s.sharding_type in ("row_wise", "flex_shard")]
    assert any(len({shard.num_rows for shard in s.shards}) > 2 or len(s.shards) == 2 for s in uneven)
    assert sequence == any(s.sharding_type == "flex_shard" for s in seeing.tables().values())


def test_hot_rows_cost_memory_on_every_rank_and_fewer_bytes_of_sequences() -> None:
    configs = tables(sequence=True)
    plain, hot = (plan_by(g, configs) for g in (row_wise(), flex_shard(hot_rows=1000)))
    before, after = (estimate(plan, configs, GPUS, load()) for plan in (plain, hot))
    weights = [own.memory_bytes[:, 0].sum() for own in (before, after)]
    assert weights[1] - weights[0] == pytest.approx(7 * 4 * 1000 * 64 * 4)
    assert after.traffic_bytes.sum() < 0.5 * before.traffic_bytes.sum()
    assert after.step_ms < before.step_ms


def test_equal_lookups_give_way_to_memory() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=20_000_000, embedding_dim=64, feature_names=["f"])
    most = []
    wish = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    for gib in (80, 2):
        tight = Topology(8, "cuda", hbm_cap=gib << 30, local_world_size=8)
        plan = best_plan([config], tight if gib < 80 else Topology.preset("h100x8"), workload=load(), constraints=wish)
        assert plan.estimate.fits
        most.append(max(shard.num_rows for shard in plan.tables()["t"].shards))
    assert most[1] * 64 * 4 < 2 << 30 < most[0] * 64 * 4  # most rows are cold


def test_measured_shares_need_no_order_of_the_ids() -> None:
    """The hot rows are in the middle. The row shards follow them."""
    draw = np.random.default_rng(0)
    ids = (500_000 + draw.normal(0, 2000, 100_000)).astype(np.int64)
    curve = RowShares.of_ids([ids], 1_000_000)
    config = EmbeddingBagConfig(name="t", num_embeddings=1_000_000, embedding_dim=64, feature_names=["f"])
    wish = {"t": ParameterConstraints(row_shares=curve, sharding_types=["row_wise"])}
    plan = best_plan([config], GPUS, workload=load(False), constraints=wish)
    shards = plan.tables()["t"].shards
    inside = [shard for shard in shards if 480_000 < shard.rows[0] < 520_000]
    assert inside
    served = [((ids >= s.rows[0]) & (ids < s.rows[1])).mean() for s in shards]
    assert max(served) < 1.5 / len(shards)


def test_replicas_drawn_by_hand_cost_what_a_scheme_of_them_does() -> None:
    config = tables()[3]
    drawn = [(rank, (0, 100), None) for rank in range(8)]
    drawn += [(rank, (100 + rank * 6238, min(50_000, 100 + (rank + 1) * 6238)), None) for rank in range(8)]
    by_hand, made = plan_by(tiling(drawn), [config]), plan_by(flex_shard(hot_rows=100), [config])
    one, other = (estimate(plan, [config], GPUS, load()) for plan in (by_hand, made))
    assert one.ms == pytest.approx(other.ms)
    pinned = {"t3": ParameterConstraints(shards=by_hand.tables()["t3"].shards)}
    plan = best_plan([config], GPUS, workload=load(), constraints=pinned)
    assert plan.tables()["t3"].shards == by_hand.tables()["t3"].shards
    assert plan.estimate.step_ms == pytest.approx(one.step_ms)


@pytest.mark.parametrize("route", ["direct", "reduce_scatter", "two_hop"])
def test_the_planner_and_the_estimate_agree_on_hot_rows_under_every_route(route: str) -> None:
    topology = Topology.preset("h100x16")
    configs = tables()[2:]
    wish = {c.name: ParameterConstraints(sharding_types=["flex_shard"], route=route) for c in configs}
    plan = best_plan(configs, topology, workload=load(), constraints=wish)
    assert {s.sharding_type for s in plan.tables().values()} == {"flex_shard"}
    assert plan.estimate.ms == pytest.approx(estimate(plan, configs, topology, load(), wish).ms)


def test_wrong_curves_and_names_are_refused() -> None:
    configs = tables()
    wish = {"t0": ParameterConstraints(row_shares=RowShares.zipf(10, 1.0))}
    other = "table 't0' has 5,000,000 rows, its row_shares are those of 10"
    refusals: list[tuple[Any, str]] = [
        (lambda: best_plan(configs, GPUS, workload=load(["unknown"])), "names 'unknown', which is not a table"),
        (lambda: best_plan(configs, GPUS, workload=load(), constraints=wish), other),
        (lambda: load("t0"), "frequency_ordered must be True, False or names"),
        (lambda: ParameterConstraints(row_shares=[0.5, 0.5]), "row_shares must be RowShares"),  # type: ignore[arg-type]
    ]
    assert not_refused(refusals) == []
