"""What a view gives back: one picture in every form a reader may meet it in.

::

    View.svg       static picture, inline markup, tooltips    geometry in widgets, reports
    View.img       the same as an <img>                       GitHub, an untrusted notebook
    View.table     the numbers, HTML                          everywhere
    View.text      the numbers, plain                         a terminal
    View.figure    plotly, to zoom and pan; charts only       exported pages, and when asked for by name
    View.chart     what is drawn; charts only                 widgets, as a live figure (`lab/widgets/chart_box.py`)

A view is a *chart*, which has axes and is described by a `lab.charts.spec.Chart`, or *geometry*, drawn as SVG alone.

Each form is drawn when first asked for. A notebook output saves ``img``, ``table`` and ``text``; beside a kernel the
inline picture is shown in their place, with tooltips and in JupyterLab's own theme, and not saved. plotly's figure is
not part of an output: JupyterLab's plotly renderer saves a bitmap of 40 to 120 kB beside every figure it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from recshard_lab.lab.draw.svg import Svg, img_tag
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.lab.charts.spec import Chart

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class View:
    """One picture with its numbers. Made by the functions in ``lab.views``.

    Args:
        name: the view's name in the registry.
        title: what is shown.
        summary: what it shows, in a sentence; also the picture's description for a screen reader.
        numbers: the table behind it.
        draw: the static drawing; called with a name that is unique on the page.
        chart: what is drawn, where the view is a chart; None where it is geometry.
        problem: the reason if the view cannot be drawn; else empty.
        extent: the largest value drawn, which fills the picture; several pictures are to one scale where the view is
            called with the largest of theirs as ``extent``. 0.0 if the view has no scale.
    """

    name: str
    title: str
    summary: str
    numbers: TextTable
    draw: Callable[[str], Svg] = field(repr=False)
    problem: str = ""
    extent: float = 0.0
    chart: Chart | None = field(default=None, repr=False)

    @classmethod
    def of_chart(cls, name: str, chart: Chart, numbers: TextTable, width: float, extent: float = 0.0) -> View:
        """The view that a chart is.

        Args:
            name, numbers, extent: as above.
            width: of the static picture, in pixels.
        """
        from recshard_lab.lab.charts.static import draw_chart

        def draw(uid: str) -> Svg:
            return draw_chart(chart, width, uid)

        return cls(name, chart.title, chart.caption, numbers, draw, extent=extent, chart=chart)

    @cached_property
    def figure(self) -> Any:
        """A chart as a ``plotly.graph_objects.Figure``; None for geometry and for a message."""
        if self.chart is None:
            return None
        from recshard_lab.lab.charts.plotly import figure_of

        return figure_of(self.chart)

    @cached_property
    def svg(self) -> str:
        """The static picture as inline SVG markup; text takes the colour of the page around it."""
        return self.inline(f"rs-{self.name}")

    def inline(self, uid: str) -> str:
        """As `svg`; ``uid`` must differ between the pictures of a page."""
        return str(self.draw(uid))

    @property
    def table(self) -> str:
        """The numbers as an HTML table."""
        return self.numbers.html

    @property
    def text(self) -> str:
        """Title, sentence and numbers as plain text."""
        return "\n".join(line for line in (self.title, self.summary, self.numbers.text) if line)

    @property
    def img(self) -> str:
        """The static picture as an ``<img>`` that needs nothing of the page around it."""
        drawing = self.draw(f"rs-{self.name}")
        return img_tag(str(drawing), f"{self.title}. {self.summary}", drawing.width)

    def _repr_html_(self) -> str:
        return self.img + self._details

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text, "text/html": self._repr_html_()}
        if beside_a_kernel():
            import ipywidgets

            alone = self.inline(f"rs-{self.name}-{token_hex(4)}")  # a page shows many, of several kernels
            live = ipywidgets.HTML(f"{alone}{self._details}", layout={"width": "100%"})
            bundle[WIDGET_MIME] = live._repr_mimebundle_()[WIDGET_MIME]
        return bundle

    @property
    def _details(self) -> str:
        if not self.numbers.rows:
            return ""
        return f"<details><summary>The numbers</summary>{self.table}</details>"


def beside_a_kernel() -> bool:
    """Whether a notebook's kernel shows this, rather than a script, a rank or a terminal."""
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def message_view(name: str, title: str, problem: str) -> View:
    """A view that shows a problem, in every form.

    >>> message_view("placement", "Placement", "the plan is empty").text
    'Placement\\nthe plan is empty'
    """
    lines = _wrapped(problem, 96)

    def draw(uid: str) -> Svg:
        svg = Svg(640, 56 + 17 * len(lines), title, problem, uid)
        svg.rect(
            1,
            1,
            638,
            54 + 17 * len(lines),
            "none",
            extra='rx="6" stroke="currentColor" stroke-opacity=".45" stroke-dasharray="5 4"',
        )
        svg.text(18, 28, title, size=13, bold=True)
        for i, line in enumerate(lines):
            svg.text(18, 49 + 17 * i, line)
        return svg

    return View(name, title, problem, TextTable((), ()), draw, problem=problem)


def _wrapped(words: str, width: int) -> list[str]:
    from textwrap import wrap

    return [line for part in words.splitlines() for line in (wrap(part, width) or [""])] or [""]
