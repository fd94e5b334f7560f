"""What holds of every widget and every view on a real page: axe-core, contrast, looks in both themes, keys.

New widgets and views are listed in `tests/browser/gallery.py`. Pictures are kept in test-artifacts/ and compared with
the references in tests/browser/pictures/. After a change that is meant to be seen, look at the new pictures and make
them the references::

    RECSHARD_NEW_PICTURES=1 pytest tests/browser/test_every_widget.py -m "" -k looks

The gate looks at everything in light, and at `SAMPLES` in the dark, in serifs and by keys. At night all are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageDraw

from recshard_lab.lab import views
from tests.browser import axe, gallery, keys, pictures
from tests.grid import every

pytestmark = pytest.mark.browser

NAMES = [one.name for one in gallery.SHOWN]
LOOKS = [*(name for name in NAMES if name != "views"), *(f"view_{name}" for name in views.view_names())]
SAMPLES = ("plan_compare", "drawing_board", "view_placement")
QUIET = {  # controls without an answer: how the next piece is drawn, a file to be chosen, what the next click does
    "Cache of rows",
    "Pause",
    "Draw as",
    "cut away what is underneath",
    "Plan from JSON",
    "Run",
}
BROKEN = {
    "button-name": "<button></button>",
    "label": "<input type='range'>",
    "svg-img-alt": "<svg role='img' width='9' height='9'></svg>",
    "aria-required-attr": "<div role='slider' aria-label='a line' tabindex='0'></div>",
    "color-contrast": "<p style='color:#777;background:#888'>faint</p>",
}


@pytest.fixture(scope="module")
def page(lab: tuple[Path, str, str]) -> Iterator[Any]:
    with gallery.gallery(lab) as opened:
        yield opened


@pytest.fixture
def serif(page: Any) -> Iterator[Any]:
    """The page in the dark, all of it in serifs."""
    gallery.wear(page, "dark")
    with gallery.added(page, "body", "<style>[data-shown] *:not(.fa) {font-family:serif !important}</style>"):
        yield page


def sampled(names: list[str]) -> Any:
    """A case for each name; those that are no samples are nightly."""
    cases = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SAMPLES)) for name in names]
    return pytest.mark.parametrize("name", cases)


def themed(names: list[str]) -> Any:
    """A case for each name and theme."""
    cases = [
        pytest.param(name, theme, marks=[pytest.mark.nightly] * (theme == "dark" and name not in SAMPLES))
        for theme in gallery.THEMES
        for name in names
    ]
    return pytest.mark.parametrize(("name", "theme"), cases)


def place_of(page: Any, name: str) -> Any:
    """Where a widget is, or a view."""
    if name.startswith("view_"):
        return page.locator(gallery.shown("views").area).nth(views.view_names().index(name.removeprefix("view_")))
    return page.locator(gallery.shown(name).area)


def varies_of(name: str) -> tuple[str, ...]:
    return () if name.startswith("view_") else gallery.shown(name).varies


def test_every_registered_view_is_in_the_gallery() -> None:
    assert list(gallery.example_views()) == views.view_names()


@themed(NAMES)
def test_axe_core_finds_nothing_serious_and_words_in_pictures_stand_out(page: Any, name: str, theme: str) -> None:
    gallery.wear(page, theme)
    area = gallery.shown(name).area
    assert axe.faint_words(page, area) == []
    with gallery.unfolded(page, name):
        assert axe.findings(page, area) == []


@themed(LOOKS)
def test_it_looks_as_it_did(page: Any, name: str, theme: str) -> None:
    gallery.wear(page, theme)
    taken = pictures.take(page, place_of(page, name), f"{name}_{theme}", varies_of(name))
    if os.environ.get("RECSHARD_NEW_PICTURES"):
        pictures.keep(taken)
    assert pictures.differences(pictures.halved(taken), pictures.reference(taken)) == ""


def test_a_broken_widget_is_found(page: Any) -> None:
    area = gallery.shown("plan_compare").area
    faint = (
        "<svg width='99' height='30'><rect width='99' height='30' fill='#369'/><text y='20' fill='#446'>w</text></svg>"
    )
    with gallery.added(page, area, "".join(BROKEN.values()) + faint):
        found = {line.split(" ")[0] for line in axe.findings(page, area)}
        assert found == set(BROKEN)
        assert [line.split(" at ")[0] for line in axe.faint_words(page, area)] == ['"w"']


@sampled(LOOKS)
def test_another_font_looks_the_same(serif: Any, name: str) -> None:
    other = pictures.halved(pictures.take(serif, place_of(serif, name), f"{name}_serif", varies_of(name)))
    usual = pictures.reference(Path(f"{name}_dark.png"))
    assert ImageChops.difference(usual, other.resize(usual.size)).getbbox() is not None
    assert pictures.differences(other, usual) == ""


def _patched(picture: Image.Image) -> Image.Image:
    picture = picture.copy()
    width, height = picture.size
    ImageDraw.Draw(picture).rectangle((0, height // 8, width // 3, height // 2), fill=picture.getpixel((2, 2)))
    return picture


REFUSED: dict[str, Callable[[Image.Image], Image.Image]] = {
    "shifted right by 16 pixels": lambda picture: ImageChops.offset(picture, 8, 0),
    "shifted down by 16 pixels": lambda picture: ImageChops.offset(picture, 0, 8),
    "blank": lambda picture: Image.new("RGB", picture.size, picture.getpixel((2, 2))),
    "a part missing": _patched,
    "without colour": lambda picture: picture.convert("L"),
    "of another height": lambda picture: picture.crop((0, 0, picture.width, int(0.9 * picture.height))),
}


@every([f"{name}_{theme}" for name in SAMPLES for theme in gallery.THEMES])
def test_a_picture_that_is_not_the_same_is_refused(name: str) -> None:
    kept = pictures.reference(Path(f"{name}.png"))
    assert pictures.differences(kept, kept) == ""
    assert [how for how, change in REFUSED.items() if not pictures.differences(change(kept), kept)] == []


@pytest.mark.nightly
@every(LOOKS)
def test_every_picture_is_told_from_a_shifted_a_blank_and_the_other_themes(name: str) -> None:
    light, dark = (pictures.reference(Path(f"{name}_{theme}.png")) for theme in gallery.THEMES)
    assert pictures.differences(light, dark)
    for kept in (light, dark):
        assert pictures.differences(REFUSED["shifted down by 16 pixels"](kept), kept)
        assert pictures.differences(REFUSED["blank"](kept), kept)


def test_references_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in pictures.REFERENCES.glob("*.png")}
    assert set(sizes) == {f"{name}_{theme}.png" for name in LOOKS for theme in gallery.THEMES}
    assert sum(sizes.values()) < 1_500_000


@pytest.mark.nightly
@themed(NAMES)
def test_tab_reaches_every_control_and_shows_where_it_is(page: Any, name: str, theme: str) -> None:
    gallery.wear(page, theme)
    area = gallery.shown(name).area
    stops = keys.walk(page, area)
    assert keys.passed_by(page, area) == []
    assert [stop for stop in stops if not stop.name] == []
    assert [stop for stop in stops if stop.ring < keys.RING_PIXELS] == []


@sampled(NAMES)
def test_every_control_is_used_by_keys_and_answers(page: Any, name: str) -> None:
    gallery.wear(page, "light")
    one = gallery.shown(name)
    used = keys.use(page, one.area, one.keys, QUIET)
    assert used
    labels = {control.name.split(". ")[0] for control in used}
    assert [label for label, key in one.keys.items() if key and label not in labels] == []
    assert [c.name for c in used if not c.answered and c.name not in QUIET] == []
    assert [c.name for c in used if not c.kept_focus] == []


def test_no_control_is_cut_off_on_a_narrow_page(page: Any) -> None:
    gallery.wear(page, "light")
    wide = page.viewport_size
    cut = """areas => areas.flatMap(area => {
        const edge = document.querySelector(area).getBoundingClientRect().right + 1;
        return [...document.querySelectorAll(`${area} :is(button, select, input, textarea, output)`)]
          .filter(node => node.getClientRects().length && node.getBoundingClientRect().right > edge)
          .map(node => `${area} ${node.outerHTML.slice(0, 80)}`); })"""
    areas = [one.area for one in gallery.SHOWN if one.name != "views"]
    page.set_viewport_size({"width": 400, "height": wide["height"]})
    try:
        page.wait_for_function("area => document.querySelector(area).clientWidth < 400", arg=areas[0])
        assert page.evaluate(cut, areas) == []
    finally:
        page.set_viewport_size(wide)


@pytest.mark.nightly
def test_motion_and_forced_colours_are_respected(page: Any) -> None:
    gallery.wear(page, "light")
    moving = """() => [...document.querySelectorAll("[data-shown] [class*='recshard-'] *")].filter(node => {
        const style = getComputedStyle(node);
        return style.animationName !== "none" || parseFloat(style.transitionDuration) > 0; }).length"""
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion=None, forced_colors="active")
    try:
        for name in NAMES:
            assert axe.faint_words(page, gallery.shown(name).area) == []
            assert axe.findings(page, gallery.shown(name).area) == []
    finally:
        page.emulate_media(forced_colors=None)
