"""An exported page in a real browser with the network cut off: its pictures are drawn, printed, and asked of nobody."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recshard_lab.lab import Candidate, export, views
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.sharding import Topology
from tests.browser.lab_server import picture
from tests.lab.plans import SCHEMES, many, plan_of

pytestmark = pytest.mark.browser

TABLES = many(26)
VIEWS = views.views_of("plan", "tables", "topology", "estimate")
CHARTS = 6 * len({"memory", "phases", "balance"} & set(VIEWS))


def candidates() -> list[Candidate]:
    topology, load = Topology.preset("h100x8"), Workload(batch_size=2048)
    plans = {scheme: plan_of(TABLES, 8, (scheme,)) for scheme in SCHEMES} | {"mixed": plan_of(TABLES, 8)}
    plans["planner"] = EmbeddingShardingPlanner(topology, workload=load).plan_tables(TABLES)
    return [Candidate.of(name, plan, TABLES, topology, load) for name, plan in plans.items()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, plans = tmp_path_factory.mktemp("pages"), candidates()
    return {plotly: export(plans, folder / f"{plotly}.html", plotly=plotly) for plotly in ("embed", "cdn")}


def opened(browser: Any, path: Path, **settings: Any) -> tuple[Any, list[str], list[str]]:
    """The page from ``file://``, what it asked for, and what it complained of; every request but its own is refused."""
    page = browser.new_context(viewport={"width": 1020, "height": 900}, **settings).new_page()
    asked: list[str] = []
    told: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: told.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    page.route(re.compile("^(?!file:|data:|blob:)"), lambda route: route.abort())
    page.goto(path.as_uri())
    return page, asked, told


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_it_opens_offline_and_draws_plotly_in_the_readers_theme(
    theme: str, files: dict[str, Path], browser: Any
) -> None:
    from playwright.sync_api import expect

    page, asked, told = opened(browser, files["embed"], offline=True, color_scheme=theme)
    page.wait_for_selector("html.live")
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".plot .barlayer .point path")
    bars = page.locator(".plot").first.locator(".barlayer .point")
    assert bars.count() == int((candidates()[0].estimate.memory_bytes > 0).sum())  # type: ignore[union-attr]
    ink = page.locator(".plot").first.locator(".xtick text").first.evaluate("at => getComputedStyle(at).fill")
    assert ink == {"light": "rgb(61, 69, 78)", "dark": "rgb(204, 210, 216)"}[theme]
    assert not page.locator(".still").first.is_visible()
    for place in page.locator(".plot > div").all():  # each is drawn when it comes near
        place.scroll_into_view_if_needed()
    expect(page.locator("[data-drawn]")).to_have_count(CHARTS)
    assert asked == [files["embed"].as_uri()]
    assert told == []
    page.evaluate("scrollTo(0, 0)")
    picture(page, f"exported_{theme}")


@pytest.mark.parametrize(("width", "beside"), [(400, 1), pytest.param(899, 2, marks=pytest.mark.nightly), (1400, 2)])
def test_nothing_is_cut_and_two_plans_are_side_by_side_where_there_is_room(
    width: int, beside: int, files: dict[str, Path], browser: Any
) -> None:
    page, _, _ = opened(browser, files["embed"], offline=True)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector("html.live")
    places = page.locator(".plot > div").all()[::6]  # of each view one
    for place in places:
        place.scroll_into_view_if_needed()
        page.wait_for_function("at => at.dataset.drawn", arg=place.element_handle())
        found = place.evaluate(
            """at => { const box = node => node.getBoundingClientRect(), frame = box(at.closest("figure"));
            const plot = at.querySelector(".bglayer, .plot"), legend = at.querySelector(".legend");
            return { inside: box(at.querySelector(".main-svg")).right <= frame.right && frame.right <= innerWidth,
              ticks: [...at.querySelectorAll(".xtick text, .ytick text")]
                .every(one => box(one).left >= frame.left - 1 && box(one).right <= frame.right + 1),
              below: !legend || box(legend).top >= box(plot).bottom,
              scrolls: at.closest("figure").scrollWidth > at.closest("figure").clientWidth + 1 }; }"""
        )
        assert found["inside"]
        assert found["ticks"]
        assert not found["scrolls"]
        assert found["below"] or width > 400
    drawn = page.locator(".drawn").first  # geometry
    assert page.locator(".caption").first.is_visible() == (width == 400)
    assert drawn.evaluate("at => at.scrollWidth > at.clientWidth") == (width == 400)
    assert drawn.evaluate("at => at.previousElementSibling.scrollWidth <= at.clientWidth")  # its words are not cut
    tops = page.locator(".beside").first.locator("figure").evaluate_all("all => all.map(one => one.offsetTop)")
    assert tops.count(tops[0]) == beside
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_page_itself_forbids_every_request(files: dict[str, Path], browser: Any) -> None:
    page, _, told = opened(browser, files["embed"])
    found = page.evaluate("fetch('https://example.org/').then(() => 'sent', error => 'refused')")
    assert found == "refused"
    assert any("Content Security Policy" in words for words in told)


def test_still_pictures_are_a_key_away_and_printed(files: dict[str, Path], browser: Any) -> None:
    page, _, _ = opened(browser, files["embed"], offline=True, color_scheme="dark")
    page.wait_for_selector("html.live")
    page.keyboard.press("Tab")
    for _ in range(20):
        if page.evaluate("document.activeElement.textContent") == "Still pictures":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name="Still pictures")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator(".still").first.is_visible()
    assert not page.locator(".plot").first.is_visible()
    button.click()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".still").first.is_visible()
    assert not page.locator(".plot").first.is_visible()
    assert not button.is_visible()
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"  # dark ink on white paper
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0


def test_without_scripts_the_still_pictures_are_there(files: dict[str, Path], browser: Any) -> None:
    page, _, _ = opened(browser, files["embed"], offline=True, java_script_enabled=False)
    assert page.locator(".still svg[role=img]").count() == CHARTS
    assert page.locator("figure svg[role=img]").count() == 6 * len(VIEWS)
    assert page.locator(".still").first.is_visible()
    assert not page.locator(".pictures").is_visible()


def test_a_page_that_asks_the_network_in_vain_says_so_and_shows_still_pictures(
    files: dict[str, Path], browser: Any
) -> None:
    page, asked, _ = opened(browser, files["cdn"])
    page.wait_for_function("document.querySelector('.pictures').textContent.includes('Still pictures:')")
    assert page.locator(".still").first.is_visible()
    assert [url for url in asked if not url.startswith("file:")] == re.findall(
        r'<script defer src="([^"]+)"', files["cdn"].read_text()
    )
