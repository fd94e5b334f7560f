"""PlanCompare without a browser: controls in, numbers out, errors in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from recshard_lab.lab import PlanCompare, views
from recshard_lab.lab.compare.measure import Measured
from recshard_lab.lab.compare.plan_comparison import compare_plans, views_of_plans
from recshard_lab.lab.compare.question import Question, topology_for
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.widgets import page
from recshard_lab.lab.widgets.plan_columns import AS_GIVEN
from recshard_lab.launcher import launch
from recshard_lab.launcher.errors import ranks_text
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.answers.refusals import PlanDoesNotFit
from recshard_lab.sharding import ParameterConstraints, Shard, ShardingPlan, Topology, scheme_names
from tests.lab.plans import many, movielens

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


def test_the_numbers_shown_are_those_of_the_estimate() -> None:
    widget = compare(batch_size=256)
    widget.menus["movie"].value = "row_wise"
    assert widget.mine.plan is not None
    assert widget.mine.plan.tables()["movie"].sharding_type == "row_wise"
    found = estimate(widget.mine.plan, movielens(), Topology(4, ddr_cap=ROOMY), Workload(batch_size=256))
    assert float(shown(widget, "mine")["step-ms"]) == pytest.approx(found.step_ms, rel=1e-9)
    assert shown(widget, "mine")["fits"] == "true"


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


@pytest.mark.parametrize("scheme", ["auto", "row_wise"])
def test_the_python_under_it_makes_the_same_plan(scheme: str) -> None:
    widget = PlanCompare(
        movielens(),
        Topology(8, ddr_cap=ROOMY, local_world_size=4, intra_host_bw=5e6),
        Workload(pooling_factors={"f_genres": 2.5}, optimizer="exact_row_wise_adagrad"),
        {"movie": scheme},
    )
    names: dict[str, Any] = {"tables": movielens()}
    exec(widget.python, names)
    assert names["plan"] == widget.mine.plan
    assert widget.mine.estimate is not None
    assert names["plan"].estimate.step_ms == widget.mine.estimate.step_ms


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
    cards = {
        (times, others): page.card(
            "mine",
            answer_,
            replace(Measured.of([{"step_ms": times * step, "memory": memory, "sent": {}}] * 2, 10, {}), others=others),
            "Mine",
        )
        for times, others in ((1.4, 0.9), (8.0, 0.9), (8.0, 0.0), (0.5, 0.9))
    }
    assert "times predicted" not in cards[1.4, 0.9]
    assert "Measured is 8 times predicted: other programs used 90% of the cores." in cards[8.0, 0.9]
    assert "Measured is 8 times predicted: the prediction is not calibrated to this machine" in cards[8.0, 0.0]
    assert "Measured is 0.5 times predicted: the prediction is not calibrated" in cards[0.5, 0.9]


def test_a_card_says_which_ranks_the_planner_chose() -> None:
    widget = PlanCompare(movielens(), Topology(16, ddr_cap=ROOMY), Workload(), {"movie": "row_wise"})
    assert widget.mine.plan is not None
    ranks = sorted({shard.rank for shard in widget.mine.plan.tables()["movie"].shards})
    assert 1 < len(ranks) < 16
    assert (
        f"The planner chose ranks for row-wise tables: movie on {ranks_text(ranks)} of 16."
        in widget.cards["mine"].value
    )


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


def test_menus_and_words_say_what_constraints_fix() -> None:
    first = {
        "movie": ParameterConstraints(["table_wise"], ranks=[3]),
        "user": ParameterConstraints(["row_wise"]),
        "age": ParameterConstraints(["row_wise", "table_wise"]),
        "genres": ParameterConstraints(ranks=[0, 1]),
        "gender": ParameterConstraints(shards=[Shard(0, (0, 2), (0, 16))]),
    }
    widget = constrained(first)
    assert [menu.label for menu in widget.menus.values()] == [
        "row-wise, as given",
        "table-wise, rank 3",
        "2 schemes, as given",
        "these shards",
        "auto",
        "auto, ranks 0-1",
    ]
    assert widget.bar.kind.label == "by constraints and by hand"
    assert widget.bar._hand.layout.display == ""
    assert "Both plans have the same settings" in widget.verdict.value
    widget.bar.kind.value = "planner"
    assert widget.bar.kind.label == "by the planner, under constraints"
    widget.bar.kind.value = "hand"
    widget.menus["movie"].value = "table_wise"  # the scheme alone: the planner chooses the rank
    assert "table-wise, rank 3" in [label for label, _ in widget.menus["movie"].options]
    assert widget.mine.plan == planned({**first, "movie": ParameterConstraints(["table_wise"])})
    widget.set_all.value = "row_wise"
    assert {menu.value for menu in widget.menus.values()} == {"row_wise"}
    assert widget.mine.plan == planned({name: ParameterConstraints(["row_wise"]) for name in widget.menus})
    free = PlanCompare(movielens(), Topology(4, ddr_cap=ROOMY))
    assert free.bar.kind.label == "by hand"
    assert {len(menu.options) for menu in free.menus.values()} == {len(scheme_names()) + 1}


def test_a_menu_of_several_tables_shows_that_they_differ_and_is_left_alone_by_others() -> None:
    tables = many(60)
    plans = {"mine": {table.name: "table_wise" for table in tables[:-1]}, "planner": "planner"}
    plans["mine"][tables[-1].name] = ParameterConstraints(["row_wise"], ranks=[2, 3])
    smallest = [table.name for table in sorted(tables, key=lambda table: table.weight_bytes)[:12]]
    plans["mine"][smallest[0]] = ParameterConstraints(["data_parallel"])
    widget = PlanCompare(tables, Topology.preset("h100x4"), plans=plans)
    assert widget.others is not None
    assert widget.others.label == "several schemes"
    widget.menus[next(iter(widget.menus))].value = "row_wise"
    found = widget.mine.plan
    assert found is not None
    kinds = {name: found.tables()[name].sharding_type for name in smallest}
    assert kinds == {**dict.fromkeys(smallest, "table_wise"), smallest[0]: "data_parallel"}
    widget.others.value = "row_wise"
    assert widget.mine.plan is not None
    assert {widget.mine.plan.tables()[name].sharding_type for name in smallest} == {"row_wise"}
    assert widget.others.label == "row-wise"


def test_ranks_of_constraints_are_not_called_the_planners_choice() -> None:
    widget = constrained({"movie": ParameterConstraints(["row_wise"], ranks=[0, 1])})
    assert widget.mine.plan is not None
    assert widget.mine.plan.tables()["movie"].ranks == [0, 1]
    assert "The planner chose ranks" not in widget.cards["mine"].value
    widget.menus["movie"].value = "row_wise"
    found = widget.mine.plan.tables()["movie"].ranks
    assert found is not None
    assert ("The planner chose ranks" in widget.cards["mine"].value) == (len(found) < 4)


def test_the_busiest_rank_is_told_against_the_mean() -> None:
    card = compare().cards["mine"].value
    assert "<span>Busiest rank " in card
    assert re.search(r"<b>\d+\.\d\d x <small>the mean</small>", card)
    assert "Imbalance" not in card


def test_the_python_is_closed_and_the_run_is_beside_the_controls() -> None:
    widget = compare()
    assert "<details data-side" in widget.codes["mine"].value
    assert " open" not in widget.codes["mine"].value
    rows = list(widget.children)
    cells = widget.cells
    parts = (widget.world_size, widget.bar, widget.runs, cells.card_grid, widget.picture, cells.picture_grid)
    order = [
        next(place for place, row in enumerate(rows) if part is row or part in getattr(row, "children", ()))
        for part in (*parts, widget.changes, widget.exports)
    ]
    assert order == sorted(order)


def test_a_view_that_fails_leaves_the_others_and_the_controls_alive() -> None:
    @views.register_view("Broken", place=0)
    def broken(estimate: Any) -> View:
        raise RuntimeError("lost its pen")

    try:
        widget = compare()
        assert "lost its pen" in widget.pictures["mine"].value
        widget.picture.value = "memory"
        assert "Memory per rank" in widget.pictures["mine"].value
        widget.menus["user"].value = "column_wise"
        assert float(shown(widget, "mine")["step-ms"]) > 0
    finally:
        views.unregister_view("broken")


def test_every_view_of_a_plan_is_offered() -> None:
    assert [name for _, name in compare().picture.options] == [
        "placement",
        "memory",
        "phases",
        "balance",
        "traffic",
        "planner_search",
        "overflow",
    ]


def test_the_search_of_each_plan_is_made_again_in_a_thread_and_ends_at_the_plan_shown() -> None:
    widget = compare()
    widget.set({"movie": "row_wise"})
    widget.picture.value = "planner_search"
    assert widget.last_response_ms < 150
    assert widget.wait(30)
    for side, shown_ in (("mine", widget.mine), ("auto", widget.automatic)):
        assert "plans evaluated" in widget.pictures[side].value
        assert shown_.search is not None
        assert shown_.search.chosen is not None
        assert shown_.search.plan(shown_.search.chosen).tables() == dict(shown_.plan.tables())  # type: ignore[union-attr]
    assert set(widget.mine.search.single_schemes) >= {"row_wise"}  # type: ignore[union-attr]
    found = widget.mine.search
    widget.picture.value = "memory"
    widget.picture.value = "planner_search"
    assert "plans evaluated" in widget.pictures["mine"].value
    assert widget.mine.search is found
    widget.world_size.value = 2
    assert widget.wait(30)
    assert "plans evaluated" in widget.pictures["mine"].value
    assert widget.mine.search is not found


def test_a_plan_that_was_given_has_no_search() -> None:
    tables = movielens()
    made = EmbeddingShardingPlanner(Topology(4)).plan_tables(tables)
    drawn = compare_plans(tables, Topology(4), plans={"given": made, "planner": "planner"}).views("planner_search")
    assert "no planner made this plan" in drawn["given"].problem
    assert not drawn["planner"].problem


def test_one_rank_is_one_rank() -> None:
    found = compare_plans(movielens()[:1], Topology(1), {"planner": "planner"})
    shown = [view for name in views_of_plans() for view in found.views(name).values()]
    assert [view.name for view in shown if re.search(r"\b1 (ranks|tables|shards)\b", view.text + view.img)] == []
    assert "between 1 rank" in found.views("traffic")["planner"].title


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


def test_hundreds_of_tables_share_one_menu_and_still_follow_set_all() -> None:
    widget = PlanCompare(many(200), Topology(8, ddr_cap=10**12))
    assert len(widget.menus) == 48
    widget.set_all.value = "row_wise"
    assert widget.mine.plan is not None
    assert {s.sharding_type for s in widget.mine.plan.tables().values()} == {"row_wise"}


def test_every_control_is_labelled() -> None:
    widget = compare()
    for control in [*widget.menus.values(), widget.set_all, widget.world_size, widget.batch_size, widget.memory_cap]:
        assert control.description
    assert widget.button.description == "Run on ranks"


def test_a_saved_output_shows_both_plans_without_a_kernel_and_stays_small() -> None:
    bundle = PlanCompare(many(26), Topology(8, ddr_cap=10**11))._repr_mimebundle_()
    assert bundle["text/html"].count("<img ") == 2
    assert len(bundle["text/html"]) < 100_000
    assert bundle["text/plain"].count(" per step, fits") == 2


def test_more_gpus_than_a_host_has_are_in_further_hosts() -> None:
    h100 = Topology.preset("h100x8")
    found = {ranks: topology_for(Question({}, ranks, 512, 10**9), h100).local_world_size for ranks in (4, 8, 16, 64)}
    assert found == {4: 4, 8: 8, 16: 8, 64: 8}
    assert topology_for(Question({}, 6, 512, 10**9), Topology(2)).local_world_size == 6  # processes of one machine
