"""LiveCounters: optimizer states and caches of a model on the ranks, as they change, also while a cell trains it.

The ranks post samples between two steps (`lab.watch_counters`). A thread of the widget reads them. So the widget never
waits for a step, delays one, or keeps the ranks busy for the next cell.
"""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as ipw

from recshard_lab.lab import views
from recshard_lab.lab.draw.theme import counted, ms_text
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Section
from recshard_lab.lab.live.ranks_gone import BoundRanks
from recshard_lab.lab.live.samples import Sample, read_counters, watch_counters
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.chart_box import ChartBox
from recshard_lab.launcher import LaunchError, current

MOST_SAMPLES = 400  # beyond, every second sample of the older half is dropped
MOST_CACHE_ROWS = 100_000_000


class LiveCounters(LabWidget):
    """Shows the counters of optimizers and caches of a model on the ranks over time.

    Args:
        ranks: the launched session; by default the running one.
        model: name of a `DistributedModelParallel` on the ranks.
        every_s: seconds between two looks, and the minimum between two samples while a cell runs.
        cache_rows: simulates a cache of this many rows per table and rank; 0 simulates none.

    Attributes:
        history: the samples, oldest first; `views.counters` draws them.

    Raises:
        LaunchError: no ranks are running. RankError: the ranks have no model of this name.
        ValueError: `every_s` is not positive, or `cache_rows` is negative.
    """

    def __init__(self, ranks: Any = None, model: str = "model", *, every_s: float = 0.5, cache_rows: int = 0) -> None:
        if not isinstance(every_s, (int, float)) or not 0 < every_s < float("inf"):
            raise ValueError(f"every_s must be positive seconds, got {every_s!r}")
        found = ranks if ranks is not None else current()
        if found is None:
            raise LaunchError("no ranks are running. Fix: launch them in a cell with %recshard_launch -n 4")
        self.ranks, self.model, self.every_s = found, model, float(every_s)
        self.history: list[Sample] = [watch_counters(found, model, every_s=every_s, cache_rows=cache_rows)]
        self._bound, self._gone = BoundRanks.of(found), False
        self._lock = threading.RLock()  # the reader's choices and new samples are shown one after the other
        super().__init__("counters", "counters", kinds=("html", "svg", "png"), max_width="1000px")
        self._build(cache_rows)
        self._show()
        self.worker.every(self.every_s, self._look, "look")

    def refresh(self) -> Sample:
        """Looks once, now, and returns the newest sample."""
        with self._lock:
            sample = read_counters(self.ranks)
            if sample is not None and self._gone:  # another widget or cell watches the model again
                self.history, self._bound, self._gone = [sample], BoundRanks.of(self.ranks), False
                self._show()
            elif sample is not None and not sample.same_as(self.history[-1]):
                self.history.append(sample)
                if len(self.history) > MOST_SAMPLES:
                    half = MOST_SAMPLES // 2
                    self.history = [*self.history[:half:2], *self.history[half:]]
                self._show()
            elif sample is None:
                words = f"'{self.model}' is gone from the ranks, or is not watched any more. Run its cell again."
                words = self._bound.gone(self.model) or words
                if not self._gone:
                    self._gone = True
                    self._show()
                self.message.fail(f"{words} Then press Reset. Below are the last counters.")
            return self.history[-1]

    def reset(self, cache_rows: int | None = None) -> Sample:
        """Resets all counters. The ranks must be idle.

        Args:
            cache_rows: size of the simulated cache from here; by default that of the control.

        Raises:
            LaunchError: a cell is running on the ranks, or they have ended.
        """
        rows = self.cache.value if cache_rows is None else cache_rows
        if not self.ranks.pids and (running := current()) is not None:
            self.ranks = running  # launched after the watched ranks were stopped
        sample = watch_counters(self.ranks, self.model, every_s=self.every_s, cache_rows=rows)
        with self._lock:
            self.history, self._bound, self._gone = [sample], BoundRanks.of(self.ranks), False
            self.cache.value = rows
            self._show()
        return sample

    def exportable(self) -> Exportable:
        """The counters of all tables and, if one is chosen, of its ranks, for `export`."""
        with self._lock:
            history, table = list(self.history), self.table.value.strip()
        shown = [views.counters(history), *([views.counters(history, table=table)] if table else [])]
        pictures = {view.title: [view] for view in shown}
        sections = [Section(heading, parts) for heading, parts in pictures.items()]
        ranks = counted(len(history[-1].ranks), "rank")
        note = f"Counted on {ranks} of this machine, in {counted(len(history), 'sample')}."
        return Exportable("Counters", sections, note=note, python=self.python, pictures=pictures, name="counters")

    @property
    def python(self) -> str:
        """The same in Python."""
        name = self.table.value.strip()
        chosen = f", table={name!r}" if name else ""
        rows = self.cache.value
        return (
            "import recshard_lab as rs\n\n"
            f"history = [rs.lab.watch_counters(ranks, {self.model!r}, cache_rows={rows})]\n"
            "...                                   # train: in cells, in widgets\n"
            "history.append(rs.lab.read_counters(ranks))  # at any time, also while a cell runs\n"
            f"rs.lab.views.counters(history{chosen})"
        )

    def _build(self, cache_rows: int) -> None:
        self.table = ipw.Combobox(  # a text field: JupyterLab takes the arrow keys of a menu
            options=list(self.history[-1].totals()),
            placeholder="all tables",
            continuous_update=False,
            description="Table",
            tooltip="the table to show, with one line per rank",
            layout=ipw.Layout(width="260px"),
        )
        self.paused = ipw.ToggleButton(description="Pause", icon="pause", tooltip="stop following the ranks")
        self.numbers = ipw.ToggleButton(description="Numbers", icon="table", tooltip="the numbers of the picture")
        self.cache = ipw.BoundedIntText(
            cache_rows,
            min=0,
            max=MOST_CACHE_ROWS,
            description="Cache of rows",
            tooltip="simulate a cache with this many rows per table and rank (0 = off)",
            style={"description_width": "initial"},
            layout=ipw.Layout(width="190px"),
        )
        self.again = controls.button("Reset", "reset the counters and use this cache", "undo", width="110px")
        self.paused.layout.width = self.numbers.layout.width = "110px"
        self.again.on_click(lambda _: self.run_in_background(self._reset, "", "work"))
        for control in (self.table, self.numbers):
            self.on(control, lambda _: self._show())
        self.picture, self.listed = ChartBox(), controls.wide_html("rs-figures")
        chosen = controls.row([self.table, self.paused, self.numbers, self.cache, self.again])
        self.lay_out([chosen, self.picture, self.message, self.listed])

    def _look(self) -> None:
        if self.paused.value:
            return
        try:
            self.refresh()
        except Exception as error:  # the next look may succeed: ranks may be stopping
            self.message.fail(error)

    def _reset(self) -> str:
        self.reset()
        return self._status()

    def _status(self) -> str:
        sample = self.history[-1]
        return f"Step {sample.step:,}. The last sample took {ms_text(sample.ms)} on the slowest rank."

    def _show(self) -> None:
        with self._lock:
            view = views.counters(self.history, table=self.table.value.strip() or None)
            head = f'<div data-step="{self.history[-1].step}" data-samples="{len(self.history)}"></div>'
            self.picture.show(view, f"{self.uid}-counters", head, gone=self._gone)
            listed = view.table if self.numbers.value else ""
            self.listed.value = page.gone(listed) if self._gone else listed
            if not self._gone:
                self.message.show(self._status())
            self.code.value = page.code(self.python)

    def static(self) -> tuple[str, str]:
        """The picture of all tables."""
        view = views.counters(self.history)
        return view.img, view.text
