"""Runs plans of a comparison on the launched ranks, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as ipw

from recshard_lab.lab.compare.measure import Measured
from recshard_lab.lab.compare.question import Answer
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page

EVERY = "every plan"


class RunBar(ipw.HBox):
    """A menu of plans and the button that runs one, or all one after the other.

    Args:
        status: where it tells what happens.
        answer_of: key -> the plan that is shown there.
        run: runs the plan of a key and shows what was measured.
    """

    def __init__(self, status: ipw.HTML, answer_of: Callable[[str], Answer], run: Callable[[str], Measured]) -> None:
        self.status, self._answer_of, self._run = status, answer_of, run
        self.which = controls.pick("Run", "which plan is run on the launched ranks", [("", "")], "230px")
        hint = "runs the plan on the launched ranks and lays the measured numbers beside the predicted"
        self.button = controls.button("Run on ranks", hint, "play", "primary")
        self.button.on_click(lambda _: self._clicked())
        self._names: dict[str, str] = {}
        self.work: threading.Thread | None = None
        super().__init__([self.which, self.button])

    def arrange(self, names: Mapping[str, str]) -> None:
        """Offers these plans, key -> name."""
        self._names = dict(names)
        options = [*((name, key) for key, name in names.items()), (EVERY, EVERY)]
        now = self.which.value if self.which.value in (*names, EVERY) else options[0][1]
        if list(self.which.options) != options:
            self.which.options = options
        self.which.value = now

    def _clicked(self) -> None:
        if self.work is not None and self.work.is_alive():
            return
        keys = list(self._names) if self.which.value == EVERY else [self.which.value]
        try:
            asked = [self._answer_of(key) for key in keys]
            for shown in asked:
                ranks_for(shown)
        except Exception as error:
            self.status.value = page.alert(reason(error))
            return
        self.button.disabled = True
        self.status.value = page.note(f"Running on {asked[0].question.world_size} ranks …")
        work = threading.Thread(target=self._run_and_tell, args=(keys,), name="recshard-plan-compare", daemon=True)
        self.work = work
        work.start()

    def _run_and_tell(self, keys: Sequence[str]) -> None:
        try:
            told = [f"{self._names[key]}: {self._run(key)}" for key in keys]
            self.status.value = page.note(f"Measured: {'; '.join(told)}.")
        except Exception as error:
            self.status.value = page.alert(reason(error))
        finally:
            self.button.disabled = False


def ranks_for(shown: Answer) -> Any:
    """The launched ranks, where this plan can run on them.

    Raises:
        ValueError: no ranks are launched, not as many as the plan has, or the plan does not fit.
    """
    from recshard_lab.launcher import current

    ranks, wanted = current(), shown.question.world_size
    if ranks is None:
        raise ValueError(f"No ranks are launched. Launch them in a cell: %recshard_launch -n {wanted}")
    if ranks.world_size != wanted:
        raise ValueError(
            f"The plan is for {wanted} ranks, {ranks.world_size} are launched. Set Ranks to {ranks.world_size}, "
            f"or relaunch: %recshard_stop, then %recshard_launch -n {wanted}"
        )
    if not shown.fits:
        raise ValueError("This plan does not fit, so it is not run. " + shown.problem)
    return ranks
