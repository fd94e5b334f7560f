"""A widget by keyboard alone: where Tab stops, whether one sees where the focus is, and what a key does there."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from tests.patience import scaled

CONTROLS = "button, select, input, textarea, summary, a[href], [role=slider], [role=listbox]"
KEYS = {
    "button": "Enter",
    "checkbox": "Space",
    "number": "ArrowUp",
    "option": "1",  # a piece of the drawing board is given to rank 1
    "range": "ArrowLeft",
    "select": "End",
    "slider": "PageDown",
    "summary": "Enter",
    "text": "x Enter",
    "textarea": "Backspace",
}
RING_CONTRAST = 3.0  # to 1, between a pixel with and without the focus: WCAG 2.2, success criterion 2.4.13
RING_PIXELS = 80  # of a ring that is seen
MOST_STOPS = 120
PATIENCE_MS = 1000 * scaled(30)

_PASSED_BY = """
([area, controls]) => [...document.querySelectorAll(area)].flatMap(one => [...one.querySelectorAll(controls)])
  .filter(node => !node.disabled && node.getClientRects().length
    && getComputedStyle(node).visibility !== "hidden" && !node.matches("[data-stop]")
    && !node.querySelector("[data-stop]"))
  .map(node => node.outerHTML.slice(0, 160))
"""
_STOP = """
([area, number]) => {
  const node = document.activeElement, inside = node && node.closest(area);
  if (!inside) return null;
  node.dataset.stop = number;
  const said = node.getAttribute("aria-label") || (node.labels && node.labels[0] && node.labels[0].textContent)
    || node.textContent || node.title;
  const role = node.getAttribute("role"), kind = role === "slider" || role === "option" ? role
    : node.tagName === "INPUT" ? node.type : node.tagName.toLowerCase();
  const pressed = node.matches(".mod-active");
  const { x, y, width, height } = node.getBoundingClientRect();
  return { kind, name: said.trim().replace(/\\s+/g, " "), pressed, box: [x, y, width, height] };
}
"""
_WATCH = """
area => {
  const node = document.activeElement;
  const parts = ".widget-dropdown, .widget-checkbox, .widget-textarea, .widget-toggle-buttons, "
    + ".rs-step-slider, .rs-split-lines, .rs-tile-canvas";
  const own = node.closest(parts) || (node.tagName === "SUMMARY" ? null : node);
  const at = window.rsAnswer = { node, pressed: false, answered: false };
  const press = () => { at.pressed = true; }, once = { once: true, capture: true };
  for (const name of ["keydown", "input", "click"]) document.addEventListener(name, press, once);
  at.observer = new MutationObserver(changes => {
    const seen = changes.some(change => { const target = change.target;
      return !(own && own.contains(target))
        && !(change.type === "attributes" && /^(data-|tabindex|class)/.test(change.attributeName)); });
    if (seen && at.pressed) at.answered = true; });
  for (const one of document.querySelectorAll(area))
    at.observer.observe(one, { subtree: true, childList: true, characterData: true, attributes: true });
}
"""
_SETTLED = """
() => ![...document.querySelectorAll("[data-rank][data-state]")].some(row => row.dataset.state === "running")
  && document.hasFocus()
"""
_KEPT = """
() => { const node = document.activeElement, used = window.rsAnswer.node;
  return node !== document.body && !!node.closest("[data-shown]") || used.isConnected && used.disabled; }
"""


@dataclass(frozen=True)
class Stop:
    """Where Tab comes by: the control's kind, its name, and how many pixels stand out while it has the focus."""

    kind: str
    name: str
    ring: int


@dataclass(frozen=True)
class Used:
    """What came of a key on a control.

    Args:
        answered: whether the page showed something new elsewhere than in the control.
        kept_focus: whether the focus is still in the widget, or the control is no longer to be used.
    """

    name: str
    answered: bool
    kept_focus: bool


def walk(page: Any, area: str) -> list[Stop]:
    """Goes through a widget with Tab, from before it to behind it, and looks at every stop."""
    with _before(page, area):
        found = []
        for stop in _stops(page, area):
            found.append((stop, _shot(page, stop["box"])))
        page.evaluate("() => document.activeElement.blur()")
        plain = _shot(page, None)
        return [Stop(s["kind"], s["name"], _ring(picture, plain[_around(s["box"])])) for s, picture in found]


def use(page: Any, area: str, keys: Mapping[str, str], quiet: Collection[str] = ()) -> list[Used]:
    """Goes through a widget with Tab and presses a key on every control.

    Args:
        page: playwright's.
        area: selects the widget.
        keys: control -> its key, where it is not that of its kind.
        quiet: controls without an answer.
    """
    with _before(page, area):
        found = []
        for stop in _stops(page, area):
            key = keys.get(stop["name"].split(". ")[0], KEYS.get(stop["kind"], ""))
            if key and not stop["pressed"]:
                found.append(_press(page, area, stop["name"], key, 300 if stop["name"] in quiet else PATIENCE_MS))
        return found


def passed_by(page: Any, area: str) -> list[str]:
    """Controls that can be used and at which Tab has not stopped (a list counts where it stopped inside)."""
    return [str(one) for one in page.evaluate(_PASSED_BY, [area, CONTROLS])]


def _press(page: Any, area: str, name: str, key: str, patience_ms: float) -> Used:
    from playwright.sync_api import TimeoutError

    page.evaluate(_WATCH, area)
    for one in key.split():
        page.keyboard.press(one)
    try:
        page.wait_for_function("() => window.rsAnswer.answered", timeout=patience_ms)
        answered = True
    except TimeoutError:
        answered = False
    finally:
        page.evaluate("() => window.rsAnswer.observer.disconnect()")
    return Used(name, answered, bool(page.evaluate(_KEPT)))


def _stops(page: Any, area: str) -> Iterator[dict[str, Any]]:
    for number in range(MOST_STOPS):
        page.keyboard.press("Tab")
        stop = page.evaluate(_STOP, [area, number])
        if stop is None:
            where = page.evaluate("() => document.activeElement.outerHTML.slice(0, 200)")
            assert number, f"Tab does not come into the widget, but to {where}"
            return
        yield stop
    raise AssertionError(f"Tab does not leave the widget after {MOST_STOPS} stops")


@contextmanager
def _before(page: Any, area: str) -> Iterator[None]:
    """With the focus just before the widget, and no traces afterwards.

    Waits until no rank is running: what a widget started before would change the controls of another meanwhile.
    """
    page.wait_for_function(_SETTLED, timeout=2 * PATIENCE_MS)
    first = "<button id='rs-before'>before</button>"
    page.evaluate(
        "([area, first]) => document.querySelector(area).insertAdjacentHTML('afterbegin', first)", [area, first]
    )
    page.evaluate("() => document.querySelectorAll('[data-stop]').forEach(node => node.removeAttribute('data-stop'))")
    page.locator("#rs-before").focus()
    page.wait_for_function("() => document.activeElement.id === 'rs-before'")
    try:
        yield
    finally:
        page.evaluate("() => document.querySelector('#rs-before').remove()")


def _around(box: list[float]) -> tuple[slice, slice]:
    """A box and a little room for the ring, in whole pixels: rows and columns of the page."""
    x, y, width, height = box
    left, top = max(0, int(x) - 6), max(0, int(y) - 6)
    return slice(top, int(y + height) + 7), slice(left, int(x + width) + 7)


def _shot(page: Any, box: list[float] | None) -> np.ndarray:
    """The page, or what is around a box, from 0 to 1."""
    more = {}
    if box is not None:
        rows, columns = _around(box)
        size = {"width": columns.stop - columns.start, "height": rows.stop - rows.start}
        more["clip"] = {"x": columns.start, "y": rows.start, **size}
    picture = Image.open(io.BytesIO(page.screenshot(caret="hide", **more)))
    return np.asarray(picture.convert("RGB"), dtype=np.float32) / 255


def _ring(focused: np.ndarray, plain: np.ndarray) -> int:
    lights = [_luminance(picture) + 0.05 for picture in (focused, plain)]
    return int((np.maximum(*lights) / np.minimum(*lights) >= RING_CONTRAST).sum())


def _luminance(picture: np.ndarray) -> np.ndarray:
    """Relative luminance as WCAG 2 defines it, of sRGB from 0 to 1."""
    linear = np.where(picture <= 0.04045, picture / 12.92, ((picture + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])
