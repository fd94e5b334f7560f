"""ChartFigure: a chart as plotly's ``FigureWidget``, drawn by plotly.js that a page receives once.

A ``FigureWidget`` of plotly sends its script, 5 MB, with each figure, and one message per change. Changes that reach
the page while the script loads are lost. This one differs in what it sends::

    drawn    the whole figure as JSON; the page draws the newest one, at most once per frame (``Plotly.react``)
    plotly   plotly.js, packed, to the first figure of a page that asks for it

Zoom and hidden series stay on the page, and are not reported to Python.

Importing this file takes about 1 s, as plotly's graph objects do.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from recshard_lab.lab.charts.plotly import update
from recshard_lab.lab.charts.spec import Chart
from recshard_lab.lab.draw.theme import MIDDLE_INK
from recshard_lab.lab.widgets.components import script, style


@lru_cache(1)
def packed_plotly() -> bytes:
    """plotly.js, gzipped: 1.5 MB."""
    return gzip.compress(get_plotlyjs().encode(), 6, mtime=0)


class ChartFigure(go.FigureWidget):
    """A chart on the page, updated in place.

    Attributes:
        drawn: the figure as JSON.
        still: SVG, shown until the figure is drawn, and in its place where the page cannot draw it.
        label: text alternative.
        problem: why the page cannot draw it; set by the page.
    """

    _esm = script("chart_figure")
    _css = style("chart_figure")
    version = traitlets.Unicode(get_plotlyjs_version()).tag(sync=True)
    ink = traitlets.Unicode(MIDDLE_INK).tag(sync=True)
    drawn = traitlets.Unicode().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._changing = False
        super().__init__(*arguments, **more)
        self.on_msg(self._answer)

    def show_chart(self, chart: Chart) -> None:
        """Shows another chart, with one message to the page."""
        self._changing = True
        try:
            update(self, chart)
        finally:
            self._changing = False
        with self.hold_sync():
            self.label = f"{chart.title}. {chart.caption}"
            self._redraw()

    def _answer(self, _: Any, message: Any, __: Any) -> None:
        if message == {"want": "plotly"}:
            self.send({"plotly": self.version}, [packed_plotly()])

    def _redraw(self, *_: Any, **__: Any) -> None:
        """Sends the figure. plotly calls this where its own widget sends a change."""
        if not self._changing:
            self.drawn = self.to_json(validate=False)

    _send_relayout_msg = _send_restyle_msg = _send_update_msg = _redraw
    _send_addTraces_msg = _send_moveTraces_msg = _send_deleteTraces_msg = _redraw
