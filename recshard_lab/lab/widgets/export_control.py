"""The Export control of every widget: choose a kind of file, press, and it is written beside the notebook and saved by
the browser. Below stands the Python that writes the same file.

A widget becomes exportable by `Exports`: it says in `exportable` what there is to export, and puts ``self.exports``
among its children.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from recshard_lab.lab.compare.plan_comparison import PlanComparison
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.lab.exporting.exportable import Exportable, stem_of
from recshard_lab.lab.exporting.kinds import KINDS, Options
from recshard_lab.lab.views.registry import reason

_MIME = {"html": "text/html", "svg": "image/svg+xml", "png": "image/png", "json": "application/json"}

_ESM = """
function render({ model, el }) {
  const make = (tag, words, inside) => {
    const at = document.createElement(tag);
    if (words) at.textContent = words;
    if (inside) inside.append(at);
    return at;
  };
  const box = make("div", "", el), line = make("div", "", box);
  box.className = "rs-export";
  const menu = (words, trait, name) => {
    const label = make("label", words + " ", line), select = make("select", "", label);
    select.setAttribute("aria-label", name || words);
    select.addEventListener("change", () => { model.set(trait, select.value); model.save_changes(); show(); });
    return [label, select];
  };
  const [, kinds] = menu("Export as", "kind"), [whose, plans] = menu("Plan", "plan", "Plan to export");
  const button = make("button", "Export", line), told = make("span", "", line), code = make("code", "", line);
  button.type = "button"; button.title = "written beside the notebook, and saved by the browser";
  told.setAttribute("role", "status");
  for (const each of [kinds, plans, button]) each.setAttribute("data-lm-suppress-shortcuts", "true");
  button.addEventListener("click", () => model.send({ export: kinds.value, plan: plans.value }));
  const fill = (select, options, value) => {
    select.replaceChildren(...options.map(([name, words]) => {
      const option = make("option", words);
      option.value = name;
      return option;
    }));
    select.value = value;
  };
  const show = () => {
    const one = model.get("kinds").some(([name, , needs]) => name === model.get("kind") && needs === "plan");
    fill(kinds, model.get("kinds"), model.get("kind"));
    fill(plans, model.get("plans").map(name => [name, name]), model.get("plan"));
    whose.hidden = !one || model.get("plans").length < 2;
    button.setAttribute("aria-disabled", String(model.get("busy")));  // one that is disabled loses the focus
    box.setAttribute("aria-busy", String(model.get("busy")));
    told.textContent = model.get("told"); told.className = model.get("refused") ? "rs-refused" : "";
    code.textContent = model.get("python");
  };
  for (const name of ["kinds", "kind", "plans", "plan", "busy", "told", "refused", "python"])
    model.on("change:" + name, show);
  model.on("msg:custom", (message, buffers) => {
    const link = make("a", "save again"), old = line.querySelector("a");
    link.href = URL.createObjectURL(new Blob(buffers, { type: message.type }));
    link.download = message.file;
    if (old) { URL.revokeObjectURL(old.href); old.remove(); }
    line.append(link);
    link.click();
  });
  show();
}
export default { render };
"""

_CSS = """
.rs-export{margin:6px 0 2px;color:var(--jp-ui-font-color1,inherit);font-size:var(--jp-widgets-font-size,13px)}
.rs-export>div{display:flex;flex-wrap:wrap;gap:4px 12px;align-items:center}
.rs-export select,.rs-export button{font:inherit;min-height:28px;color:var(--jp-ui-font-color1,inherit);
 background:var(--jp-layout-color2,transparent);border:1px solid var(--jp-border-color1,#8a9099);border-radius:3px;
 padding:2px 8px}
.rs-export button{padding:2px 14px;cursor:pointer}.rs-export button[aria-disabled=true]{opacity:.6;cursor:default}
.rs-export select:focus-visible,.rs-export button:focus-visible,.rs-export a:focus-visible{
 outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:2px}
.rs-export label[hidden]{display:none}
.rs-export a{color:inherit;text-decoration:underline}
.rs-export span{line-height:1.4}.rs-export .rs-refused{border-left:4px solid #d9480f;padding:2px 10px}
.rs-export code{background:none;color:inherit;white-space:pre-wrap;
 overflow-wrap:anywhere;font-size:12px}
"""


class ExportControl(anywidget.AnyWidget):
    """A menu of kinds, a button, and the Python that does the same.

    Args:
        of: the widget it exports: it has ``exportable()`` and ``export(path)``.
        kinds: those offered, names of `export_kinds.KINDS`.
        plans: names of its plans, where it has several: files that hold one ask for which.

    Attributes:
        last: the file written last, or None.
    """

    _esm = _ESM
    _css = _CSS
    kinds = traitlets.List(traitlets.List(traitlets.Unicode()), help="each kind's name, label and need").tag(sync=True)
    kind = traitlets.Unicode("html").tag(sync=True)
    plans = traitlets.List(traitlets.Unicode()).tag(sync=True)
    plan = traitlets.Unicode("").tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    told = traitlets.Unicode("").tag(sync=True)
    refused = traitlets.Bool(False).tag(sync=True)
    python = traitlets.Unicode("").tag(sync=True)

    def __init__(self, of: Any, name: str, kinds: Sequence[str] = tuple(KINDS), plans: Sequence[str] = ()) -> None:
        self.of, self.name = of, name
        self.last: Path | None = None
        self._working: threading.Thread | None = None
        labels = [[kind, f".{kind}, {KINDS[kind].about}", KINDS[kind].needs] for kind in kinds]
        super().__init__(kinds=labels, kind=kinds[0], plans=list(plans), plan=plans[0] if plans else "")
        self.observe(self._tell_python, names=["kind", "plans", "plan"])
        self.on_msg(lambda _, message, __: self.press(message.get("export"), message.get("plan")))
        self._tell_python()

    def press(self, kind: Any = None, plan: Any = None) -> None:
        """What the button does: writes the file in a thread and hands it to the browser."""
        if self._working is not None and self._working.is_alive():
            return
        known = [name for name, *_ in self.kinds]
        self.kind = kind if kind in known else self.kind
        self.plan = plan if plan in self.plans else self.plan
        self.busy, self.refused, self.told = True, False, "Writing …"
        self._working = threading.Thread(target=self._write, name="recshard-export", daemon=True)
        self._working.start()

    def arrange(self, names: Mapping[str, str]) -> None:
        """Names of the plans, by key, where they change."""
        self.plans = list(names.values())

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until the file is written.

        Raises:
            TimeoutError: it is not.
        """
        if self._working is not None:
            self._working.join(timeout_s)
            if self._working.is_alive():
                raise TimeoutError(f"the export is not there after {timeout_s} s")

    def _write(self) -> None:
        try:
            options = Options(plan=self.plan if self._of_one_plan else "")
            data = KINDS[self.kind].write(self.of.exportable(), options)
            path = self._free(Path(f"{self._stem}.{self.kind}"))
            path.write_bytes(data)
            self.last = path.resolve()
            self.told = f"Written: {path.name} ({bytes_text(len(data))}), into {self.last.parent}."
            self._tell_python()
            self.send({"file": path.name, "type": _MIME.get(self.kind, "application/octet-stream")}, [data])
        except Exception as error:
            self.refused, self.told = True, f"Nothing was written. {reason(error)}"
        finally:
            self.busy = False

    def _free(self, path: Path) -> Path:
        """The path, or one beside it: a file that another hand put there is not written over."""
        number, free = 1, path
        while free.exists() and free.resolve() != self.last:
            number += 1
            free = path.with_stem(f"{path.stem}_{number}")
        return free

    @property
    def _stem(self) -> str:
        return stem_of(self.plan) if self._of_one_plan else self.name

    @property
    def _of_one_plan(self) -> bool:
        """Whether the file holds one plan of several."""
        return KINDS[self.kind].needs == "plan" and len(self.plans) > 1

    def _tell_python(self, _: Any = None) -> None:
        if self.plans and self.plan not in self.plans:
            self.plan = self.plans[0]
        which = f", plan={json.dumps(self.plan, ensure_ascii=False)}" if self._of_one_plan else ""
        written = (
            self.last is not None and self.last.suffix == f".{self.kind}" and self.last.stem.startswith(self._stem)
        )
        file = self.last.name if written and self.last is not None else f"{self._stem}.{self.kind}"
        self.python = f'{_called(self.of)}.export("{file}"{which})'


class Exports:
    """What a widget of the lab is that can be exported."""

    def exportable(self) -> Exportable:
        """What there is to export, as it stands now."""
        raise NotImplementedError

    def export(self, path: str | Path, **options: Any) -> Path:
        """Writes what the widget shows as the file that the name asks for; see `recshard_lab.lab.export`.

        Args:
            path: ``.html``, ``.svg``, ``.png``, ``.json``, ``.py``, ``.sh``, ``.zip``, or a folder.
            options: ``plan``, ``plotly``, ``theme``, ``scale``, ``model``, ``title``, ``python``.

        Returns:
            The path written.

        Raises:
            ValueError: a kind of file that cannot hold it.
        """
        from recshard_lab.lab.exporting.exporting import export

        return export(self, path, **options)


class ExportsComparison(Exports):
    """A widget that shows a `PlanComparison`, ``comparison``, and its Python, ``python_of_all``."""

    def exportable(self: Any) -> Exportable:
        """All plans side by side."""
        found: PlanComparison = self.comparison
        return found.exportable(self.python_of_all)


def _called(widget: Any) -> str:
    """The variable that holds the widget in the notebook, or "widget"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(shell, "user_ns", {})
    return next((n for n, value in list(names.items()) if value is widget and not n.startswith("_")), "widget")
