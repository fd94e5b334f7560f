"""PlanCompare without a browser: controls in, numbers out, errors in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from recshard_lab.lab import PlanCompare
from recshard_lab.lab.compare.measure import Measured
from recshard_lab.lab.compare.plan_comparison import compare_plans
from recshard_lab.lab.compare.question import Question, topology_for
from recshard_lab.lab.widgets import page
from recshard_lab.lab.widgets.plan_columns import AS_GIVEN
from recshard_lab.launcher import launch
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.planner.answers.refusals import PlanDoesNotFit
from recshard_lab.sharding import ParameterConstraints, Shard, ShardingPlan, Topology
from tests.lab.plans import movielens

ROOMY = 10**9


def compare(world_size: int = 4, cap: int = ROOMY, **workload: Any) -> PlanCompare:
    return PlanCompare(movielens(), Topology(world_size, ddr_cap=cap), Workload(**workload))


def shown(widget: PlanCompare, side: str) -> dict[str, str]:
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', widget.cards[side].value))


def test_it_begins_with_the_planners_plan_on_both_sides() -> None:
    widget = compare()
    expected = EmbeddingShardingPlanner(Topology(4, ddr_cap=ROOMY), workload=Workload()).plan_tables(movielens())
    assert widget.mine.plan == widget.automatic.plan == expected
    assert "Every table is on auto" in widget.verdict.value


def test_every_control_changes_what_is_planned() -> None:
    widget = compare()
    widget.world_size.value = 2
    assert widget.mine.topology.world_size == 2
    widget.batch_size.value = 1024
    assert widget.mine.workload.batch_size == 1024
    widget.memory_cap.value = 4_000_000
    assert widget.mine.topology.memory_cap_bytes == 4_000_000
    widget.set_all.value = "data_parallel"
    assert widget.mine.plan is not None
    assert {s.sharding_type for s in widget.mine.plan.tables().values()} == {"data_parallel"}
    assert widget.set_all.value == ""


def test_the_python_of_set_all_is_one_line() -> None:
    widget = compare()
    widget.set_all.value = "table_wise"
    assert 'constraints={table.name: "table_wise" for table in tables}' in widget.python
    names: dict[str, Any] = {"tables": movielens()}
    exec(widget.python, names)
    assert names["plan"] == widget.mine.plan


def test_a_plan_that_does_not_fit_is_shown_with_the_planners_refusal() -> None:
    widget = compare()
    widget.set({"movie": "table_wise"}, memory_cap=64_000)
    assert shown(widget, "mine")["fits"] == "false"
    assert "does not fit" in widget.mine.problem
    assert "Traceback" not in widget.cards["mine"].value
    widget.explain()
    constraints = {"movie": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(PlanDoesNotFit) as refusal:
        EmbeddingShardingPlanner(widget.mine.topology, constraints=constraints).plan_tables(movielens())
    assert widget.mine.problem == refusal.value.worded("widget")
    assert "Fix: " in widget.cards["mine"].value


def test_the_memory_that_a_refusal_names_is_the_smallest_with_which_the_widget_has_a_plan() -> None:
    widget = compare()
    widget.set(memory_cap=192_000)
    widget.explain()
    ((number, unit),) = re.findall(r"Memory per rank: ([\d.]+) ([KM])B or more", widget.cards["mine"].value)
    enough = round(float(number) * {"K": 1e3, "M": 1e6}[unit])
    assert "ddr_cap" not in widget.cards["mine"].value
    for cap, fits in ((enough, "true"), (int(0.9 * enough), "false")):
        again = PlanCompare(movielens(), Topology(4, ddr_cap=cap), Workload())
        assert shown(again, "auto")["fits"] == fits


def test_run_without_ranks_says_how_to_launch_them() -> None:
    widget = compare()
    widget.button.click()
    assert "%recshard_launch -n 4" in widget.message.value
    with pytest.raises(ValueError, match="No ranks are launched"):
        widget.run()


@pytest.mark.gate
def test_after_a_run_a_moved_control_leaves_nothing_measured_on_card_or_picture() -> None:
    widget = compare(world_size=2)
    widget.picture.value = "memory"
    with launch(2):
        widget.button.click()
        assert widget.worker.wait("run")
    ran = widget.measured
    assert ran is not None
    for _ in range(2):
        assert "measured" in widget.cards["mine"].value
        assert "measured" in widget.pictures["mine"].value
        assert "measured" not in widget.cards["auto"].value
        assert "Measured" in widget.message.value
        widget.menus["movie"].value = "column_wise"
        assert widget.measured is None
        for shown_ in (*widget.cards.values(), *widget.pictures.values(), widget.message):
            assert "easured" not in shown_.value
        widget.menus["movie"].value = "auto"  # back where it was measured
        widget.message.value = "Measured"
        assert widget.measured is ran


def test_a_card_says_why_predicted_and_measured_are_far_apart() -> None:
    answer_ = compare(world_size=2).mine
    assert answer_.estimate is not None
    step = answer_.estimate.step_ms
    memory = {"weights": 1}
    for times, others, words in (
        (8.0, 0.9, "Measured is 8 times predicted: other programs used 90% of the cores."),
        (8.0, 0.0, "Measured is 8 times predicted: the prediction is not calibrated to this machine"),
        (0.5, 0.9, "Measured is 0.5 times predicted: the prediction is not calibrated"),
    ):
        measured = Measured.of([{"step_ms": times * step, "memory": memory, "sent": {}}] * 2, 10, {})
        assert words in page.card("mine", answer_, replace(measured, others=others), "Mine")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"sharding_types": ["table_wise"], "ranks": [3]}, {}),
        ({"sharding_types": ["column_wise"], "ranks": [1, 2], "min_partition": 8}, {"pooling_factors": [20.0]}),
        ({"ranks": [1], "route": "direct", "compute_kernels": ["fused_uvm"], "colocate_with": ["user"]}, {}),
        ({"shards": [Shard(2, (0, 1682), (0, 16))]}, {"is_weighted": True}),
    ],
    ids=["a rank", "column shards", "no scheme", "shards"],
)
def test_a_menu_replaces_the_whole_constraint_of_its_table(given: dict[str, Any], kept: dict[str, Any]) -> None:
    beside = {"user": ParameterConstraints(["table_wise"], ranks=[1])}
    first = {"movie": ParameterConstraints(**given, **kept), **beside}
    widget = constrained(first)
    menu = widget.menus["movie"]
    assert menu.value == AS_GIVEN
    assert widget.mine.plan == planned(first)
    for scheme in ("row_wise", "data_parallel", "auto", AS_GIVEN):
        menu.value = scheme
        own = ParameterConstraints(None if scheme == "auto" else [scheme], **kept)
        expected = planned(first if scheme == AS_GIVEN else {"movie": own, **beside})
        assert widget.mine.plan == expected
        assert widget.mine.estimate is not None
        assert widget.mine.estimate.step_ms == expected.estimate.step_ms
        names: dict[str, Any] = {"tables": movielens()}
        exec(widget.python, names)
        assert names["plan"] == expected
        names |= {"compare_plans": compare_plans}
        exec(widget.python_of_all, names)
        assert names["found"]["mine"].plan == expected
        assert names["found"]["first"].plan == planned(first)


def constrained(first: dict[str, ParameterConstraints]) -> PlanCompare:
    return PlanCompare(movielens(), Topology(4, ddr_cap=ROOMY), plans={"mine": first, "first": first})


def planned(constraints: dict[str, ParameterConstraints]) -> ShardingPlan:
    return EmbeddingShardingPlanner(Topology(4, ddr_cap=ROOMY), constraints=constraints).plan_tables(movielens())


def test_a_plan_that_was_given_has_no_search() -> None:
    tables = movielens()
    made = EmbeddingShardingPlanner(Topology(4)).plan_tables(tables)
    drawn = compare_plans(tables, Topology(4), plans={"given": made, "planner": "planner"}).views("planner_search")
    assert "no planner made this plan" in drawn["given"].problem
    assert not drawn["planner"].problem


def test_bad_values_are_refused_by_name() -> None:
    widget = compare()
    with pytest.raises(ValueError, match="unknown scheme 'rowwise'"):
        widget.set({"movie": "rowwise"})
    with pytest.raises(ValueError, match="unknown table 'film'"):
        widget.set({"film": "row_wise"})
    with pytest.raises(ValueError, match="5 is not a step of this slider"):
        widget.set(world_size=5)
    with pytest.raises(ValueError, match="tables is empty"):
        PlanCompare([], Topology(2))


def test_more_gpus_than_a_host_has_are_in_further_hosts() -> None:
    h100 = Topology.preset("h100x8")
    found = {ranks: topology_for(Question({}, ranks, 512, 10**9), h100).local_world_size for ranks in (4, 8, 16, 64)}
    assert found == {4: 4, 8: 8, 16: 8, 64: 8}
    assert topology_for(Question({}, 6, 512, 10**9), Topology(2)).local_world_size == 6  # processes of one machine
