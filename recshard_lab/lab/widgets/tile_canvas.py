"""TileCanvas: a table on which rectangles are drawn by hand, each on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

_ESM = """
function render({ model, el }) {
  const ns = "http://www.w3.org/2000/svg", WIDE = 420, HIGH = 300, L = 50, T = 22;
  const fills = ["#9cc4ee", "#f6bd83", "#9ad6ae", "#d3bdea", "#f1d774", "#8fd6d6", "#f0a9b8", "#c9ced6"];
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${L + WIDE + 10} ${T + HIGH + 10}`); svg.setAttribute("width", L + WIDE + 10);
  svg.setAttribute("height", T + HIGH + 10); svg.classList.add("rs-tile-canvas");
  svg.setAttribute("role", "group"); el.append(svg);
  const make = (name, attributes, parent = svg) => {
    const node = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node); return node;
  };
  const text = (x, y, words, extra = {}, parent = svg) => {
    const node = make("text", { x, y, "font-size": 11, fill: "currentColor", ...extra }, parent);
    node.textContent = words; return node;
  };
  const number = n => n.toLocaleString("en-US");
  const rows = () => model.get("rows"), cols = () => model.get("cols");
  const X = c => L + WIDE * c / cols(), Y = r => T + HIGH * r / rows();
  let start = null, preview = null, chosen = -1;
  const snapped = (value, step, end) => value > end - step / 2 ? end : Math.min(end, Math.round(value / step) * step);
  const at = event => {
    const box = svg.getBoundingClientRect(), scale = (L + WIDE + 10) / box.width;
    const x = ((event.clientX - box.left) * scale - L) / WIDE, y = ((event.clientY - box.top) * scale - T) / HIGH;
    return [snapped(Math.max(0, y) * rows(), model.get("row_step"), rows()),
            snapped(Math.max(0, x) * cols(), model.get("col_step"), cols())];
  };
  const between = ([r0, c0], [r1, c1]) => [Math.min(r0, r1), Math.max(r0, r1), Math.min(c0, c1), Math.max(c0, c1)];
  const without = ([rank, r0, r1, c0, c1], [a0, a1, b0, b1]) => {
    if (a0 >= r1 || a1 <= r0 || b0 >= c1 || b1 <= c0) return [[rank, r0, r1, c0, c1]];
    const [m0, m1] = [Math.max(r0, a0), Math.min(r1, a1)];
    return [[rank, r0, a0, c0, c1], [rank, a1, r1, c0, c1], [rank, m0, m1, c0, b0], [rank, m0, m1, b1, c1]]
      .filter(([, p0, p1, q0, q1]) => p0 < p1 && q0 < q1);
  };
  const set = tiles => { model.set("tiles", tiles); model.save_changes(); draw(); };
  svg.addEventListener("pointerdown", event => {
    start = at(event); svg.setPointerCapture(event.pointerId);
    event.preventDefault();
    const hit = event.target.closest("[data-tile]"); chosen = hit ? Number(hit.dataset.tile) : -1;
    if (hit) hit.focus({ preventScroll: true });
  });
  svg.addEventListener("pointermove", event => {
    if (!start) return;
    const [r0, r1, c0, c1] = between(start, at(event));
    const dashed = { fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": "5 3" };
    preview = preview || make("rect", dashed);
    for (const [key, value] of Object.entries({ x: X(c0), y: Y(r0), width: X(c1) - X(c0), height: Y(r1) - Y(r0) }))
      preview.setAttribute(key, value);
  });
  svg.addEventListener("pointerup", event => {
    if (!start) return;
    const drawn = between(start, at(event)); start = null; preview = preview && preview.remove() && null;
    if (drawn[0] === drawn[1] || drawn[2] === drawn[3]) return;
    const old = model.get("tiles");
    const kept = model.get("carves") ? old.flatMap(tile => without(tile, drawn)) : old;
    set([...kept, [model.get("rank"), ...drawn]]);
  });
  svg.addEventListener("keydown", event => {
    const hit = event.target.closest("[data-tile]"); if (!hit) return;
    const i = Number(hit.dataset.tile), tiles = model.get("tiles").map(tile => [...tile]);
    if (event.key === "Delete" || event.key === "Backspace") { tiles.splice(i, 1); chosen = -1; }
    else if (/^[0-9]$/.test(event.key) && Number(event.key) < model.get("world_size")) tiles[i][0] = Number(event.key);
    else return;
    event.preventDefault(); event.stopPropagation(); set(tiles);
    const next = svg.querySelector(`[data-tile="${i}"]`); if (next) next.focus({ preventScroll: true });
  });
  const draw = () => {
    svg.replaceChildren(); preview = null;
    svg.setAttribute("aria-label", `pieces of table ${model.get("table")}`);
    const hatched = { id: "rs-hole", width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    const pattern = make("pattern", hatched, make("defs", {}));
    make("path", { d: "M-2 2L2 -2M0 8L8 0M6 10L10 6", stroke: "#d9480f", "stroke-width": 2 }, pattern);
    make("rect", { x: L, y: T, width: WIDE, height: HIGH, fill: "none", stroke: "currentColor" });
    text(L, T - 8, "column 0"); text(L + WIDE, T - 8, number(cols()), { "text-anchor": "end" });
    text(L - 5, T + 10, "row 0", { "text-anchor": "end" });
    text(L - 5, T + HIGH, number(rows()), { "text-anchor": "end" });
    model.get("tiles").forEach(([rank, r0, r1, c0, c1], i) => {
      const label = `rank ${rank}, rows ${number(r0)} to ${number(r1)}, columns ${c0} to ${c1}`;
      const group = make("g", { "data-tile": i, tabindex: 0, role: "button", "aria-label": label,
        "data-lm-suppress-shortcuts": "true" });
      make("rect", { x: X(c0), y: Y(r0), width: X(c1) - X(c0), height: Y(r1) - Y(r0), fill: fills[rank % fills.length],
        "fill-opacity": .9, stroke: "#14181d" }, group);
      make("title", {}, group).textContent = label;
      const wide = X(c1) - X(c0), high = Y(r1) - Y(r0), words = wide > 44 ? `rank ${rank}` : String(rank);
      if (wide > 12 && high > 13)
        text((X(c0) + X(c1)) / 2, (Y(r0) + Y(r1)) / 2 + 4, words, { fill: "#14181d", "text-anchor": "middle" }, group);
      if (i === chosen) group.firstChild.setAttribute("stroke-width", 3);
    });
    const fault = model.get("fault");
    if (fault.length) {
      const [r0, r1, c0, c1] = fault;
      make("rect", { x: X(c0), y: Y(r0), width: Math.max(3, X(c1) - X(c0)), height: Math.max(3, Y(r1) - Y(r0)),
        fill: "url(#rs-hole)", stroke: "#d9480f", "stroke-width": 2, "pointer-events": "none" });
    }
  };
  for (const key of ["tiles", "rows", "cols", "fault", "table"]) model.on("change:" + key, draw);
  draw();
}
export default { render };
"""

_CSS = """
.rs-tile-canvas{color:var(--jp-ui-font-color1,inherit);font-family:var(--jp-ui-font-family,system-ui);
 touch-action:none;user-select:none;max-width:100%;height:auto;cursor:crosshair}
.rs-tile-canvas g{outline:none}
.rs-tile-canvas g:focus-visible rect{stroke:var(--jp-brand-color1,#1976d2);stroke-width:4}
"""


class TileCanvas(anywidget.AnyWidget):
    """Draw with the pointer; Tab reaches a piece, a digit gives it to a rank, Delete removes it.

    Args:
        table: its name.
        rows, cols: its size, E and D.
        tiles: pieces ``[rank, r0, r1, c0, c1]``, half open.
        world_size: ranks W.
        row_step, col_step: the grid that drawing snaps to.

    >>> TileCanvas("movies", 100, 8, [[0, 0, 100, 0, 8]], 2, 5, 4).tiles
    [[0, 0, 100, 0, 8]]
    """

    _esm = _ESM
    _css = _CSS
    table = traitlets.Unicode().tag(sync=True)
    rows = traitlets.Int(1).tag(sync=True)
    cols = traitlets.Int(1).tag(sync=True)
    row_step = traitlets.Int(1).tag(sync=True)
    col_step = traitlets.Int(1).tag(sync=True)
    world_size = traitlets.Int(1).tag(sync=True)
    rank = traitlets.Int(0, help="whose pieces are drawn").tag(sync=True)
    carves = traitlets.Bool(True, help="whether a drawn piece is cut out of those under it").tag(sync=True)
    tiles = traitlets.List(traitlets.List(traitlets.Int(), minlen=5, maxlen=5)).tag(sync=True)
    fault = traitlets.List(traitlets.Int(), help="r0, r1, c0, c1 of what is wrong; empty for nothing").tag(sync=True)

    def __init__(
        self,
        table: str,
        rows: int,
        cols: int,
        tiles: Sequence[Sequence[int]],
        world_size: int,
        row_step: int,
        col_step: int,
        **layout: Any,
    ) -> None:
        given = {"table": table, "rows": rows, "cols": cols, "world_size": world_size}
        steps = {"row_step": row_step, "col_step": col_step}
        super().__init__(tiles=[list(tile) for tile in tiles], **given, **steps, **layout)
