"""Every control of PlanCompare and SchemeSwitcher is answered with one drawing per live figure: 26 tables, 8 ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab_server import ran_notebook
from tests.lab.test_answer_times import MODEL

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

ONCE = ([1, 1], [1, 0], [0, 1], [0, 0])  # a figure that does not change is not drawn
TYPED_MS = 1200  # a menu adds letters to a word that are typed sooner
QUIET_MS = 300  # without a change, the page is up to date
CELLS = [
    "from recshard_lab.lab import PlanCompare, SchemeSwitcher\nfrom recshard_lab.planner import Workload\n"
    "from recshard_lab.sharding import Topology\nfrom tests.lab.plans import many\nimport recshard_lab as rs\n"
    f"ranks = rs.launch(8)\nranks.exec({MODEL!r})",
    "PlanCompare(many(26), Topology(8, ddr_cap=10**12))",
    "SchemeSwitcher(ranks, 'model', 'train_step', workload=Workload(16, 2.0))",
]
COMPARE, SWITCH = ".recshard-plan-compare", ".recshard-switcher"
LINE = "rank 1 ends"
MOVES = [  # widget, control, keys that move it back and forth
    *((COMPARE, name, ("ArrowLeft", "ArrowRight")) for name in ("Ranks", "Batch per rank", "Memory per rank")),
    *((COMPARE, name, ("r", "t")) for name in ("t000", "Set all to")),
    *((COMPARE, name, ("ArrowDown", "ArrowUp")) for name in ("Plan", "Chosen")),
    (COMPARE, "Changes from", ("ArrowUp", "ArrowDown")),
    (SWITCH, "t00", ("r", "t")),
    (SWITCH, "Split lines of", ("ArrowUp", "ArrowDown")),
    (SWITCH, LINE, ("ArrowDown", "ArrowUp")),
]
WATCH = """
widget => {
  const at = window.rsRepaint = { last: 0 }, focused = document.activeElement;
  const own = focused.closest("label, .widget-inline-hbox, .rs-split-lines") || focused;
  at.observer = new MutationObserver(changes => {
    if (changes.some(change => !own.contains(change.target))) at.last = performance.now(); });
  const what = { subtree: true, childList: true, characterData: true, attributes: true };
  at.observer.observe(document.querySelector(widget), what);
}
"""
QUIET = "quiet => window.rsRepaint.last && performance.now() - window.rsRepaint.last > quiet"
page = ran_notebook(CELLS, f"{SWITCH} svg", height=3000)


def show(page: Any, widget: str, picture: str) -> None:
    page.locator(widget).get_by_role("button", name=picture, exact=True).click()
    page.wait_for_selector(f"{widget} [role=figure][aria-label^='{picture}'] [data-drawn]")


def drawings(page: Any, widget: str) -> list[int]:
    """How often each live figure of a widget was drawn."""
    counts = "all => all.map(one => Number(one.dataset.drawn))"
    return [int(count) for count in page.eval_on_selector_all(f"{widget} [data-drawn]", counts)]


def test_a_control_draws_each_figure_at_most_once(page: Any) -> None:
    for widget, name, keys in MOVES:
        show(page, widget, "Balance")
        shown = page.locator(widget)
        control = shown.get_by_role("slider", name=name) if name == LINE else shown.get_by_label(name, exact=True)
        control.focus()
        for key in keys:
            if len(key) == 1:
                page.wait_for_timeout(TYPED_MS)
            before = drawings(page, widget)
            page.evaluate(WATCH, widget)
            page.keyboard.press(key)
            page.wait_for_function(QUIET, arg=QUIET_MS, polling=50)
            page.evaluate("() => window.rsRepaint.observer.disconnect()")
            assert [now - was for was, now in zip(before, drawings(page, widget), strict=True)] in ONCE, name
