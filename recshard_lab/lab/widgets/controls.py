"""The controls of the plan comparison: made here, labelled here, laid out here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ipywidgets as ipw

from recshard_lab.lab.compare.question import AUTO
from recshard_lab.lab.draw.theme import SCHEMES, look_of
from recshard_lab.lab.widgets.step_slider import StepSlider
from recshard_lab.sharding import scheme_names

HALF_WIDTH, THIRD_WIDTH = 575, 376  # pixels of a picture of which two or three are in a row of a wide page


def scheme_options() -> list[tuple[str, str]]:
    """What a menu offers: "auto" and every registered scheme."""
    return [("auto", AUTO)] + [(look_of(name, SCHEMES).label, name) for name in scheme_names()]


def menu(name: str, hint: str) -> ipw.Dropdown:
    """The scheme of one table."""
    return ipw.Dropdown(
        options=scheme_options(),
        value=AUTO,
        description=name,
        tooltip=f"scheme of {name} ({hint})",
        style={"description_width": "84px"},
        layout=ipw.Layout(width="auto", margin="0"),
    )


def set_all() -> ipw.Dropdown:
    """One menu that moves all others, and then stands on "choose" again."""
    return ipw.Dropdown(
        options=[("choose", ""), *scheme_options()],
        description="Set all to",
        style={"description_width": "initial"},
        layout=ipw.Layout(width="200px"),
    )


def slider(label: str, options: Sequence[tuple[str, Any]], value: Any, hint: str) -> StepSlider:
    """A slider over named steps; the arrow keys move it."""
    return StepSlider(label, options, value, hint, layout=ipw.Layout(min_width="0"))


def pick(label: str, hint: str, options: Sequence[tuple[str, str]], width: str) -> ipw.Dropdown:
    """One of several, by a menu."""
    return ipw.Dropdown(
        options=options,
        description=label,
        tooltip=hint,
        style={"description_width": "initial"},
        layout=ipw.Layout(width=width, max_width="100%"),
    )


def words(label: str, hint: str, width: str) -> ipw.Text:
    """A line of text, which counts when it is entered."""
    return ipw.Text(
        description=label,
        tooltip=hint,
        continuous_update=False,
        style={"description_width": "initial"},
        layout=ipw.Layout(width=width, max_width="100%"),
    )


def button(label: str, hint: str, icon: str, style: str = "") -> ipw.Button:
    return ipw.Button(
        description=label,
        tooltip=hint,
        icon=icon,
        button_style=style,
        layout=ipw.Layout(width="auto", min_width="90px"),
    )


def tick(label: str, scheme: str) -> ipw.Checkbox:
    """Whether the planner may use a scheme."""
    hint = f"whether the planner may choose {scheme}"
    return ipw.Checkbox(value=True, description=label, tooltip=hint, indent=False, layout=ipw.Layout(width="auto"))


def choice(options: Sequence[tuple[str, str]]) -> ipw.ToggleButtons:
    """Which picture is shown."""
    return ipw.ToggleButtons(
        options=options,
        value=options[0][1],
        tooltips=[f"show {label.lower()}" for label, _ in options],
        style={"button_width": "auto"},
        layout=ipw.Layout(margin="8px 2px 2px"),
    )


def wide_html() -> ipw.HTML:
    return ipw.HTML(layout=ipw.Layout(width="100%", margin="0"))


def row(children: Sequence[ipw.Widget]) -> ipw.Box:
    """Side by side, below one another where the page is narrow."""
    made = ipw.Layout(display="flex", flex_flow="row wrap", width="100%", grid_gap="4px 16px", align_items="center")
    return ipw.Box(children, layout=made)


def sliders(children: Sequence[ipw.Widget]) -> ipw.GridBox:
    """Sliders of one width, as many in a row as there is room for."""
    made = columns_of("330px")
    made.layout.grid_template_columns = "repeat(auto-fill, minmax(min(100%, 330px), 1fr))"
    made.layout.grid_gap = "0 24px"
    made.children = tuple(children)
    return made


def foot(exports: ipw.Widget, code: ipw.Widget) -> ipw.Box:
    """The last line of a widget: how to export it, and the same in Python, which takes the whole width when opened."""
    code.layout.width = "auto"
    made = ipw.Layout(display="flex", flex_flow="row wrap", width="100%", grid_gap="0 24px", align_items="flex-start")
    box = ipw.Box([exports, code], layout=made)
    box.add_class("rs-foot")
    return box


def halves(columns: Iterable[Sequence[ipw.Widget]]) -> ipw.Box:
    """Two columns, one below the other where the page is narrow."""
    side = {"flex": "1 1 440px", "min_width": "min(340px, 100%)"}
    layout = ipw.Layout(display="flex", flex_flow="row wrap", width="100%", grid_gap="4px 16px")
    return ipw.Box([ipw.VBox(children, layout=ipw.Layout(**side)) for children in columns], layout=layout)


def pair(widgets: Sequence[ipw.Widget]) -> ipw.GridBox:
    """Two cells of one height, one below the other where the page is narrow."""
    made = columns_of("440px")
    made.children = tuple(widgets)
    made.add_class("rs-cards")
    return made


def columns_of(least: str) -> ipw.GridBox:
    """Columns of one width, as many in a row as have `least` of it; filled later."""
    template = f"repeat(auto-fit, minmax(min(100%, {least}), 1fr))"
    return ipw.GridBox([], layout=ipw.Layout(grid_template_columns=template, grid_gap="8px 14px", width="100%"))


def grid(menus: Sequence[ipw.Widget]) -> ipw.GridBox:
    """As many columns as there is room for; it scrolls when there are many tables."""
    layout = ipw.Layout(
        grid_template_columns="repeat(auto-fill, minmax(215px, 1fr))",
        grid_gap="2px 10px",
        width="100%",
        max_height="214px",
        overflow="hidden auto",
        padding="2px",
    )
    return ipw.GridBox(menus, layout=layout)
