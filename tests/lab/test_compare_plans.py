"""Two to six plans side by side: every number is the estimate's, whatever a column is made of."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from recshard_lab.lab import PlanCompare, compare_plans, views
from recshard_lab.lab.compare.plan_comparison import ROWS
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.sharding import ParameterConstraints, ShardingPlan, Topology
from tests.lab.plans import many, movielens, plan_of
from tests.test_bad_arguments import JUNK

TOP = Topology(4, ddr_cap=10**9)
LOAD = Workload(batch_size=256, zipf_alpha=0.8)
DRAWN = plan_of(movielens(), 4)


def plans() -> dict[str, Any]:
    """A column of every kind."""
    return {
        "planned": "planner",
        "rows": "row_wise",
        "by hand": {"movie": "column_wise", "user": "table_wise"},
        "under constraints": {"movie": ParameterConstraints(ranks=[2, 3], forbidden_sharding_types=["data_parallel"])},
        "their formulas": EmbeddingShardingPlanner(TOP, cost_model="torchrec", route="direct"),
        "loaded": ShardingPlan.from_json(DRAWN.to_json()),
    }


def truth(wish: Any) -> ShardingPlan:
    """The same plan, made without any of the lab."""
    if isinstance(wish, ShardingPlan):
        return wish.resolved(movielens(), 4)
    if isinstance(wish, EmbeddingShardingPlanner):
        return EmbeddingShardingPlanner(TOP, workload=LOAD, cost_model=wish.cost_model, route=wish.route).plan_tables(
            movielens()
        )
    if wish == "planner":
        wish = {}
    elif isinstance(wish, str):
        wish = {table.name: wish for table in movielens()}
    asked = {
        name: value if isinstance(value, ParameterConstraints) else ParameterConstraints(sharding_types=[value])
        for name, value in wish.items()
    }
    return EmbeddingShardingPlanner(TOP, workload=LOAD, constraints=asked).plan_tables(movielens())


def six() -> PlanCompare:
    return PlanCompare(movielens(), TOP, LOAD, plans=plans())


def shown(widget: PlanCompare, key: str) -> dict[str, str]:
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', widget.cards[key].value))


def test_the_cards_carry_the_numbers_of_the_plain_function_and_mark_the_best_of_each_row() -> None:
    widget, found = six(), compare_plans(movielens(), TOP, plans(), LOAD)
    for row in ROWS:
        every = {name: row.value(answer) for name, answer in found.answers.items()}
        best = {name for name, value in every.items() if value <= 1.005 * min(every.values())}
        assert found.best[row.name] == (best if len(best) < len(every) else set())
        for name, value in every.items():
            card = shown(widget, name)
            assert float(card[row.name.replace("_", "-")]) == value
            assert (row.name in card["best"].split()) == (name in found.best[row.name])
    assert sum(card.value.count("★ best") for card in widget.cards.values()) == sum(map(len, found.best.values())) > 3
    assert found.text.count("(best)") == sum(map(len, found.best.values()))


def test_imbalance_and_bytes_are_those_of_the_estimate() -> None:
    found = compare_plans(movielens(), TOP, plans(), LOAD)
    for name, record in zip(plans(), found.records(), strict=True):
        estimated = found[name].estimate
        assert estimated is not None
        busy = [sum(row) for row in estimated.ms.tolist()]
        assert record["imbalance"] == pytest.approx(max(busy) / (sum(busy) / len(busy)))
        sent = [
            value for i, row in enumerate(estimated.traffic_bytes.tolist()) for j, value in enumerate(row) if i != j
        ]
        assert record["sent_bytes"] == pytest.approx(sum(sent))
        assert record["memory_bytes"] == pytest.approx(estimated.memory_bytes.sum(axis=1).max())


@pytest.mark.parametrize("name", plans())
def test_a_column_and_the_python_under_it_have_the_plan_and_the_estimate_of_its_kind(name: str) -> None:
    widget, names = six(), {"tables": movielens()}
    answer, plan = widget.answers[name], truth(plans()[name])
    assert answer.plan == plan
    assert answer.estimate is not None
    assert answer.estimate.step_ms == estimate(plan, movielens(), TOP, LOAD).step_ms
    assert re.sub("<[^>]*>", "", widget.codes[name].value)
    exec(widget.python_of(name), names)
    found: Any = names.get("found") or names["plan"].estimate  # type: ignore[attr-defined]
    assert found.step_ms == float(shown(widget, name)["step-ms"])
    assert plan == names["plan"] or name == "loaded"


def test_the_python_of_the_whole_comparison_runs_and_gives_all_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    widget, names = six(), {"tables": movielens()}
    widget.set(batch_size=1024)
    widget.set({"genres": "table_wise"}, column="by hand")
    widget.set(column="planned")
    widget.bar.allowed["row_wise"].value = widget.bar.allowed["data_parallel"].value = False
    exec(widget.python_of_all, names)
    found: Any = names["found"]
    assert found.records() == widget.comparison.records()
    assert {record["step_ms"] for record in found.records()} == {float(shown(widget, k)["step-ms"]) for k in plans()}
    printed = capsys.readouterr().out
    assert "tables change" in printed  # the diff that is shown, too


@pytest.mark.parametrize("name", ["placement", "memory", "phases", "traffic"])
def test_pictures_side_by_side_are_to_one_scale(name: str) -> None:
    found = compare_plans(movielens(), TOP, {"whole": "data_parallel", "cut": "row_wise", "drawn": DRAWN}, LOAD)
    alone = {
        plan: views.draw(name, plan=a.plan, tables=movielens(), topology=TOP, estimate=a.estimate, width=500)
        for plan, a in found.answers.items()
    }
    pictures = found.views(name)
    assert pictures["cut"].extent < max(view.extent for view in pictures.values())
    assert pictures["cut"].svg != alone["cut"].svg
    if name in ("placement", "memory"):
        assert len({round(per, 2) for view in pictures.values() for per in _pixels_a_byte(view.svg)}) == 1


def _pixels_a_byte(svg: str) -> list[float]:
    """Height / bytes of the drawn blocks that say their bytes exactly enough, in pixels a kB."""
    found = []
    for height, hover in re.findall(r'<rect [^>]*height="([\d.]+)"[^>]*><title>([^<]*)</title>', svg):
        size = re.search(r"([\d.]+) KB", hover)
        if size and float(height) > 30:
            found.append(round(float(height) / float(size[1]), 1))
    assert found
    return found


def test_columns_are_added_and_removed_between_two_and_six() -> None:
    widget = PlanCompare(movielens(), TOP, LOAD)
    assert list(widget.columns) == ["mine", "auto"]
    assert widget.bar.remove.disabled
    widget.menus["movie"].value = "row_wise"
    for count in range(3, 7):
        widget.bar.add.click()
        assert len(widget.cards) == len(widget.cells.card_grid.children) == len(widget.answers) == count
        assert widget.mine.question.chosen == {"movie": "row_wise"}  # a copy of the one before
    assert widget.bar.add.disabled
    assert widget.bar.load.disabled
    with pytest.raises(ValueError, match="at most 6"):
        widget.add("seventh", "planner")
    widget.menus["user"].value = "column_wise"
    chosen = widget.bar.chosen.key
    assert shown(widget, chosen)["step-ms"] != shown(widget, "mine")["step-ms"]  # the others stay as they are
    for _ in range(4):
        widget.bar.remove.click()
    assert len(widget.answers) == 2
    with pytest.raises(ValueError, match="at least 2"):
        widget.remove(next(iter(widget.columns)))
    with pytest.raises(ValueError, match="unknown plan 'ghost'"):
        widget.remove("ghost")


def test_a_plan_is_loaded_from_json_and_a_broken_file_is_a_sentence() -> None:
    widget = PlanCompare(movielens(), TOP, LOAD)
    widget.bar.load.receive("drawn.json", DRAWN.to_json())
    assert list(widget.columns) == ["mine", "auto", "drawn"]
    assert float(shown(widget, "drawn")["step-ms"]) == estimate(DRAWN, movielens(), TOP, LOAD).step_ms
    assert widget.bar.kind.value == "given"
    widget.bar.load.receive("x.json", "{}")
    assert len(widget.columns) == 3
    assert 'role="alert"' in widget.message.value
    widget.bar.kind.value = "hand"  # begins with the schemes it has
    assert widget.mine.question.chosen == {name: s.sharding_type for name, s in DRAWN.tables().items()}


def test_a_given_plan_for_other_ranks_says_so_and_keeps_its_column() -> None:
    widget = six()
    widget.world_size.value = 2
    assert widget.answers["loaded"].plan is None
    assert "rank" in widget.answers["loaded"].problem
    assert 'role="alert"' in widget.cards["loaded"].value
    assert "No changes to list" in _told(widget, "planned", "loaded")
    assert "of 6 do not fit" in widget.verdict.value
    widget.world_size.value = 4
    assert shown(widget, "loaded")["fits"] == "true"


def test_a_diff_counts_the_lookups_that_constraints_state() -> None:
    schemes = {"whole": "table_wise", "rows": "row_wise"}
    plans = {
        name: {"movie": ParameterConstraints([scheme], pooling_factors=[50.0])} for name, scheme in schemes.items()
    }
    found = compare_plans(movielens(), TOP, plans)
    changes = found.diff("rows", baseline="whole")
    for name, costs in (("whole", changes.before), ("rows", changes.after)):
        assert costs.step_ms == found.values[name]["step_ms"]


def _told(widget: PlanCompare, before: str, after: str) -> str:
    widget.changes.baseline.value, widget.changes.compared.value = before, after
    return str(widget.changes.table.value)


def test_a_given_plan_that_is_too_large_is_shown_as_such() -> None:
    tight = Topology(4, ddr_cap=500_000)
    found = compare_plans(movielens(), tight, {"given": plan_of(movielens(), 4, ("data_parallel",)), "p": "planner"})
    assert not found["given"].fits
    assert re.search(r"rank 0 needs .*, 450.0 of 500.0 KB usable", found["given"].problem)
    assert found.best == {key: {"p"} for key in found.best}  # a plan that does not fit is never the best


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "must map a name to each plan"),
        ({"one": "planner"}, "shows 2 to 6 plans, got 1"),
        ({f"p{i}": "planner" for i in range(7)}, "got 7"),
        ({"a": "planner", "b": "rowwise"}, "unknown scheme 'rowwise'"),
        ({"a": "planner", "b": {"film": "row_wise"}}, "unknown table 'film'"),
        ({"a": "planner", "b": {"movie": "rows"}}, "unknown scheme 'rows'"),
        ({"a": "planner", "b": 3}, "a plan is a ShardingPlan"),
        ({"a": "planner", "": "planner"}, "must be non-empty"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PlanCompare(movielens(), TOP, plans=given)


@pytest.mark.parametrize("argument", ["tables", "topology", "plans", "workload"])
def test_a_wrong_argument_is_a_value_error(argument: str) -> None:
    for junk in JUNK:
        given = {"tables": movielens(), "topology": TOP, "plans": {"a": "planner"}, "workload": LOAD, argument: junk}
        with contextlib.suppress(ValueError):  # anything else fails the test
            str(compare_plans(**given))


def test_many_ranks_are_planned_in_a_thread_and_the_newest_request_wins() -> None:
    widget = PlanCompare(many(40), Topology(8, ddr_cap=10**12), schemes={"t001": "row_wise"})
    for ranks in (32, 48, 64):
        widget.world_size.value = ranks
    assert "computing" in widget.cards["mine"].value
    assert "Computing 2 plans of 40 tables on 64 ranks" in widget.verdict.value
    assert widget.mine.topology.world_size == 64  # asking waits
    assert widget.answers["auto"].topology.world_size == 64
    assert not [key for key in widget._cached if key[5] == 48]  # nobody waited for it
    assert float(shown(widget, "mine")["step-ms"]) == widget.mine.estimate.step_ms  # type: ignore[union-attr]


def test_a_saved_output_shows_six_plans_and_stays_small() -> None:
    bundle = six()._repr_mimebundle_()
    assert bundle["text/html"].count("<img ") == 6
    assert len(bundle["text/html"]) < 200_000
    assert bundle["text/plain"].count(" per step, fits") == 6
    plain = compare_plans(movielens(), TOP, plans(), LOAD)
    assert plain._repr_html_().count("<img ") == 6


def test_a_plan_is_scored_between_two_others() -> None:
    whole = {"slow": "row_wise", "half": "column_wise", "planner": "planner"}
    found = compare_plans(movielens(), TOP, whole, LOAD)
    step = {name: values["step_ms"] for name, values in found.values.items()}
    saved = 100 * (step["slow"] - step["half"]) / (step["slow"] - step["planner"])
    assert found.score("half", "slow") == pytest.approx(saved)
    assert found.score("slow", "half", best="planner") < 0
    with pytest.raises(ValueError, match="is no shorter than 'planner'"):
        found.score("half", "planner", best="slow")
    full = compare_plans(movielens(), Topology(4, ddr_cap=10**4), whole, LOAD)
    with pytest.raises(ValueError, match="the plan 'slow' does not fit"):
        full.score("half", "slow")
