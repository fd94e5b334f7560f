"""LabWidget: what all widgets of the lab share.

- one style sheet and one line with Export and the same in Python
- one place for messages and errors
- background work that ends with the widget
- a static picture for pages without a kernel; beside one, charts are live figures (`chart_box.py`)
- keys: JupyterLab's shortcuts do not take arrows, Enter or letters from a control
- answers while a cell is running: JupyterLab sends messages of widgets to a subshell of the kernel, a separate thread.
  Since ipykernel 7.4 a message is routed to the shell that used the widget last. If that shell is running a cell, the
  click waits for the cell. `answer_while_busy` turns this routing off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.kinds import KINDS
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.components import Keys
from recshard_lab.lab.widgets.export_control import ExportControl
from recshard_lab.lab.widgets.worker import Worker

# ipykernel's routing of a comm's messages, an attribute of its comms since 7.4; a comm without it is not routed
_ROUTE = "_reply_subshell_for"


class Quiet:
    """Mixin: controls that code moves with ``with self.quietly():`` call none of the callbacks set with `on`."""

    _depth = 0

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Controls that move inside answer nothing."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def on(self, control: ipw.Widget, answer: Callable[[Any], Any], trait: str = "value") -> None:
        """Calls `answer` with the new value when the reader moves a control."""
        control.observe(lambda change: None if self._depth else answer(change["new"]), names=trait)


class Message(ipw.HTML):
    """One line for the reader: what the widget is doing, did, or could not do.

    >>> message = Message()
    >>> message.fail("no ranks are launched")
    >>> message.value
    '<div class="rs-alert" role="alert">no ranks are launched</div>'
    """

    def show(self, words: str = "") -> None:
        """Shows a sentence; without one, the line is empty."""
        self.value = page.note(words) if words else ""

    def fail(self, problem: str | Exception) -> None:
        """Shows an error."""
        self.value = page.alert(problem if isinstance(problem, str) else reason(problem))


class LabWidget(Quiet, ipw.VBox):
    """A widget of the lab.

    Subclasses build their controls and then call `lay_out` with the rows.

    Args:
        name: its class on the page is ``recshard-NAME``; its threads have the name too.
        file: name of exported files, without suffix.
        kinds: the kinds of file that are offered, names of `lab.exporting.kinds.KINDS`.
        plans: names of its plans, if it has several: the reader chooses one for files that hold one plan.
        max_width: CSS.

    Attributes:
        worker: its background work.
        message: the line for errors and progress.
        exports: the Export control.
        code: the same in Python, folded.
    """

    def __init__(
        self,
        name: str,
        file: str,
        kinds: Sequence[str] = tuple(KINDS),
        plans: Sequence[str] = (),
        max_width: str = "1180px",
    ) -> None:
        self.worker = Worker(name)
        super().__init__(layout=ipw.Layout(width="100%", max_width=max_width))
        self.layout.padding = "0 0 0 12px"  # views beside it begin there
        self.add_class("recshard-widget")
        self.add_class(f"recshard-{name}")
        self.uid = self.model_id[:8]  # part of ids on the page; a closed widget has no model_id
        self.message, self.code = Message(), controls.wide_html()
        self.exports = ExportControl(self, file, kinds, plans)
        answer_while_busy(self)

    def lay_out(self, rows: Sequence[ipw.Widget]) -> None:
        """Puts the rows on the page, from top to bottom, and Export and the Python below them."""
        self.children = [Keys(), *rows, controls.foot(self.exports, self.code)]

    def run_in_background(self, action: Callable[[], str | None], doing: str, lane: str) -> None:
        """Runs a button's action in a thread; ignored while the last one runs.

        Args:
            action: returns the message for its end, if any. Its error is shown.
            doing: the message meanwhile.
            lane: actions of one lane do not overlap.
        """

        def work() -> None:
            try:
                self.message.show(action() or "")
            except Exception as error:
                self.message.fail(error)

        if not self.worker.busy(lane):
            self.message.show(doing)
            self.worker.queue(work, lane)

    def static(self) -> tuple[str, str]:
        """HTML and plain text for pages without a kernel."""
        raise NotImplementedError

    def exportable(self) -> Exportable:
        """The contents for `export`, as shown now."""
        raise NotImplementedError

    def export(self, path: str | Path, **options: Any) -> Path:
        """Writes what the widget shows to a file; see `recshard_lab.lab.export`.

        Args:
            path: ``.html``, ``.svg``, ``.png``, ``.json``, ``.py``, ``.sh``, ``.zip``, or a folder.
            options: ``plan``, ``plotly``, ``theme``, ``scale``, ``model``, ``title``, ``python``.

        Returns:
            The path written.

        Raises:
            ValueError: the kind of file cannot hold it.
        """
        from recshard_lab.lab.exporting.exporting import export

        return export(self, path, **options)

    def close(self) -> None:
        """Ends the background work and takes the widget off the page."""
        if hasattr(self, "worker"):  # ipywidgets also closes widgets whose construction failed
            self.worker.close()
        super().close()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and its static picture for pages without a kernel."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        html, text = self.static()
        return {**bundle, "text/html": html, "text/plain": text}


def answer_while_busy(widget: ipw.Widget) -> None:
    """Lets a widget and its children, present and later, answer while a cell is running, with every ipykernel."""
    comm = widget.comm
    if comm is not None and getattr(comm, _ROUTE, None) is not None:
        setattr(comm, _ROUTE, None)
    if isinstance(widget, ipw.Box):
        for child in widget.children:
            answer_while_busy(child)
        widget.observe(_answer_new, names="children")


def _answer_new(change: Any) -> None:
    known = {id(child) for child in change["old"]}  # plotly's figures have no hash
    for child in change["new"]:
        if id(child) not in known:
            answer_while_busy(child)
