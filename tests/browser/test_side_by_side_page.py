"""Six plans side by side, and the sliders of skew and scale, in a real JupyterLab: what the page says is Python's."""

from __future__ import annotations

from typing import Any

import pytest

from recshard_lab.lab import compare_plans, views
from recshard_lab.lab.compare.scaling import Scaled, Setting
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.sharding import Topology
from tests.browser.lab_server import ran_notebook, wait_for_step
from tests.lab.plans import many, plan_of

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

TABLES, TOP, LOAD = many(26), Topology(8, ddr_cap=10**11), Workload(2048)
LONG = "a plan with a name much longer than the others"
PLANS: dict[str, Any] = {
    "planned": "planner",
    "rows": "row_wise",
    "whole tables": "table_wise",
    "two by hand": {"t000": "row_wise", "t001": "column_wise"},
    LONG: plan_of(TABLES, 8),
}
CELLS = [
    "from tests.lab.plans import many, plan_of\n"
    "from recshard_lab.lab import PlanCompare, SkewScale\n"
    "from recshard_lab.planner import EmbeddingShardingPlanner, Workload\n"
    "from recshard_lab.sharding import Topology\n"
    "tables, top = many(26), Topology(8, ddr_cap=10**11)\n"
    "plans = {'planned': 'planner', 'rows': 'row_wise', 'whole tables': 'table_wise',\n"
    "         'two by hand': {'t000': 'row_wise', 't001': 'column_wise'},\n"
    f"         '{LONG}': plan_of(tables, 8)}}\n"
    "widget = PlanCompare(tables, top, Workload(2048), plans=plans)\nwidget",
    "skew = SkewScale(tables, top, Workload(2048))\nskew",
]
COMPARE, SKEW = ".recshard-plan-compare", ".recshard-skew-scale"
page = ran_notebook(CELLS, f"{SKEW} [data-drawn]", height=2600)


def cards(page: Any, widget: str) -> dict[str, dict[str, str]]:
    found: list[dict[str, str]] = page.locator(f"{widget} .rs-card").evaluate_all(
        "all => all.map(card => ({...card.dataset}))"
    )
    return {card["side"]: card for card in found}


def answers(**more: Any) -> Any:
    return compare_plans(TABLES, TOP, {**PLANS, **more}, LOAD)


def test_six_plans_on_the_page_are_those_of_python(page: Any) -> None:
    widget = page.locator(COMPARE)
    loaded = plan_of(TABLES, 8, ("column_wise",))
    (page.folder / "loaded.json").write_text(loaded.to_json())
    with page.expect_file_chooser() as chooser:
        widget.get_by_role("button", name="Plan from JSON").click()
    chooser.value.set_files(str(page.folder / "loaded.json"))
    found = answers(loaded=loaded)
    wait_for_step(page, COMPARE, "loaded", found["loaded"].estimate.step_ms)
    shown = cards(page, COMPARE)
    assert list(shown) == list(found.answers)
    for record in found.records():
        card = shown[record["plan"]]
        for name, attribute in (("step_ms", "stepMs"), ("memory_bytes", "memoryBytes"), ("imbalance", "imbalance")):
            assert float(card[attribute]) == pytest.approx(record[name], rel=1e-12)
        good = {name for name, holders in found.best.items() if record["plan"] in holders}
        assert set(card["best"].split()) == good
    assert widget.locator(".rs-card :text('★ best')").count() == sum(map(len, found.best.values()))
    assert widget.get_by_role("button", name="Add a plan").is_disabled()


def test_the_changes_between_two_plans_are_those_of_python(page: Any) -> None:
    widget = page.locator(COMPARE)
    widget.get_by_label("Changes from", exact=True).select_option(label="rows")
    widget.get_by_label("to", exact=True).select_option(label=LONG)
    expected = answers().diff(LONG, baseline="rows")
    page.wait_for_selector(f'{COMPARE} [data-moved-bytes="{expected.moved_bytes}"]')
    rows = widget.locator("tr[data-table]").evaluate_all("all => all.map(row => ({...row.dataset}))")
    assert {row["table"]: int(row["movedBytes"]) for row in rows} == {c.table: c.moved_bytes for c in expected.changed}
    assert {row["table"]: float(row["moreMs"]) for row in rows} == {
        change.table: pytest.approx(change.more_ms) for change in expected.changed
    }


def test_sliders_of_skew_and_scale_show_what_python_computes(page: Any) -> None:
    widget = page.locator(SKEW)
    for name, presses in (("Ranks", 7), ("Rows, times", 2), ("Skew", 7)):
        slider = widget.get_by_role("slider", name=name)
        slider.focus()
        for _ in range(presses):
            page.keyboard.press("ArrowRight")
    widget.get_by_label("Machine", exact=True).select_option(label="h100")
    made = Scaled.by(Setting(96, 2048, 1.05, 4.0, machine="h100"), TABLES, TOP, LOAD)
    assert widget.get_by_role("slider", name="Ranks").get_attribute("aria-valuetext") == "96"
    planned = EmbeddingShardingPlanner(made.topology, workload=made.workload)
    planned_plan = planned.plan_tables(made.tables)
    wait_for_step(page, SKEW, "planner", planned_plan.estimate.step_ms)
    page.wait_for_selector(f"{SKEW} :text('Simulated: 96 ranks of h100')")
    page.wait_for_selector(f"{SKEW} :text('computing')", state="hidden")
    page.wait_for_selector(f"{SKEW} tr[data-table] :text('would'), {SKEW} tr[data-table] :text('no longer fits')")
    code = widget.locator("pre").text_content()
    names: dict[str, Any] = {"tables": TABLES}
    exec(code, names)
    step = names["found"]["planner"].estimate.step_ms
    assert float(cards(page, SKEW)["planner"]["stepMs"]) == pytest.approx(step, rel=1e-12)
    fastest = widget.locator('[role=figure][aria-label^="9 plans, 26 tables on 96 ranks"]').get_attribute("aria-label")
    assert fastest is not None
    assert fastest.partition(". ")[2] == views.side_by_side(names["found"]).summary
