"""Every registered view, whoever wrote it: in the worst cases a picture or a message, no error and no NaN."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from html import unescape
from typing import Any

import pytest

from recshard_lab.lab import views
from recshard_lab.lab.draw.view import View
from tests.lab.every_view import CASES, large

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {"aria-label", "font-family", "style", "id", "fill", "stroke"}  # attributes that are no numbers
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?|nan|inf", re.IGNORECASE)
SIDES = {"width", "height", "r", "rx", "ry", "stroke-width", "font-size"}


def drawn(name: str, case: str, **more: Any) -> View:
    return views.draw(name, **CASES[case](), **more)


def letters(words: str) -> str:
    """Without spaces: where a line is broken, a title has none."""
    return "".join(words.split())


def wrong_numbers(svg: str) -> list[str]:
    """Attributes with a number that is none, or a length below zero."""
    found = []
    for element in ET.fromstring(svg).iter():
        for key, value in element.attrib.items():
            if key in WORDS:
                continue
            bad = any(number.lower() in ("nan", "inf") for number in NUMBER.findall(value))
            if bad or (key in SIDES and float(value.rstrip("%")) < 0):
                found.append(f"{element.tag.removeprefix(SVG)} {key}={value!r}")
    return found


@pytest.mark.gate
@pytest.mark.parametrize("case", CASES)
def test_every_view_has_its_input_here(case: str) -> None:
    missing = set(views.view_names()) - set(views.views_of(*CASES[case]()))
    assert not missing, f"tests/lab/every_view.py says nothing that {', '.join(sorted(missing))} could be drawn from"


def test_a_view_that_asks_for_something_new_is_noticed() -> None:
    @views.register_view("Moon")
    def moon(phase_of_the_moon: float) -> View:
        raise AssertionError

    try:
        assert "moon" not in views.views_of(*CASES["one"]())
    finally:
        views.unregister_view("moon")


@pytest.mark.parametrize(("case", "width"), [*((case, 500) for case in CASES), ("one", 860), ("nan", 860)])
@pytest.mark.parametrize("name", views.view_names())
def test_a_view_is_a_picture_or_a_message_in_every_form(name: str, case: str, width: int) -> None:
    view = drawn(name, case, width=width)
    root = ET.fromstring(view.svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title") is not None
    assert not wrong_numbers(view.svg)
    assert view.text.startswith(view.title)
    assert "<img alt=" in view._repr_html_()
    if view.chart is not None:
        assert letters(unescape(view.figure.layout.title.text.replace("<br>", ""))) == letters(view.title)
    if case == "nothing":
        assert view.problem, "a picture of nothing"
    if view.problem:
        assert view.problem.split()[0] in view.svg
        unexpected = ("Error:", "Traceback", "object has no", "list index", "cannot convert", "zero-size")
        assert not any(words in view.problem for words in unexpected), view.problem
    else:
        assert view.numbers.rows


@pytest.mark.gate
@pytest.mark.parametrize("name", views.view_names())
def test_of_a_large_plan_a_view_is_a_small_picture_within_half_a_second(name: str) -> None:
    known, took = large(), []
    for _ in range(3):  # the machine is shared: the fastest counts
        begun = time.process_time()
        view = views.draw(name, **known)
        html = view._repr_html_()
        took.append(time.process_time() - begun)
    assert not view.problem
    assert min(took) < 0.5
    assert len(html) < 400_000


@pytest.mark.parametrize("name", views.view_names())
def test_one_table_with_a_long_name_is_a_picture(name: str) -> None:
    assert not drawn(name, "one").problem
