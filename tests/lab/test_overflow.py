"""Overflow: the first rank that does not fit, by how much, and a fix after which every rank fits."""

from __future__ import annotations

import re

import numpy as np
import pytest

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab import PlanCompare, views
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.lab.views.overflow import smallest_fix
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, Topology, scheme_named
from tests.lab.plans import table

TABLES = [table("movies", 4_000_000), table("users", 3_000_000), table("small", 1000)]  # 256, 192, 0.06 MB


def placed(topology: Topology, **ranks: int) -> ShardingPlan:
    """Table-wise tables on these ranks."""
    made = {t.name: scheme_named("table_wise").default(t, topology, [ranks[t.name]]) for t in TABLES}
    return ShardingPlan({"": EmbeddingModuleShardingPlan(made)})


def of(topology: Topology, plan: ShardingPlan) -> Estimate:
    return estimate(plan, TABLES, topology)


def topology(megabytes: int, ranks: int = 4) -> Topology:
    return Topology(ranks, "cuda", hbm_cap=megabytes * 10**6)


def test_the_first_rank_that_does_not_fit_is_named_with_its_missing_bytes() -> None:
    top = topology(400)
    plan = placed(top, movies=2, users=2, small=0)
    found = of(top, plan)
    needed, usable = found.memory_bytes.sum(axis=1), found.usable_bytes
    assert np.flatnonzero(needed > usable).tolist() == [2]
    view = views.overflow(plan, TABLES, top, Workload())
    assert view.summary.startswith("Rank 2 is the first that does not fit")
    assert f"{bytes_text(needed[2] - usable[2])} are missing" in view.summary
    assert [row[4] for row in view.numbers.rows] == ["yes", "yes", "no", "yes"]
    assert "✗ rank 2" in view.svg
    assert view.svg.count("✓ rank") == 3


def test_the_fix_makes_every_rank_fit() -> None:
    top = topology(400)
    plan = placed(top, movies=2, users=2, small=0)
    fix = smallest_fix(of(top, plan), plan, TABLES, top, Workload())
    named = re.fullmatch(r"table '(\w+)' (?:on rank (\d)|(\w+) instead of table_wise|with data_type.*)", fix.words)
    assert named is not None
    name, rank, scheme = named.groups()
    changed: list[BaseEmbeddingConfig] = TABLES
    if rank:
        after = placed(top, **{"movies": 2, "users": 2, "small": 0, name: int(rank)})
    elif scheme:
        made = dict(plan.plan[""])
        made[name] = scheme_named(scheme).default(next(t for t in TABLES if t.name == name), top, None)
        after = ShardingPlan({"": EmbeddingModuleShardingPlan(made)})
    else:
        pytest.fail(f"half the bytes would not be enough: {fix.words}")
    checked = estimate(after, changed, top)
    assert (checked.memory_bytes.sum(axis=1) <= checked.usable_bytes).all()
    assert checked.memory_bytes.sum(axis=1).max() == pytest.approx(fix.fullest)


def test_where_no_table_can_be_changed_the_fix_is_memory_that_is_enough() -> None:
    top = topology(40)
    plan = placed(top, movies=0, users=1, small=2)
    found = of(top, plan)
    fix = smallest_fix(found, plan, TABLES, top, Workload())
    assert fix.words.startswith("ranks with ")
    factor = (found.memory_bytes.sum(axis=1) / found.usable_bytes).max()
    enough = estimate(plan, TABLES, topology(int(40 * factor) + 1))
    assert (enough.memory_bytes.sum(axis=1) <= enough.usable_bytes).all()
    short = estimate(plan, TABLES, topology(int(40 * factor * 0.98)))
    assert not (short.memory_bytes.sum(axis=1) <= short.usable_bytes).all()


def test_the_comparison_of_plans_offers_it_with_the_fix_of_each_plan() -> None:
    top = topology(400)
    plans = {"full": placed(top, movies=2, users=2, small=0), "dealt": placed(top, movies=2, users=1, small=0)}
    widget = PlanCompare(TABLES, top, Workload(), plans=plans)
    widget.picture.value = "overflow"
    fix = smallest_fix(of(top, plans["full"]), plans["full"], TABLES, top, Workload())
    drawn = widget.comparison.views("overflow")
    assert drawn["full"].summary.endswith(f"Fix: {fix}.")
    assert drawn["dealt"].summary.startswith("Every rank fits.")
    assert "✗ rank 2" in widget.pictures[next(iter(widget.columns))].value
    blocks = [re.search(r'width="([\d.]+)"[^>]*><title>rank 2\nweights: (\d+) MB', view.svg) for view in drawn.values()]
    assert len({round(float(block[1]) / float(block[2]), 3) for block in blocks if block}) == 1  # one scale


def test_a_change_that_rounds_weights_is_named_only_if_no_other_is_enough() -> None:
    sizes = {"movies": 400_000, "users": 300_000, "actors": 250_000, "tags": 200_000, "studios": 150_000}
    tables = [table(name, rows, 64) for name, rows in sizes.items()]
    cap = Topology(4, ddr_cap=120_000_000, reserve_fraction=0.0, cores_per_host=4)
    ranks = dict(zip(sizes, (0, 1, 2, 3, 0), strict=True))
    made = {t.name: scheme_named("table_wise").default(t, cap, [ranks[t.name]]) for t in tables}
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(made)})
    load = Workload(1024, 10.0, optimizer="exact_row_wise_adagrad")
    fix = smallest_fix(estimate(plan, tables, cap, load), plan, tables, cap, load)
    assert not fix.rounds
    assert "FP16" not in fix.words
    alone = Topology(1, ddr_cap=80_000_000, reserve_fraction=0.0, cores_per_host=4)
    whole = scheme_named("table_wise").default(tables[0], alone, [0])
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"movies": whole})})
    fix = smallest_fix(estimate(plan, tables[:1], alone, load), plan, tables[:1], alone, load)
    assert fix.rounds
    assert "table 'movies' with data_type=DataType.FP16" in fix.words
