"""A slider over named steps with the browser's own range input.

ipywidgets' sliders have no accessible name and read out an index instead of a value ("27" for 40 GB); this one is a
labelled ``<input type="range">`` whose value text is the step's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

_ESM = """
function render({ model, el }) {
  const label = document.createElement("label"), name = document.createElement("span");
  const input = document.createElement("input"), output = document.createElement("output");
  input.type = "range"; input.min = 0; input.step = 1;
  label.className = "rs-step-slider"; label.append(name, input, output); el.append(label);
  const show = () => {
    const labels = model.get("labels"), index = model.get("index");
    name.textContent = model.get("description"); label.title = model.get("tooltip");
    input.max = labels.length - 1; input.value = index; output.textContent = labels[index];
    input.setAttribute("aria-label", model.get("description"));
    input.setAttribute("aria-valuetext", labels[index]);
  };
  input.addEventListener("input", () => { model.set("index", Number(input.value)); show(); model.save_changes(); });
  for (const key of ["index", "labels", "description", "tooltip"]) model.on("change:" + key, show);
  show();
}
export default { render };
"""

_CSS = """
.rs-step-slider{display:flex;align-items:center;gap:10px;min-height:28px;color:var(--jp-widgets-label-color,inherit);
 font-size:var(--jp-widgets-font-size,13px)}
.rs-step-slider span{flex:0 0 112px;white-space:nowrap}
.rs-step-slider input{flex:1 1 100px;min-width:90px;accent-color:var(--jp-brand-color1,#1976d2);cursor:pointer}
.rs-step-slider output{flex:0 0 76px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;
 font-variant-numeric:tabular-nums;font-weight:600}
"""


class StepSlider(anywidget.AnyWidget):
    """A slider that stands on one of several named steps; the arrow keys, Home and End move it.

    Args:
        description: the label.
        options: ``(name, value)`` of each step, in order.
        value: where it begins.
        tooltip: shown on hover.

    Raises:
        ValueError: a value that is no step.

    >>> slider = StepSlider("Ranks", [("1", 1), ("2", 2)], 2)
    >>> slider.index
    1
    """

    _esm = _ESM
    _css = _CSS
    description = traitlets.Unicode().tag(sync=True)
    tooltip = traitlets.Unicode().tag(sync=True)
    labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
    value = traitlets.Any()

    def __init__(
        self, description: str, options: Sequence[tuple[str, Any]], value: Any, tooltip: str = "", **layout: Any
    ) -> None:
        self.options = list(options)
        self._values = [step for _, step in self.options]
        at = self._at(value)
        names = [name for name, _ in self.options]
        super().__init__(description=description, tooltip=tooltip, labels=names, index=at, value=value, **layout)
        self.observe(self._index_moved, names="index")
        self.observe(self._value_moved, names="value")

    def _at(self, value: Any) -> int:
        if value not in self._values:
            raise ValueError(f"{value!r} is no step of this slider, which has {self._values}")
        return self._values.index(value)

    @traitlets.validate("value")
    def _known(self, proposal: Any) -> Any:
        self._at(proposal["value"])
        return proposal["value"]

    def _index_moved(self, change: Any) -> None:
        self.value = self._values[change["new"]]

    def _value_moved(self, change: Any) -> None:
        self.index = self._at(change["new"])
