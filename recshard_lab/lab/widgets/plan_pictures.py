"""The pictures of a plan comparison: drawn when they are first looked at, in a thread where that takes longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import ipywidgets as ipw

from recshard_lab.lab.compare.plan_comparison import SEARCHED, PlanComparison
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import page
from recshard_lab.lab.widgets.newest import Newest


class PlanPictures:
    """Draws one view of every plan into the cells below one another.

    Args:
        cells: key of a plan -> where its picture goes; read again each time.
        uid: tells the pictures of this widget from others on the page.
        lock: held while anything is shown.
    """

    def __init__(
        self, cells: Mapping[str, ipw.HTML], uid: Callable[[], str], lock: AbstractContextManager[object]
    ) -> None:
        self.cells, self.uid, self.lock = cells, uid, lock
        self._markup: dict[str, dict[str, str]] = {}
        self._newest = Newest("plan-pictures")

    def forget(self) -> None:
        """The plans are others: nothing drawn before is right."""
        self._newest.forget()
        self._markup.clear()

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Waits for what is being drawn; whether it ended in time."""
        return self._newest.wait(timeout_s)

    def show(self, name: str, found: PlanComparison, names: Mapping[str, str], width: int) -> None:
        """Shows a view of all plans.

        Args:
            name: of the view.
            found: the plans.
            names: key -> name of the plan in `found`.
            width: of each picture, in pixels.
        """
        self._newest.forget()
        if name in self._markup:
            self._send(name, names)
        elif name not in SEARCHED or found.searched:
            self._markup[name] = self._drawn(name, found, names, width)
            self._send(name, names)
        else:
            for key in names:
                self.cells[key].value = page.note("Searching again, this time keeping what is looked at …")
            self._newest.ask(lambda wanted: self._later(wanted, name, found, names, width))

    def _drawn(self, name: str, found: PlanComparison, names: Mapping[str, str], width: int) -> dict[str, str]:
        views = found.views(name, width)
        places = enumerate(names.items())
        return {key: views[plan].inline(f"{self.uid()}-{place}-{name}") for place, (key, plan) in places}

    def _later(
        self, wanted: Callable[[], bool], name: str, found: PlanComparison, names: Mapping[str, str], width: int
    ) -> None:
        try:
            found.search(wanted)
            drawn = self._drawn(name, found, names, width) if wanted() else {}
        except Exception as error:
            drawn = dict.fromkeys(names, page.alert(reason(error)))
        with self.lock:
            if wanted():
                self._markup[name] = drawn
                self._send(name, names)

    def _send(self, name: str, names: Mapping[str, str]) -> None:
        many = len(names) > 2
        for key, markup in self._markup[name].items():
            head = f'<h4 class="rs-over">{page.escaped(names[key])}</h4>' if many else ""
            self.cells[key].value = page.picture(head + markup)
