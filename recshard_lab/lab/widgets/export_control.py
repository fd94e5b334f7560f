"""The Export control of every widget: choose a kind of file and press Export.

The file is written beside the notebook, and the browser downloads it. The Python that writes the same file is below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.lab.exporting.exportable import stem_of
from recshard_lab.lab.exporting.kinds import KINDS, Options
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets.components import script, style

_MIME = {"html": "text/html", "svg": "image/svg+xml", "png": "image/png", "json": "application/json"}


class ExportControl(anywidget.AnyWidget):
    """A menu of kinds, a button, and the Python that does the same.

    Args:
        of: the `LabWidget` that it exports.
        name: of the files, without suffix.
        kinds: the offered kinds, names of `lab.exporting.kinds.KINDS`.
        plans: names of the widget's plans, if it has several: the reader chooses one for files that hold one plan.

    Attributes:
        last: the file written last, or None.
    """

    _esm = script("export_control")
    _css = style("export_control")
    kinds = traitlets.List(traitlets.List(traitlets.Unicode()), help="name, label and need of each kind").tag(sync=True)
    kind = traitlets.Unicode("html").tag(sync=True)
    plans = traitlets.List(traitlets.Unicode()).tag(sync=True)
    plan = traitlets.Unicode("").tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    message = traitlets.Unicode("").tag(sync=True)
    failed = traitlets.Bool(False).tag(sync=True)
    python = traitlets.Unicode("").tag(sync=True)

    def __init__(self, of: Any, name: str, kinds: Sequence[str] = tuple(KINDS), plans: Sequence[str] = ()) -> None:
        self.of, self.name = of, name
        self.last: Path | None = None
        labels = [[kind, f".{kind}, {KINDS[kind].about}", KINDS[kind].needs] for kind in kinds]
        super().__init__(kinds=labels, kind=kinds[0], plans=list(plans), plan=plans[0] if plans else "")
        self.observe(self._show_python, names=["kind", "plans", "plan"])
        self.on_msg(lambda _, message, __: self.press(message.get("export"), message.get("plan")))
        self._show_python()

    def press(self, kind: Any = None, plan: Any = None) -> None:
        """Writes the file in the background and sends it to the browser, as the button does."""
        if self.of.worker.busy("export"):
            return
        known = [name for name, *_ in self.kinds]
        self.kind = kind if kind in known else self.kind
        self.plan = plan if plan in self.plans else self.plan
        self.busy, self.failed, self.message = True, False, "Writing …"
        self.of.worker.queue(self._write, "export")

    def arrange(self, names: Mapping[str, str]) -> None:
        """Offers these plans, key -> name."""
        self.plans = list(names.values())

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until the file is written.

        Raises:
            TimeoutError: it is not written in time.
        """
        if not self.of.worker.wait("export", timeout_s=timeout_s):
            raise TimeoutError(f"the export did not end within {timeout_s} s")

    def _write(self) -> None:
        try:
            options = Options(plan=self.plan if self._holds_one_plan else "")
            data = KINDS[self.kind].write(self.of.exportable(), options)
            path = self._free(Path(f"{self._stem}.{self.kind}"))
            path.write_bytes(data)
            self.last = path.resolve()
            self.message = f"Wrote {path.name} ({bytes_text(len(data))}) to {self.last.parent}."
            self._show_python()
            self.send({"file": path.name, "type": _MIME.get(self.kind, "application/octet-stream")}, [data])
        except Exception as error:
            self.failed, self.message = True, f"Nothing was written. {reason(error)}"
        finally:
            self.busy = False

    def _free(self, path: Path) -> Path:
        """The path, or a numbered one: only the control's last file is overwritten."""
        number, free = 1, path
        while free.exists() and free.resolve() != self.last:
            number += 1
            free = path.with_stem(f"{path.stem}_{number}")
        return free

    @property
    def _stem(self) -> str:
        return stem_of(self.plan) if self._holds_one_plan else self.name

    @property
    def _holds_one_plan(self) -> bool:
        """Whether the file holds one plan of several."""
        return KINDS[self.kind].needs == "plan" and len(self.plans) > 1

    def _show_python(self, _: Any = None) -> None:
        if self.plans and self.plan not in self.plans:
            self.plan = self.plans[0]
        plan = f", plan={json.dumps(self.plan, ensure_ascii=False)}" if self._holds_one_plan else ""
        file = f"{self._stem}.{self.kind}"
        if self.last is not None and self.last.suffix == f".{self.kind}" and self.last.stem.startswith(self._stem):
            file = self.last.name
        self.python = f'{_variable_of(self.of)}.export("{file}"{plan})'


def _variable_of(widget: Any) -> str:
    """The notebook's variable that holds the widget, or "widget"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(shell, "user_ns", {})
    return next((n for n, value in list(names.items()) if value is widget and not n.startswith("_")), "widget")
