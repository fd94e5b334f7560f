"""StepThrough on a bare page in a real browser: keys, following, motion, and a narrow window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from recshard_lab.lab.live.recorded_step import STAGES
from recshard_lab.lab.widgets.step_through import StepPlayer, StepThrough
from tests.lab.recorded import recorded_step

pytestmark = pytest.mark.browser
HTML = """<!doctype html><style>%s</style><div id="here"></div><script type="module">
%s
const data = %s, callbacks = {};
window.model = { get: key => data[key], off() {}, save_changes() {},
  on: (name, act) => (callbacks[name] ??= []).push(act),
  set: (key, value) => { data[key] = value; for (const act of callbacks["change:" + key] || []) act(); } };
player.render({ model, el: document.querySelector("#here") });
</script>"""
MOVING = "() => document.getAnimations().length"
STAGE = "() => model.get('stage')"


@pytest.fixture(scope="module")
def html() -> str:
    player = StepThrough.of([recorded_step()]).player
    names = ("steps", "stages", "choices", "stage", "follow")
    script = str(StepPlayer._esm).replace("export default", "const player =")
    data = json.dumps({name: getattr(player, name) for name in names})
    return HTML % (str(StepPlayer._css), script, data)


@pytest.fixture
def page(browser: Any, html: str) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_content(html)
    opened.wait_for_selector(".rs-board svg")
    yield opened
    opened.close()


def test_arrow_keys_change_the_stage_and_space_plays_and_pauses(page: Any) -> None:
    page.locator(".rs-board").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(STAGE) == 1
    assert page.locator("[aria-current=step]").inner_text() == "2 Input dist: ids leave"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("End")
    assert page.evaluate(STAGE) == len(STAGES) - 1
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert page.evaluate(STAGE) == 1
    assert "Pause" in page.locator(".rs-player button").nth(1).inner_text()
    page.wait_for_function("() => model.get('stage') === 2")
    page.keyboard.press(" ")
    assert "Play" in page.locator(".rs-player button").nth(1).inner_text()


def test_what_is_followed_is_outlined_in_every_stage(page: Any) -> None:
    page.locator("select").select_option(label="sample A")
    for stage in range(len(STAGES)):
        page.locator(".rs-stages button").nth(stage).click()
        wrong = page.evaluate(
            """() => [...document.querySelectorAll(".rs-piece")].filter(piece => piece.dataset.key
              && piece.classList.contains("rs-on") !== JSON.parse(piece.dataset.follow).includes("sample A")).length"""
        )
        assert wrong == 0
        if page.locator(".rs-piece[data-key]").count():
            assert page.locator(".rs-piece.rs-on").count()
    assert "follows sample A" in page.locator("[role=status]").inner_text()
    page.locator(".rs-stages button").first.click()
    page.locator(".rs-piece[data-key] .rs-ring").last.click()
    assert page.evaluate("() => model.get('follow')") != "sample A"


def test_pieces_move_only_where_motion_is_wanted(page: Any) -> None:
    page.locator(".rs-board").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(MOVING) > 0
    page.emulate_media(reduced_motion="reduce")
    page.wait_for_function("() => !document.getAnimations().length")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(MOVING) == 0


def test_a_narrow_window_has_the_narrow_frames_and_does_not_scroll_sideways(page: Any) -> None:
    assert page.locator(".rs-board svg").get_attribute("width") == "860"
    page.set_viewport_size({"width": 400, "height": 900})
    page.wait_for_function("() => document.querySelector('.rs-board svg').getAttribute('width') === '380'")
    for stage in range(len(STAGES)):
        page.locator(".rs-stages button").nth(stage).click()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 400
