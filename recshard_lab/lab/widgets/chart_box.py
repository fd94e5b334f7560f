"""ChartBox: the place of one view in a widget. Charts are live figures there, geometry is SVG.

::

    view with a chart, beside a kernel  -> ChartFigure: hover, zoom, hiding of series, updated in place
    anything else                       -> SVG

The SVG of a chart is also shown until plotly is loaded, and if the page cannot draw the figure.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ipywidgets as ipw

from recshard_lab.lab.charts.spec import (
    Area,
    Band,
    Bars,
    Chart,
    Lines,
    Mark,
    Panel,
    Points,
    Rule,
    Span,
    Text,
    categories,
    linear,
)
from recshard_lab.lab.draw.theme import SCHEMES
from recshard_lab.lab.draw.view import View, beside_a_kernel
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page

if TYPE_CHECKING:
    from recshard_lab.lab.widgets.chart_figure import ChartFigure


def _example(high: float) -> Chart:
    """Every kind of mark, twice."""
    look, names = SCHEMES["row_wise"], categories(["y"])
    marks: tuple[Mark, ...] = (
        Bars("bars", look, (0.0,), (0.0,), (high,), ("",), (f"{high}",), across=True, framed=(True,)),
        Area("area", look, (0.0, 1.0), (0.0, 0.0), (high, high)),
        Band("band", x=(0.0, high)),
        Lines("lines", (0.0, 1.0), (0.0, high), markers=True, dash="6 3"),
        Points("points", (0.0,), (high,), labels=("1",), hover=("1",)),
        Rule(y=high, words="rule"),
        Span(0.0, 1.0, "span"),
        Text(high, 0.0, "text"),
    )
    panel = Panel(linear([0.0, high], "x"), names, marks, "panel")
    return Chart("Example", f"High is {high}.", ((panel, panel), (panel,)))


@lru_cache(1)
def loading() -> Future[type[ChartFigure]]:
    """The class of the figures, loaded by a thread: plotly's graph objects take about 1 s."""
    found: Future[type[ChartFigure]] = Future()

    def load() -> None:
        try:
            from recshard_lab.lab.widgets.chart_figure import ChartFigure, packed_plotly

            packed_plotly()
            first = ChartFigure()  # plotly's first figure takes 0.8 s, later ones some ms
            for high in (1.0, 2.0):
                first.show_chart(_example(high))
            first.close()
            found.set_result(ChartFigure)
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=load, name="recshard-plotly", daemon=True).start()
    return found


@dataclass(frozen=True)
class _Shown:
    """What a box shows, with its arguments of `ChartBox.show`."""

    view: View
    uid: str
    head: str
    gone: bool
    unfinished: bool


class ChartBox(ipw.VBox):
    """One view.

    Attributes:
        figure: the live figure; None until a chart is shown and plotly is loaded.
        problem: why charts are still pictures here; empty if they are live or there is no kernel.
    """

    def __init__(self) -> None:
        self._html, self._place = controls.wide_html(), controls.column(())
        self._place.layout.display = "none"
        self._shown: _Shown | None = None
        self._lock = threading.RLock()  # a thread loads plotly
        self._live = beside_a_kernel()
        self.figure: ChartFigure | None = None
        self.problem = ""
        super().__init__([self._html, self._place], layout=ipw.Layout(width="100%", min_width="0"))
        if self._live:
            loading()

    @property
    def shown(self) -> View | None:
        """The view that is shown; None for none."""
        return self._shown.view if self._shown is not None else None

    @property
    def value(self) -> str:
        """The HTML that is shown: the SVG, or what is shown beside a live figure."""
        return self._html.value

    def show(self, view: View, uid: str, head: str = "", gone: bool = False, unfinished: bool = False) -> None:
        """Shows a view.

        Args:
            view: any view.
            uid: unique on the page.
            head: HTML above it.
            gone: greyed, as its ranks have ended.
            unfinished: dimmed, as more is being computed.
        """
        with self._lock:
            self._shown = _Shown(view, uid, head, gone, unfinished)
            self._draw()
            if view.chart is not None and self._live and self.figure is None and not self.problem:
                loading().add_done_callback(self._loaded)

    def say(self, markup: str = "") -> None:
        """Shows HTML instead of a view; without it, nothing."""
        with self._lock:
            self._shown = None
            self._place.layout.display = "none"
            self._html.value = markup

    def age(self) -> None:
        """Dims the view, as its successor is being computed."""
        with self._lock:
            if self._shown is not None and not self._shown.unfinished:
                shown = self._shown
                self.show(shown.view, shown.uid, shown.head, shown.gone, unfinished=True)

    def _loaded(self, found: Future[type[ChartFigure]]) -> None:
        with self._lock:
            if found.exception() is not None:
                self.problem = reason(found.exception())  # type: ignore[arg-type]
            if self._shown is not None and self.comm is not None:
                self._draw()

    def _failed(self, change: Any) -> None:
        with self._lock:
            self.problem = change["new"]
            if self._shown is not None:
                self._draw()

    def _draw(self) -> None:
        shown = self._shown
        assert shown is not None
        chart = shown.view.chart
        live = chart is not None and self._live and not self.problem and loading().done()
        if live:
            assert chart is not None
            self._show_figure(shown, chart)
        markup = shown.head if live else shown.head + shown.view.inline(shown.uid)
        if chart is not None and self.problem:
            markup += page.note(f"This picture is still: {self.problem}")
        drawn = page.picture(markup, shown.unfinished) if markup else ""
        self._html.value = page.gone(drawn) if shown.gone else drawn
        self._place.layout.display = "" if live else "none"
        for css_class, on in (("rs-gone", shown.gone), ("rs-late", shown.unfinished)):
            (self._place.add_class if on else self._place.remove_class)(css_class)

    def _show_figure(self, shown: _Shown, chart: Chart) -> None:
        if self.figure is None:
            self.figure = loading().result()()
            self.figure.still = shown.view.inline(shown.uid)
            self.figure.observe(self._failed, "problem")
        self.figure.show_chart(chart)
        if not self._place.children:
            self._place.children = [self.figure]
