"""Six plans side by side, and the sliders of skew and scale, in a real JupyterLab: what the page says is Python's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recshard_lab.lab import compare_plans
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.sharding import Topology
from tests.browser.lab_server import command, jupyter_lab, notebook_page, run_all, write_notebook
from tests.lab.plans import many, plan_of

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "sides.ipynb", CELLS)
    (folder / "loaded.json").write_text(plan_of(TABLES, 8, ("column_wise",)).to_json())
    with (
        jupyter_lab(folder, PYTHONPATH=str(ROOT)) as (address, token),
        notebook_page(address, token, "sides.ipynb", height=2600) as opened,
    ):
        run_all(opened)
        opened.wait_for_selector(f"{COMPARE} svg")
        opened.wait_for_selector(f"{SKEW} [data-drawn]")
        opened.folder = folder
        yield opened


def cards(page: Any, widget: str) -> dict[str, dict[str, str]]:
    found: list[dict[str, str]] = page.locator(f"{widget} .rs-card").evaluate_all(
        "all => all.map(card => ({...card.dataset}))"
    )
    return {card["side"]: card for card in found}


def wait_for_card(page: Any, widget: str, side: str, step_ms: float) -> None:
    page.wait_for_function(
        """([selector, step]) => { const card = document.querySelector(selector);
        return card && Math.abs(Number(card.dataset.stepMs) - step) <= 1e-9 * step; }""",
        arg=[f'{widget} .rs-card[data-side="{side}"]', step_ms],
        timeout=60_000,
    )


def picture(page: Any, name: str, widget: str) -> None:
    folder = ROOT / "test-artifacts"
    folder.mkdir(exist_ok=True)
    page.locator(widget).screenshot(path=str(folder / f"{name}.png"))


def cut_off(page: Any, widget: str) -> list[str]:
    """Elements that reach beyond the widget, or whose words do not fit them; what scrolls is meant to."""
    found: list[str] = page.locator(widget).evaluate(
        """root => [...root.querySelectorAll('*')].filter(e => {
          const box = e.getBoundingClientRect(), all = root.getBoundingClientRect();
          if (!box.width || e.closest('pre') || e.closest('.rs-scroll') || ['OPTION', 'INPUT'].includes(e.tagName))
            return false;
          return box.right > all.right + 1 || (!e.closest('svg') && e.clientWidth && e.scrollWidth > e.clientWidth + 1);
        }).map(e => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`)"""
    )
    return found


def answers(**more: Any) -> Any:
    return compare_plans(TABLES, TOP, {**PLANS, **more}, LOAD)


def test_six_plans_on_the_page_are_those_of_python(page: Any) -> None:
    widget = page.locator(COMPARE)
    with page.expect_file_chooser() as chooser:
        widget.get_by_role("button", name="Plan from JSON").click()
    chooser.value.set_files(str(page.folder / "loaded.json"))
    loaded = plan_of(TABLES, 8, ("column_wise",))
    found = answers(loaded=loaded)
    wait_for_card(page, COMPARE, "loaded", found["loaded"].estimate.step_ms)
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


def test_columns_are_edited_with_the_keyboard_alone(page: Any) -> None:
    widget = page.locator(COMPARE)
    chooser = widget.get_by_label("Plan", exact=True)
    chooser.focus()
    chooser.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowDown")  # two by hand
    page.wait_for_function(
        "name => document.querySelector('.recshard-plan-compare input[type=text]').value === name", arg="two by hand"
    )
    widget.get_by_label("t002", exact=True).focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown")  # auto, table-wise, row-wise
    changed = {**PLANS["two by hand"], "t002": "row_wise"}
    found = answers(**{"two by hand": changed})["two by hand"]
    wait_for_card(page, COMPARE, "two by hand", found.estimate.step_ms)
    remove = widget.get_by_role("button", name="Remove")
    remove.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelectorAll('{COMPARE} .rs-card').length === 5")
    assert "two by hand" not in cards(page, COMPARE)
    widget.get_by_role("button", name="Add a plan").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelectorAll('{COMPARE} .rs-card').length === 6")


def test_sliders_of_skew_and_scale_show_what_python_computes(page: Any) -> None:
    widget = page.locator(SKEW)
    for name, presses in (("Ranks", 7), ("Rows, times", 2), ("Skew", 7)):
        slider = widget.get_by_role("slider", name=name)
        slider.focus()
        for _ in range(presses):
            page.keyboard.press("ArrowRight")
    widget.get_by_label("Machine", exact=True).select_option(label="h100")
    from recshard_lab.lab.compare.scaling import Scaled, Setting

    made = Scaled.by(Setting(96, 2048, 1.05, 4.0, machine="h100"), TABLES, TOP, LOAD)
    assert widget.get_by_role("slider", name="Ranks").get_attribute("aria-valuetext") == "96"
    planned = EmbeddingShardingPlanner(made.topology, workload=made.workload)
    planned_plan = planned.plan_tables(made.tables)
    wait_for_card(page, SKEW, "planner", planned_plan.estimate.step_ms)
    page.wait_for_selector(f"{SKEW} :text('Simulated: 96 ranks of h100')")
    page.wait_for_selector(f"{SKEW} :text('computing')", state="hidden", timeout=60_000)
    page.wait_for_selector(
        f"{SKEW} tr[data-table] :text('would'), {SKEW} tr[data-table] :text('no longer fits')", timeout=60_000
    )
    code = widget.locator("pre").text_content()
    names: dict[str, Any] = {"tables": TABLES}
    exec(code, names)
    step = names["found"]["planner"].estimate.step_ms
    assert float(cards(page, SKEW)["planner"]["stepMs"]) == pytest.approx(step, rel=1e-12)
    fastest = widget.locator('[role=figure][aria-label^="9 plans, 26 tables on 96 ranks"]').get_attribute("aria-label")
    assert fastest is not None
    assert fastest.partition(". ")[2] == _summary(names["found"])


def _summary(found: Any) -> str:
    from recshard_lab.lab import views

    return str(views.side_by_side(found).summary)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("width", [1360, 880])
def test_nothing_is_cut_off_on_a_wide_and_on_a_narrow_page(page: Any, width: int, theme: str) -> None:
    command(page, "apputils:change-theme", theme=theme)
    page.wait_for_selector(f'body[data-jp-theme-light="{str("Light" in theme).lower()}"]', state="attached")
    page.set_viewport_size({"width": width, "height": 2600})
    page.wait_for_timeout(400)
    for name, widget in (("six_plans", COMPARE), ("skew_scale", SKEW)):
        assert page.locator(widget).bounding_box()["width"] == pytest.approx({1360: 1180, 880: 700}[width], abs=40)
        assert cut_off(page, widget) == []
        picture(page, f"{name}_{width}_{theme.split()[1].lower()}", widget)
    page.set_viewport_size({"width": 1360, "height": 2600})
