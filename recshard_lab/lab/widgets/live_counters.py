"""LiveCounters: optimizer states and caches of a model on the ranks, as they change, also while a cell trains it.

The ranks post their samples between two steps (`lab.watch_counters`). A thread of the widget reads them. So the widget
never waits for a step, delays one, or keeps the ranks busy for the next cell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as ipw

from recshard_lab.lab import views
from recshard_lab.lab.draw.theme import ms_text
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Section
from recshard_lab.lab.live.ranks_gone import BoundRanks
from recshard_lab.lab.live.samples import Sample, read_counters, watch_counters
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.export_control import ExportControl, Exports
from recshard_lab.launcher import LaunchError, current

KEPT = 400  # samples; beyond, every second of the older half goes
MOST_CACHE_ROWS = 100_000_000

STYLE = """<style>
.recshard-counters .rs-alert{border-left:4px solid #d9480f;padding:4px 10px;line-height:1.4;white-space:pre-wrap;
 overflow-wrap:anywhere}
.recshard-counters .rs-gone{opacity:.45}
.recshard-counters pre{margin:4px 0 0;padding:6px 10px;overflow:auto;line-height:1.35;
 color:var(--jp-content-font-color1,inherit);background:var(--jp-cell-editor-background,transparent);
 border:1px solid var(--jp-border-color2,#d8dce1)}
.recshard-counters table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.recshard-counters th,.recshard-counters td{padding:2px 12px 2px 0;white-space:nowrap}
.recshard-counters svg[role=img]{max-width:100%;height:auto;margin-left:-12px}
</style>"""


class LiveCounters(Exports, LabWidget):
    """Shows what optimizers and caches of a model on the ranks have counted, and its course.

    Args:
        ranks: the launched session; the one that is running when left out.
        model: how a `DistributedModelParallel` is called on the ranks.
        every_s: seconds between two looks, and at least between two samples while a cell runs.
        cache_rows: reckon what a cache of so many rows, of each table on each rank, would hit; 0: none.

    Attributes:
        history: the samples, oldest first; `views.counters` draws them.

    Raises:
        LaunchError: no ranks are running. RankError: there is no such model on them. ValueError: numbers that are none.
    """

    def __init__(self, ranks: Any = None, model: str = "model", *, every_s: float = 0.5, cache_rows: int = 0) -> None:
        self._over = threading.Event()  # first, for `close` is called of a widget that was refused too
        if not isinstance(every_s, (int, float)) or not 0 < every_s < float("inf"):
            raise ValueError(f"every_s must be positive seconds, got {every_s!r}")
        found = ranks if ranks is not None else current()
        if found is None:
            raise LaunchError("no ranks are running. Start some in a cell: %recshard_launch -n 4")
        self.ranks, self.model, self.every_s = found, model, float(every_s)
        self.history: list[Sample] = [watch_counters(found, model, every_s=every_s, cache_rows=cache_rows)]
        self._bound, self._gone = BoundRanks.of(found), False
        self._lock = threading.RLock()  # the reader's choices and the ranks' news are shown one after the other
        self._working: threading.Thread | None = None
        self._build(cache_rows)
        for button in (self.paused, self.numbers, self.again):
            button.layout.width = "110px"
        self.exports = ExportControl(self, "counters", kinds=("html", "svg", "png"))
        chosen = controls.row([self.table, self.paused, self.numbers, self.cache, self.again])
        rows = [ipw.HTML(STYLE), chosen, self.picture, self.told, self.listed, controls.foot(self.exports, self.code)]
        super().__init__(rows, layout=ipw.Layout(width="100%", max_width="1000px"))
        self.add_class("recshard-counters")
        self._show()
        self._thread = threading.Thread(target=self._look, name="recshard-live-counters", daemon=True)
        self._thread.start()

    def refresh(self) -> Sample:
        """Looks once, now; the newest sample."""
        with self._lock:
            sample = read_counters(self.ranks)
            if sample is not None and self._gone:  # the model was watched anew elsewhere
                self.history, self._bound, self._gone = [sample], BoundRanks.of(self.ranks), False
                self._show()
            elif sample is not None and not sample.same_as(self.history[-1]):
                self.history.append(sample)
                if len(self.history) > KEPT:
                    self.history = [*self.history[: KEPT // 2 : 2], *self.history[KEPT // 2 :]]
                self._show()
            elif sample is None:
                words = f"'{self.model}' is gone from the ranks, or is not watched any more. Run its cell again."
                words = self._bound.gone(self.model) or words
                if not self._gone:
                    self._gone = True
                    self._show()
                self._set(self.told, page.alert(f"{words} Then press Start over. Below are the last counters."))
            return self.history[-1]

    def start_over(self, cache_rows: int | None = None) -> Sample:
        """Counts from nought, with another reckoned cache where `cache_rows` is given. The ranks must be at rest.

        Raises:
            LaunchError: they are not.
        """
        rows = self.cache.value if cache_rows is None else cache_rows
        if not self.ranks.pids and (running := current()) is not None:
            self.ranks = running  # launched after the ranks that were watched had been stopped
        sample = watch_counters(self.ranks, self.model, every_s=self.every_s, cache_rows=rows)
        with self._lock:
            self.history, self._bound, self._gone = [sample], BoundRanks.of(self.ranks), False
            self.cache.value = rows
            self._show()
        return sample

    def close(self) -> None:
        """Stops looking and takes the widget off the page. The ranks go on counting: `lab.unwatch_counters` ends it."""
        self._over.set()
        super().close()

    def exportable(self) -> Exportable:
        """The counters as they stand, all tables and, where one is chosen, its ranks, for `export`."""
        with self._lock:
            history, table = list(self.history), self.table.value.strip()
        shown = [views.counters(history), *([views.counters(history, table=table)] if table else [])]
        pictures = {view.title: [view] for view in shown}
        sections = [Section(heading, own) for heading, own in pictures.items()]
        note = f"Counted on {len(history[-1].ranks)} ranks of this machine, in {len(history)} samples."
        return Exportable("Counters", sections, note=note, python=self.python, pictures=pictures, name="counters")

    @property
    def python(self) -> str:
        """The same in Python."""
        name = self.table.value.strip()
        chosen = f", table={name!r}" if name else ""
        rows = self.cache.value
        return (
            "from recshard_lab import lab\n\n"
            f"history = [lab.watch_counters(ranks, {self.model!r}, cache_rows={rows})]\n"
            "...                                   # train: in cells, in widgets\n"
            "history.append(lab.read_counters(ranks))  # at any time, also while a cell runs\n"
            f"lab.views.counters(history{chosen})"
        )

    # ---- inside ----

    def _build(self, cache_rows: int) -> None:
        names = list(self.history[-1].totals())
        self.table = ipw.Combobox(  # text: JupyterLab takes the arrow keys of a menu for its own
            options=names,
            placeholder="all tables",
            continuous_update=False,
            description="Table",
            tooltip="one table: a line a rank",
            layout=ipw.Layout(width="260px"),
        )
        self.table.observe(lambda _: self._show(), names="value")
        self.paused = ipw.ToggleButton(description="Pause", icon="pause", tooltip="stop following the ranks")
        self.cache = ipw.BoundedIntText(
            cache_rows,
            min=0,
            max=MOST_CACHE_ROWS,
            description="Cache of rows",
            tooltip="reckon the hits of a cache of so many rows, of each table on each rank; 0: none",
            style={"description_width": "initial"},
            layout=ipw.Layout(width="190px"),
        )
        self.again = ipw.Button(description="Start over", icon="undo", tooltip="count from nought, with this cache")
        self.again.on_click(lambda _: self._act(self.start_over))
        self.numbers = ipw.ToggleButton(description="Numbers", icon="table", tooltip="the numbers behind the picture")
        self.numbers.observe(lambda _: self._show(), names="value")
        self.picture, self.listed, self.code = controls.wide_html(), controls.wide_html(), controls.wide_html()
        self.told = ipw.HTML()

    def _look(self) -> None:
        while not self._over.wait(self.every_s):
            if self.paused.value:
                continue
            try:
                self.refresh()
            except Exception as error:  # the next look may succeed: ranks may be stopping
                self._set(self.told, page.alert(reason(error)))

    def _act(self, action: Callable[[], Any]) -> None:
        """Runs a button in a thread: the ranks may be slow to answer."""
        if self._working is not None and self._working.is_alive():
            return

        def work() -> None:
            try:
                action()
            except Exception as error:
                self._set(self.told, page.alert(reason(error)))

        self._working = threading.Thread(target=work, name="recshard-live-counters-work", daemon=True)
        self._working.start()

    def _show(self) -> None:
        with self._lock:
            sample = self.history[-1]
            view = views.counters(self.history, table=self.table.value.strip() or None)
            drawn = view.inline(f"{self.model_id[:8]}-counters")
            body = f'<div data-step="{sample.step}" data-samples="{len(self.history)}">{drawn}</div>'
            picture, listed = page.picture(body), view.table if self.numbers.value else ""
            self._set(self.picture, page.gone(picture) if self._gone else picture)
            self._set(self.listed, page.gone(listed) if self._gone else listed)
            words = f"Step {sample.step:,}. The last sample took {ms_text(sample.ms)} on the slowest rank."
            if not self._gone:
                self._set(self.told, page.note(words))
            python = f"<details><summary>The same in Python</summary><pre>{escape(self.python)}</pre></details>"
            self._set(self.code, python)

    @staticmethod
    def _set(html: ipw.HTML, value: str) -> None:
        """Nothing is sent to the page where nothing changed."""
        if html.value != value:
            html.value = value

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel the picture as it stood."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        view = views.counters(self.history)
        return {**bundle, "text/html": view.img, "text/plain": view.text}
