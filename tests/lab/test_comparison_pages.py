"""Pages of three plans, and of more tables than a list holds: every plan counts, and what is left out is said."""

from __future__ import annotations

from typing import Any

import pytest

from recshard_lab.lab import Candidate, compare_plans, views
from recshard_lab.lab.draw.theme import number
from recshard_lab.lab.exporting.plan_report import (
    MOST_DIFFERENCES,
    MOST_EXPLAINED,
    MOST_OPEN,
    comparison_page,
    plan_page,
)
from recshard_lab.lab.exporting.report import Folded, Section
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, Topology, scheme_named
from recshard_lab.text_table import TextTable
from tests.lab.plans import many, plan_of

RANKS = 4
TOP = Topology(RANKS, ddr_cap=10**13)


def three(count: int, changed: int) -> list[Candidate]:
    """Two plans that are alike, and a third that cuts the last `changed` tables otherwise."""
    tables = many(count)
    rows = plan_of(tables, RANKS, ("row_wise",))
    entries = dict(rows.plan[""])
    for table in tables[count - changed :]:
        entries[table.name] = scheme_named("table_wise").default(table, TOP, [2])
    third = ShardingPlan({"": EmbeddingModuleShardingPlan(entries)})
    plans = {"first": rows, "second": ShardingPlan.from_json(rows.to_json()), "third": third}
    return [Candidate.of(name, plan, tables, TOP) for name, plan in plans.items()]


def section(page: Any, heading: str) -> Section:
    (found,) = (each for each in page.sections if each.heading == heading)
    return found


def listed(page: Any) -> tuple[str, TextTable, bool]:
    """The words over the tables that differ, the list, and whether it is behind a click."""
    parts = section(page, "What differs").parts
    if isinstance(parts[0], Folded):
        return parts[0].summary, parts[0].answer, True
    return parts[0], parts[1], False


def test_what_the_third_plan_alone_does_otherwise_is_listed() -> None:
    page = comparison_page(three(5, 2))
    words, table, folded = listed(page)
    assert words == "2 of 5 tables differ between the plans."
    assert table.heads == ("table", "first", "second", "third")
    assert [row[0] for row in table.rows] == ["t003", "t004"]
    for _, first, second, third in table.rows:
        assert first == second != third
        assert "row_wise" in first
        assert "table_wise" in third
    assert not folded
    alike = comparison_page(three(5, 0))
    assert section(alike, "What differs").parts == ["Every table has the same placement in all plans."]


@pytest.mark.parametrize(
    ("count", "changed", "shown", "folded"),
    [
        (41, 41, 41, True),
        (41, MOST_OPEN, MOST_OPEN, False),
        (41, MOST_OPEN + 1, MOST_OPEN + 1, True),
        (MOST_DIFFERENCES + 1, MOST_DIFFERENCES, MOST_DIFFERENCES, True),
        (MOST_DIFFERENCES + 1, MOST_DIFFERENCES + 1, MOST_DIFFERENCES, True),
    ],
)
def test_many_differing_tables_are_folded_and_what_is_left_out_is_said(
    count: int, changed: int, shown: int, folded: bool
) -> None:
    words, table, is_folded = listed(comparison_page(three(count, changed)))
    assert len(table.rows) == shown
    assert is_folded == folded
    assert words.startswith(f"{changed:,} of {count:,} tables differ between the plans")
    assert (f"the first {MOST_DIFFERENCES} are listed" in words) == (changed > shown)


@pytest.mark.parametrize(("count", "words"), [(40, "For every table"), (41, "For the 40 largest of 41 tables")])
def test_a_page_explains_forty_tables_and_says_which(count: int, words: str) -> None:
    tables = many(count)
    plan = EmbeddingShardingPlanner(TOP).plan_tables(tables)
    parts = section(plan_page(Candidate.of("plan", plan)), "Reasons for each table").parts
    assert parts[0].startswith(words)
    explained = [part.answer for part in parts[1:]]
    assert len(explained) == min(count, MOST_EXPLAINED)
    smallest = min(tables, key=lambda table: table.weight_bytes).name
    assert (smallest in {each.table for each in explained}) == (count == 40)
    shares = [each.share for each in explained]
    assert shares == sorted(shares, reverse=True)


def test_the_slowest_plan_that_fits_is_not_the_slowest_of_all() -> None:
    tables, load = many(3), Workload(4096, 20.0)
    crowded = EmbeddingModuleShardingPlan({t.name: scheme_named("table_wise").default(t, TOP, [3]) for t in tables})
    plans = {"row_wise": plan_of(tables, RANKS, ("row_wise",)), "one rank": ShardingPlan({"": crowded})}
    plans["table_wise"] = plan_of(tables, RANKS, ("table_wise",))
    ample = compare_plans(tables, TOP, plans, load)
    steps = {name: each["step_ms"] for name, each in ample.values.items()}
    held = {name: each["memory_bytes"] for name, each in ample.values.items()}
    largest = max(held, key=lambda name: held[name])
    assert largest == max(steps, key=lambda name: steps[name]) == "one rank"
    others = [name for name in plans if name != largest]
    cap = int((held[largest] + max(held[name] for name in others)) / 2)
    tight = compare_plans(tables, Topology(RANKS, ddr_cap=cap, reserve_fraction=0.0), plans, load)
    assert [name for name in plans if tight[name].fits] == others
    worst, best = max(others, key=lambda name: steps[name]), min(others, key=lambda name: steps[name])
    summary = views.side_by_side(tight).summary
    look = {name: views.side_by_side(compare_plans(tables, TOP, {name: plans[name]}, load)).summary for name in others}
    label = {name: words.removeprefix("Fastest: ").split(",")[0] for name, words in look.items()}
    assert summary.startswith(f"Fastest: {label[best]}, ")
    assert f"slowest that fits: {label[worst]}, {number(steps[worst] / steps[best])} times as long" in summary
