"""Every registered view, whoever wrote it: in the worst cases a picture or a message, no error and no NaN."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cache
from html import unescape
from typing import Any

import pytest

from recshard_lab.lab import views
from recshard_lab.lab.draw.view import View
from tests.grid import every
from tests.lab.every_view import CASES
from tests.lab.pictures import SVG

WORDS = {"aria-label", "font-family", "style", "id", "fill", "stroke"}  # attributes that are no numbers
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?|nan|inf", re.IGNORECASE)
BY_DAY = [case for case in CASES if case != "large"]
SIDES = {"width", "height", "r", "rx", "ry", "stroke-width", "font-size"}


@cache
def known(case: str) -> dict[str, Any]:
    return CASES[case]()


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


@every(BY_DAY)
def test_every_view_has_its_input_here(case: str) -> None:
    missing = set(views.view_names()) - set(views.views_of(*known(case)))
    assert not missing, f"tests/lab/every_view.py says nothing that {', '.join(sorted(missing))} could be drawn from"


def test_a_view_that_asks_for_something_new_is_noticed() -> None:
    @views.register_view("Moon")
    def moon(phase_of_the_moon: float) -> View:
        raise AssertionError

    try:
        assert "moon" not in views.views_of(*known("one"))
    finally:
        views.unregister_view("moon")


@pytest.mark.parametrize(("case", "width"), [*((case, 500) for case in BY_DAY), ("one", 860), ("nan", 860)])
@every(views.view_names())
def test_a_view_is_a_picture_or_a_message_in_every_form(name: str, case: str, width: int) -> None:
    view = views.draw(name, **known(case), width=width)
    root = ET.fromstring(view.svg)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == view.title
    assert view.title in root.get("aria-label", "")
    assert not wrong_numbers(view.svg)
    assert view.text.startswith(view.title)
    assert "<img alt=" in view._repr_html_()
    if view.chart is not None:
        assert letters(unescape(view.figure.layout.title.text.replace("<br>", ""))) == letters(view.title)
    assert not view.problem if case == "one" else view.problem or case != "nothing"
    if view.problem:
        assert view.problem.split()[0] in view.svg
        unexpected = ("Error:", "Traceback", "object has no", "list index", "cannot convert", "zero-size")
        assert not any(words in view.problem for words in unexpected), view.problem
    else:
        assert view.numbers.rows


SMALL = ("placement", "memory", "phases", "traffic")


@pytest.mark.gate
@every(views.view_names())
def test_of_a_large_plan_a_view_is_a_small_picture(name: str) -> None:
    view = views.draw(name, **known("large"))
    assert not view.problem
    assert not wrong_numbers(view.svg)
    assert len(view._repr_html_()) < (150_000 if name in SMALL else 400_000)
