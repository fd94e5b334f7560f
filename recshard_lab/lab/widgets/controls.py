"""Controls and boxes from which the widgets are built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.question import AUTO
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, look_of
from recshard_lab.lab.widgets.components import StepSlider
from recshard_lab.sharding import scheme_names

MENU_WIDTH, LONG_MENU_WIDTH = "215px", "255px"  # of the menu of a table: a scheme; a scheme and its rank
HALF_WIDTH, THIRD_WIDTH = 575, 376  # pixels of a picture when two or three are in a row of a wide page
_WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MANTISSAS = (1, 2, 4, 8, 16, 24, 32, 40, 64, 80, 128, 192, 256, 512)

# ---- steps of sliders


def world_sizes(first: int) -> list[tuple[str, int]]:
    """Numbers of ranks, with `first` among them."""
    return [(str(n), n) for n in sorted({*_WORLD_SIZES, first})]


def batch_sizes(first: int) -> list[tuple[str, int]]:
    """Powers of two, with `first` among them."""
    return [(f"{n:,}", n) for n in sorted({*(1 << i for i in range(5, 17)), first})]


def memory_caps(tables: Sequence[BaseEmbeddingConfig], first: int) -> list[tuple[str, int]]:
    """Bytes of one rank, from too few for these tables to more than enough, with `first` among them.

    >>> memory_caps([BaseEmbeddingConfig(num_embeddings=1000, embedding_dim=16, name="t")], 64_000)[:3]
    [('1 KB', 1000), ('2 KB', 2000), ('4 KB', 4000)]
    """
    total = sum(table.weight_bytes for table in tables)
    steps = {m * unit for unit in (10**3, 10**6, 10**9) for m in _MANTISSAS}
    caps = {cap for cap in steps if total / 128 <= cap <= max(16 * total, first)}
    named = {bytes_text(cap): cap for cap in sorted(caps)}
    named[bytes_text(first)] = first  # equal labels: the exact value of `first` stays
    return sorted(named.items(), key=lambda item: item[1])


# ---- controls


def scheme_options() -> list[tuple[str, str]]:
    """Options of a menu: "auto" and every registered scheme."""
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


def slider(label: str, options: Sequence[tuple[str, Any]], value: Any, hint: str) -> StepSlider:
    """A slider with named steps; the arrow keys move it."""
    return StepSlider(label, options, value, hint, layout=ipw.Layout(min_width="0"))


def pick(label: str, hint: str, options: Sequence[tuple[str, Any]], width: str) -> ipw.Dropdown:
    """A menu."""
    return ipw.Dropdown(
        options=options,
        description=label,
        tooltip=hint,
        style={"description_width": "initial"},
        layout=ipw.Layout(width=width, max_width="100%"),
    )


def words(label: str, hint: str, width: str) -> ipw.Text:
    """A line of text; it changes when the reader presses Enter or leaves it."""
    return ipw.Text(
        description=label,
        tooltip=hint,
        continuous_update=False,
        style={"description_width": "initial"},
        layout=ipw.Layout(width=width, max_width="100%"),
    )


def button(label: str, hint: str, icon: str, style: str = "", width: str = "auto") -> ipw.Button:
    return ipw.Button(
        description=label,
        tooltip=hint,
        icon=icon,
        button_style=style,
        layout=ipw.Layout(width=width, min_width="90px"),
    )


def tick(label: str, hint: str, value: bool = True) -> ipw.Checkbox:
    return ipw.Checkbox(value=value, description=label, tooltip=hint, indent=False, layout=ipw.Layout(width="auto"))


def choice(options: Sequence[tuple[str, str]]) -> ipw.ToggleButtons:
    """Which picture is shown."""
    return ipw.ToggleButtons(
        options=options,
        value=options[0][1],
        tooltips=[f"show {label.lower()}" for label, _ in options],
        style={"button_width": "auto"},
        layout=ipw.Layout(margin="8px 2px 2px"),
    )


def wide_html(css_class: str = "") -> ipw.HTML:
    html = ipw.HTML(layout=ipw.Layout(width="100%", margin="0"))
    if css_class:
        html.add_class(css_class)
    return html


# ---- boxes


def row(children: Sequence[ipw.Widget]) -> ipw.Box:
    """Side by side, below one another on a narrow page."""
    layout = ipw.Layout(display="flex", flex_flow="row wrap", width="100%", grid_gap="4px 16px", align_items="center")
    return ipw.Box(children, layout=layout)


def column(children: Sequence[ipw.Widget]) -> ipw.VBox:
    """Below one another, as wide as the page allows."""
    return ipw.VBox(children, layout=ipw.Layout(width="100%", min_width="0"))


def columns_of(
    least: str, children: Sequence[ipw.Widget] = (), fill: str = "fit", gap: str = "8px 14px"
) -> ipw.GridBox:
    """Equally wide columns of at least `least` (CSS), as many in a row as fit."""
    template = template_of(least, fill)
    return ipw.GridBox(children, layout=ipw.Layout(grid_template_columns=template, grid_gap=gap, width="100%"))


def template_of(least: str, fill: str = "fit") -> str:
    """The ``grid_template_columns`` of `columns_of`."""
    return f"repeat(auto-{fill}, minmax(min(100%, {least}), 1fr))"


def sliders(children: Sequence[ipw.Widget]) -> ipw.GridBox:
    """Sliders of equal width."""
    return columns_of("330px", children, "fill", "0 24px")


def pair(widgets: Sequence[ipw.Widget]) -> ipw.GridBox:
    """Two cells of equal height, one below the other on a narrow page."""
    grid = columns_of("440px", widgets)
    grid.add_class("rs-cards")
    return grid


def halves(columns: Iterable[Sequence[ipw.Widget]]) -> ipw.Box:
    """Two columns, one below the other on a narrow page."""
    side = {"flex": "1 1 440px", "min_width": "min(340px, 100%)"}
    layout = ipw.Layout(display="flex", flex_flow="row wrap", width="100%", grid_gap="4px 16px")
    return ipw.Box([ipw.VBox(children, layout=ipw.Layout(**side)) for children in columns], layout=layout)


def grid(menus: Sequence[ipw.Widget]) -> ipw.GridBox:
    """As many columns as fit; it scrolls if there are many tables."""
    box = columns_of(MENU_WIDTH, menus, "fill", "2px 10px")
    box.layout.max_height, box.layout.overflow, box.layout.padding = "214px", "hidden auto", "2px"
    return box


def foot(exports: ipw.Widget, code: ipw.Widget) -> ipw.Box:
    """The last line of a widget: Export, and the same in Python, which takes the whole width when opened."""
    code.layout.width = "auto"
    layout = ipw.Layout(display="flex", flex_flow="row wrap", width="100%", grid_gap="0 24px", align_items="flex-start")
    box = ipw.Box([exports, code], layout=layout)
    box.add_class("rs-foot")
    return box
