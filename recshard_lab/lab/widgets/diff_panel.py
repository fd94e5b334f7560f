"""What changes from one plan of a comparison to another: two menus and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ipywidgets as ipw

from recshard_lab.lab.compare.plan_comparison import PlanComparison
from recshard_lab.lab.widgets import controls, page
from recshard_lab.sharding import PlanError


class DiffPanel(ipw.VBox):
    """Lists which tables lie elsewhere, what that moves, and what each move costs or saves.

    Args:
        looked: called with what shows another pair when the reader chooses one.
    """

    def __init__(self, looked: Callable[[Callable[[], None]], None]) -> None:
        width = "max-content"  # names of plans are long
        self.baseline = controls.pick("Changes from", "the plan that the other is compared with", [("", "")], width)
        self.compared = controls.pick("to", "the plan whose changes are listed", [("", "")], width)
        self.table = controls.wide_html()
        self._names: dict[str, str] = {}
        self._shown: PlanComparison | None = None
        self._quiet = False
        for menu in (self.baseline, self.compared):
            menu.observe(lambda _: None if self._quiet else looked(self._show), names="value")
        super().__init__([controls.row([self.baseline, self.compared]), self.table], layout=ipw.Layout(width="100%"))

    def arrange(self, names: Mapping[str, str]) -> None:
        """Offers these plans (key -> name); from the planner's own where there is one, to the first other."""
        keys, self._names = list(names), dict(names)
        entries = [(name, key) for key, name in names.items()]
        first = self.baseline.value if self.baseline.value in keys else "auto" if "auto" in keys else keys[0]
        other = next(key for key in keys if key != first)
        second = self.compared.value if self.compared.value in keys else other
        self._quiet = True
        try:
            for menu, value in ((self.baseline, first), (self.compared, second)):
                if list(menu.options) != entries:
                    menu.options = entries
                menu.value = value
        finally:
            self._quiet = False

    def show(self, comparison: PlanComparison) -> None:
        """Lists the changes between the chosen two."""
        self._shown = comparison
        self._show()

    @property
    def python(self) -> str:
        """The table in Python, where the comparison is called ``found``."""
        before, after = (self._names[menu.value] for menu in (self.baseline, self.compared))
        return f"print(found.diff({after!r}, baseline={before!r}))"

    def _show(self) -> None:
        if self._shown is None:
            return
        if self.baseline.value == self.compared.value:
            self.table.value = page.note("Choose two plans to see what changes from one to the other.")
            return
        before, after = (self._names[menu.value] for menu in (self.baseline, self.compared))
        try:
            found = self._shown.diff(after, before)
        except (PlanError, ValueError) as error:
            self.table.value = page.note(f"No changes to list. {error}")
            return
        self.table.value = page.diff_table(found, before, after)
