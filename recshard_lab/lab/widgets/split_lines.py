"""Split lines: a table as a rectangle, cut into stripes of rows by lines that a reader drags or moves by keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import anywidget
import traitlets

from recshard_lab.lab.widgets.hatching import HATCHED

_ESM = (
    HATCHED
    + """
function render({ model, el }) {
  const ns = "http://www.w3.org/2000/svg", W = 250, H = 190, TOP = 20, LEFT = 6, WIDE = 150;
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H + 46}`); svg.setAttribute("width", W); svg.setAttribute("height", H + 46);
  svg.setAttribute("role", "group"); svg.classList.add("rs-split-lines"); el.append(svg);
  const make = (name, attributes, parent = svg) => {
    const node = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node); return node;
  };
  const title = make("text", { x: LEFT, y: 12, "font-size": 11, fill: "currentColor" });
  const fill = hatched(svg);
  const hint = make("text", { x: LEFT, y: TOP + H + 20, "font-size": 11, fill: "currentColor" });
  let shapes = [], lines = [], held = -1, pending = false;
  const rows = () => model.get("rows");
  const number = n => n.toLocaleString("en-US");
  const y = row => TOP + H * row / rows();
  const move = (i, row) => {
    const ends = [...model.get("ends")], low = i ? ends[i - 1] : 0, high = i + 1 < ends.length ? ends[i + 1] : rows();
    ends[i] = Math.min(high, Math.max(low, Math.round(row)));
    if (ends[i] === model.get("ends")[i]) return;
    model.set("ends", ends); draw();
    if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; model.save_changes(); }); }
  };
  const build = () => {
    for (const node of [...shapes.flat(), ...lines]) node.remove();
    const ends = model.get("ends");
    shapes = [...ends, rows()].map((_, i) => [
      make("rect", { x: LEFT, width: WIDE, fill: fill(i), stroke: INK, "stroke-width": .6 }),
      make("text", { x: LEFT + 8, "font-size": 11, fill: INK, stroke: fill.plain(i), class: "rs-halo" })]);
    lines = ends.map((_, i) => {
      const group = make("g", { tabindex: 0, role: "slider", "aria-orientation": "vertical", "aria-valuemin": 0,
        "data-lm-suppress-shortcuts": "true" });
      make("rect", { x: LEFT - 4, width: WIDE + 92, height: 14, rx: 4, fill: "transparent" }, group);
      make("path", { stroke: "currentColor", "stroke-width": 3, fill: "none" }, group);
      make("circle", { cx: LEFT + WIDE + 8, r: 6, fill: "currentColor" }, group);
      make("text", { x: LEFT + WIDE + 20, "font-size": 11, fill: "currentColor" }, group);
      group.addEventListener("pointerdown", event => {
        held = i; group.setPointerCapture(event.pointerId); group.focus(); event.preventDefault(); });
      group.addEventListener("pointermove", event => {
        if (held !== i) return;
        const at = svg.getBoundingClientRect(), scale = (H + 46) / at.height;
        move(i, rows() * ((event.clientY - at.top) * scale - TOP) / H); });
      group.addEventListener("pointerup", () => { held = -1; model.save_changes(); });
      group.addEventListener("keydown", event => {
        const one = Math.max(1, Math.round(rows() * (event.shiftKey ? .001 : .01))), here = model.get("ends")[i];
        const to = { ArrowDown: here + one, ArrowUp: here - one, PageDown: here + 10 * one, PageUp: here - 10 * one,
          Home: 0, End: rows() }[event.key];
        if (to === undefined) return;
        event.preventDefault(); event.stopPropagation(); move(i, to); });
      return group; });
    draw();
  };
  const draw = () => {
    const ends = model.get("ends"), all = [0, ...ends, rows()], ranks = model.get("ranks");
    svg.setAttribute("aria-label", `split lines of table ${model.get("table")}`);
    title.textContent = `${model.get("table")}: ${number(rows())} rows`;
    hint.textContent = model.get("hint"); svg.classList.toggle("rs-unused", !!model.get("hint"));
    shapes.forEach(([box, words], i) => {
      const high = y(all[i + 1]) - y(all[i]);
      box.setAttribute("y", y(all[i])); box.setAttribute("height", Math.max(0, high));
      words.setAttribute("y", y(all[i]) + high / 2 + 4);
      words.textContent = high < 13 ? "" : `rank ${ranks[i]}: ${number(all[i + 1] - all[i])} rows`; });
    lines.forEach((group, i) => {
      const [area, path, circle, words] = group.children, at = y(ends[i]);
      area.setAttribute("y", at - 7); path.setAttribute("d", `M${LEFT} ${at}h${WIDE + 4}`);
      circle.setAttribute("cy", at); words.setAttribute("y", at + 4); words.textContent = number(ends[i]);
      group.setAttribute("aria-label", `rank ${ranks[i]} ends, rank ${ranks[i + 1]} begins at row`);
      group.setAttribute("aria-valuemax", rows()); group.setAttribute("aria-valuenow", ends[i]);
      group.setAttribute("aria-valuetext", `row ${number(ends[i])} of ${number(rows())}`); });
  };
  let table = model.get("table");
  const changed = () => {
    const same = model.get("table") === table && model.get("ends").length === lines.length;
    table = model.get("table");
    same ? draw() : build();
  };
  for (const key of ["ends", "rows", "table", "ranks", "hint"]) model.on("change:" + key, changed);
  build();
}
export default { render };
"""
)

_CSS = """
.rs-split-lines{color:var(--jp-ui-font-color1,inherit);font-family:var(--jp-ui-font-family,system-ui);
 touch-action:none;user-select:none;max-width:100%}
.rs-split-lines .rs-halo{paint-order:stroke;stroke-width:4;stroke-linejoin:round}
.rs-split-lines.rs-unused rect[fill^=url],.rs-split-lines.rs-unused rect[fill^='#']{opacity:.25}
.rs-split-lines.rs-unused .rs-halo{display:none}
.rs-split-lines [role=slider]{cursor:ns-resize;outline:none}
.rs-split-lines [role=slider]:focus-visible rect{stroke:var(--jp-brand-color1,#1976d2);stroke-width:2}
.rs-split-lines [role=slider]:focus-visible path{stroke-width:5}
.rs-split-lines [role=slider]:focus-visible circle{fill:var(--jp-brand-color1,#1976d2)}
"""


class SplitLines(anywidget.AnyWidget):
    """Where one table is cut into stripes of rows. Arrow keys move a line by 1% of the rows (with shift 0.1%).

    Args:
        table: its name.
        rows: how many it has, E.
        ends: where the lines are, ascending, W - 1 of them for W stripes.
        ranks: of the stripes, W.

    Attributes:
        hint: if not empty, the table is not cut by these lines: the stripes are grey and the hint is below them.

    Raises:
        ValueError: lines that do not ascend from 0 to `rows`, or not one fewer than ranks.

    >>> lines = SplitLines("movies", 100, [40], [0, 1])
    >>> lines.ends = [250]
    Traceback (most recent call last):
    ...
    ValueError: split lines must ascend from 0 to 100, got [250]
    """

    _esm = _ESM
    _css = _CSS
    table = traitlets.Unicode().tag(sync=True)
    rows = traitlets.Int(1).tag(sync=True)
    ends = traitlets.List(traitlets.Int()).tag(sync=True)
    ranks = traitlets.List(traitlets.Int()).tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)

    def __init__(self, table: str, rows: int, ends: Sequence[int], ranks: Sequence[int], **layout: Any) -> None:
        self._check(rows, ends, ranks)
        super().__init__(table=table, rows=rows, ends=list(ends), ranks=list(ranks), **layout)

    def show(self, table: str, rows: int, ends: Sequence[int], ranks: Sequence[int]) -> None:
        """Shows another table. The page gets everything in one message, so that no key moves a line in between."""
        self._check(rows, ends, ranks)
        with self.hold_sync(), self.hold_trait_notifications():
            self.table, self.rows, self.ranks, self.ends = table, rows, list(ranks), list(ends)

    @staticmethod
    def _check(rows: int, ends: Sequence[int], ranks: Sequence[int]) -> None:
        steps = [0, *ends, rows]
        if any(a > b for a, b in pairwise(steps)):
            raise ValueError(f"split lines must ascend from 0 to {rows}, got {list(ends)}")
        if len(ends) + 1 != len(ranks):
            raise ValueError(f"{len(ends)} lines cut {len(ends) + 1} stripes, got {len(ranks)} ranks")

    @traitlets.validate("ends")
    def _ascending(self, proposal: Any) -> Any:
        self._check(self.rows, proposal["value"], self.ranks)
        return proposal["value"]
