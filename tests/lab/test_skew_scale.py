"""SkewScale: sliders of skew and scale, every number that of a plan made without them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from recshard_lab.lab import SkewScale, compare_plans, views
from recshard_lab.lab.compare.scaling import META
from recshard_lab.planner import AccessProfile, EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.sharding import ParameterConstraints, ShardingPlan, Topology, scheme_names
from tests.lab.plans import many, movielens

TOP = Topology(4, ddr_cap=10**9)
MOVES = [
    {"rows_factor": 1000.0, "batch_size": 2048},
    {"skew": 1.2, "sorted_ids": True, "pooling_factor": 10.0},
    {"skew": META, "rows_factor": 100.0},
    {"machine": "h100", "world_size": 16, "skew": 1.05},
    {"world_size": 1, "skew": 0.0},
]


def scale(**workload: Any) -> SkewScale:
    return SkewScale(movielens(), TOP, Workload(**workload))


def shown(widget: SkewScale) -> dict[str, str]:
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', widget.card.value))


@pytest.mark.gate
@pytest.mark.parametrize("move", MOVES)
def test_a_slider_and_the_python_under_it_give_what_a_planner_gives(move: dict[str, Any]) -> None:
    widget = scale(optimizer="exact_row_wise_adagrad")
    widget.set(**move)
    grown = [replace(t, num_embeddings=round(move.get("rows_factor", 1) * t.num_embeddings)) for t in movielens()]
    ranks = move.get("world_size", 4)
    top = replace(TOP, world_size=ranks, local_world_size=ranks)
    if "machine" in move:
        top = Topology.preset(move["machine"], world_size=ranks, local_world_size=8)
    skew = move.get("skew", 0.0)
    known: dict[str, Any] = {"access": AccessProfile.meta_2021()} if skew == META else {"zipf_alpha": skew}
    load = Workload(
        move.get("batch_size", 512),
        move.get("pooling_factor", 1.0),
        optimizer="exact_row_wise_adagrad",
        frequency_ordered=move.get("sorted_ids", False),
        **known,
    )
    for name, found in widget.comparison.answers.items():
        wish = None if name == "planner" else ParameterConstraints(sharding_types=[name])
        planner = EmbeddingShardingPlanner(
            top, workload=load, constraints={t.name: wish for t in grown} if wish else None
        )
        if found.plan is not None and found.fits:
            assert found.plan == planner.plan_tables(grown, explain=False)
            assert found.estimate is not None
            assert found.estimate.step_ms == estimate(found.plan, grown, top, load).step_ms
    assert list(widget.comparison.answers) == ["planner", *scheme_names()]
    names: dict[str, Any] = {"tables": movielens()}
    exec(widget.python, names)
    assert names["found"].records() == widget.comparison.records()
    assert widget.python.splitlines()[-1] in re.sub("<[^>]*>", "", widget.code.value)
    card = shown(widget)
    assert float(card["step-ms"]) == widget.comparison["planner"].estimate.step_ms  # type: ignore[union-attr]


@pytest.mark.gate
def test_the_tables_whose_scheme_changes_are_told_with_what_the_old_one_would_cost() -> None:
    widget = SkewScale(many(12), Topology(8, ddr_cap=10**11))
    assert widget.changed == []
    assert "Move a slider" in widget.choices.value
    before = widget.comparison["planner"]
    widget.set(machine="h100", world_size=16, rows_factor=100.0)
    after = widget.comparison["planner"]
    assert before.plan is not None
    assert after.plan is not None
    old, new = before.plan.tables(), after.plan.tables()
    differ = {name for name in old if old[name].sharding_type != new[name].sharding_type}
    assert {choice.table for choice in widget.changed} == differ != set()
    assert after.estimate is not None
    for choice in widget.changed:
        assert choice.before == old[choice.table].sharding_type
        assert f'data-table="{choice.table}" data-before="{choice.before}" data-after="{choice.after}"' in (
            widget.choices.value
        )
        assert choice.why
        if choice.more_ms is None:
            continue
        ways = after.plan.explain(choice.table).alternatives
        way = next(way for way in ways if abs(way.more_ms - choice.more_ms) < 1e-12)
        assert way.sharding.sharding_type == choice.before
        moved = ShardingPlan({"": {**new, choice.table: way.sharding}})  # type: ignore[dict-item]
        there = estimate(moved, widget.scaled.tables, widget.scaled.topology, widget.scaled.workload)
        assert there.step_ms - after.estimate.step_ms == pytest.approx(choice.more_ms, abs=1e-9)
        assert ("no longer fits" in choice.why) == (not there.fits)
    widget.pinning.click()
    assert widget.changed == []
    widget.set(machine="unchanged", world_size=8, rows_factor=1.0)
    assert {choice.table for choice in widget.changed} == differ  # and back


def test_more_rows_stop_fitting_and_the_page_says_so() -> None:
    widget = SkewScale(movielens(), Topology(4, ddr_cap=2_000_000))
    assert widget.comparison["planner"].fits
    widget.set(rows_factor=1000.0)
    assert not any(answer.fits for answer in widget.comparison.answers.values())
    assert shown(widget)["fits"] == "false"
    assert 'role="alert"' in widget.card.value
    assert "None of them fits" in widget.schemes.value
    widget.set(rows_factor=1.0)
    assert shown(widget)["fits"] == "true"


def test_bad_values_are_refused_by_name() -> None:
    widget = scale()
    with pytest.raises(ValueError, match="unknown control 'ranks'"):
        widget.set(ranks=3)
    with pytest.raises(ValueError, match="5 is not a step"):
        widget.set(world_size=5)
    with pytest.raises(ValueError, match="unknown machine 'h1000'"):
        widget.set(machine="h1000")
    with pytest.raises(ValueError, match="tables is empty"):
        SkewScale([], TOP)


def test_side_by_side_is_to_scale_and_marks_the_best() -> None:
    found = compare_plans(
        movielens(), TOP, {"planner": "planner", "row_wise": "row_wise", "data_parallel": "data_parallel"}
    )
    view = views.side_by_side(found)
    bars = re.findall(r'<rect x="([\d.]+)" [^>]* width="([\d.]+)"[^>]*><title>([^\n<]+)\n([^<]+)</title>', view.svg)
    steps = {name: float(width) for _, width, name, words in bars if words.startswith("ms per step")}
    for name, label in (("planner", "planner"), ("row_wise", "row-wise"), ("data_parallel", "data-parallel")):
        longest = max(each["step_ms"] for each in found.values.values())
        assert steps[label] / max(steps.values()) == pytest.approx(found.values[name]["step_ms"] / longest, abs=0.01)
    stars = re.findall(r">[\d.]+ [mµKMG]?[sB] ★<", view.svg)
    assert len(stars) == len(found.best["step_ms"]) + len(found.best["memory_bytes"])
    assert len(view.figure.data) == 6
