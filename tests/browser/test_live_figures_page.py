"""Every control of PlanCompare and SchemeSwitcher is answered with one drawing per live figure: 26 tables, 8 ranks.

Printed are the processor time of the page, and the time from the key until the last change of the page, the best of
`COUNTS` tries. Both depend on other work of the machine, so the number of drawings is what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_server import jupyter_lab, notebook_page, run_all, write_notebook
from tests.lab.test_answer_times import MODEL

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

COUNTS = 2
ONCE = ([1, 1], [1, 0], [0, 1], [0, 0])  # a figure that does not change is not drawn
TYPED_MS = 1200  # a menu adds letters to a word that are typed sooner
QUIET_MS = 300  # without a change, the page is up to date
ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    "from recshard_lab.lab import PlanCompare, SchemeSwitcher\nfrom recshard_lab.planner import Workload\n"
    "from recshard_lab.sharding import Topology\nfrom tests.lab.plans import many\nimport recshard_lab as rs\n"
    f"ranks = rs.launch(8)\nranks.exec({MODEL!r})",
    "PlanCompare(many(26), Topology(8, ddr_cap=10**12))",
    "SchemeSwitcher(ranks, 'model', 'train_step', workload=Workload(16, 2.0))",
]
COMPARE, SWITCH = ".recshard-plan-compare", ".recshard-switcher"
LINE = "rank 1 ends"
# widget, control, keys that move it back and forth
MOVES = [
    *((COMPARE, name, ("ArrowLeft", "ArrowRight")) for name in ("Ranks", "Batch per rank", "Memory per rank")),
    (COMPARE, "t000", ("r", "t")),
    (COMPARE, "Set all to", ("r", "t")),
    (COMPARE, "Plan", ("ArrowDown", "ArrowUp")),
    (COMPARE, "Chosen", ("ArrowDown", "ArrowUp")),
    (COMPARE, "Changes from", ("ArrowUp", "ArrowDown")),
    (SWITCH, "t00", ("r", "t")),
    (SWITCH, "Split lines of", ("ArrowUp", "ArrowDown")),
    (SWITCH, LINE, ("ArrowDown", "ArrowUp")),
]
WATCH = """
widget => {
  const at = window.rsRepaint = { pressed: 0, last: 0 }, focused = document.activeElement;
  const own = focused.closest("label, .widget-inline-hbox, .rs-split-lines") || focused;
  const press = () => { at.pressed ||= performance.now(); }, once = { once: true, capture: true };
  for (const name of ["keydown", "click"]) document.addEventListener(name, press, once);
  at.observer = new MutationObserver(changes => {
    if (at.pressed && changes.some(change => !own.contains(change.target))) at.last = performance.now(); });
  const what = { subtree: true, childList: true, characterData: true, attributes: true };
  at.observer.observe(document.querySelector(widget), what);
}
"""
QUIET = "quiet => window.rsRepaint.last && performance.now() - window.rsRepaint.last > quiet"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "times.ipynb", CELLS)
    settings = {"notebook-extension/tracker": {"windowingMode": "none"}}
    with (
        jupyter_lab(folder, settings, PYTHONPATH=str(ROOT)) as (address, token),
        notebook_page(address, token, "times.ipynb", height=3000) as opened,
    ):
        run_all(opened)
        opened.metrics = opened.context.new_cdp_session(opened)
        opened.metrics.send("Performance.enable")
        for widget in (COMPARE, SWITCH):
            opened.wait_for_selector(f"{widget} svg")
            show(opened, widget, "Balance")
        yield opened


def show(page: Any, widget: str, picture: str) -> None:
    page.locator(widget).get_by_role("button", name=picture, exact=True).click()
    page.wait_for_selector(f"{widget} [role=figure][aria-label^='{picture}'] [data-drawn]")


def processor_ms(page: Any) -> float:
    """Processor time of the page's process until now."""
    metrics = page.metrics.send("Performance.getMetrics")["metrics"]
    return 1000 * next(float(each["value"]) for each in metrics if each["name"] == "ProcessTime")


def answered(page: Any, widget: str, key: str) -> tuple[float, float]:
    """Milliseconds of the processor for a key on the focused control, and until the last change of the widget."""
    from playwright.sync_api import TimeoutError

    page.evaluate(WATCH, widget)
    if len(key) == 1:
        page.wait_for_timeout(TYPED_MS)
    before = processor_ms(page)
    page.keyboard.press(key)
    try:
        page.wait_for_function(QUIET, arg=QUIET_MS, polling=50, timeout=10_000)
    except TimeoutError:
        raise AssertionError(f"no answer to {key}") from None
    spent = processor_ms(page) - before
    page.evaluate("() => window.rsRepaint.observer.disconnect()")
    return spent, float(page.evaluate("() => window.rsRepaint.last - window.rsRepaint.pressed"))


def drawings(page: Any, widget: str) -> list[int]:
    """How often each live figure of a widget was drawn."""
    counts = "all => all.map(one => Number(one.dataset.drawn))"
    return [int(count) for count in page.eval_on_selector_all(f"{widget} [data-drawn]", counts)]


@pytest.mark.timeout(300)
def test_a_control_draws_each_figure_at_most_once(page: Any) -> None:
    found: dict[str, tuple[float, float]] = {}
    for widget, name, keys in MOVES:
        show(page, widget, "Balance")
        shown = page.locator(widget)
        control = shown.get_by_role("slider", name=name) if name == LINE else shown.get_by_label(name, exact=True)
        control.focus()
        tries = []
        for turn in range(COUNTS):
            before = drawings(page, widget)
            tries.append(answered(page, widget, keys[turn % 2]))
            assert [now - was for was, now in zip(before, drawings(page, widget), strict=True)] in ONCE, name
        found[f"{widget[10:]} {name}"] = min(tries)
    for name, (work, wall) in sorted(found.items(), key=lambda pair: -pair[1][0]):
        print(f"{name}: {work:.0f} ms of the processor, answered after {wall:.0f} ms")


def test_a_click_on_a_bar_selects_it_and_another_click_ends_that(page: Any) -> None:
    show(page, COMPARE, "Memory")
    figure = page.locator(f"{COMPARE} [data-drawn]").first
    bars = figure.locator("g.point path")
    opacity = "all => all.map(one => Number(getComputedStyle(one).opacity))"
    page.wait_for_function(
        "figure => !figure.querySelector('.xtitle')?.textContent.includes('ms')", arg=figure.element_handle()
    )
    assert set(bars.evaluate_all(opacity)) == {1}
    box = bars.first.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.click(*middle)
    count = "filter(bar => getComputedStyle(bar).opacity == 1).length"
    one = f"figure => [...figure.querySelectorAll('g.point path')].{count}"
    page.wait_for_function(f"figure => ({one})(figure) === 1", arg=figure.element_handle())
    page.wait_for_timeout(600)  # two clicks that are closer are a double click
    page.mouse.click(*middle)
    page.wait_for_function(f"figure => ({one})(figure) > 1", arg=figure.element_handle())
    assert set(bars.evaluate_all(opacity)) == {1}
