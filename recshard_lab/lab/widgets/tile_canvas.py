"""TileCanvas: a table on which rectangles are drawn by hand, each on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from recshard_lab.lab.widgets.hatching import HATCHED

_ESM = (
    HATCHED
    + """
function render({ model, el }) {
  const ns = "http://www.w3.org/2000/svg", WIDE = 420, HIGH = 300, L = 50, T = 22;
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${L + WIDE + 10} ${T + HIGH + 10}`); svg.setAttribute("width", L + WIDE + 10);
  svg.setAttribute("height", T + HIGH + 10); svg.classList.add("rs-tile-canvas");
  svg.setAttribute("role", "group"); el.append(svg);
  const help = document.createElement("div"); help.className = "rs-tile-help";
  help.textContent = "Draw with the mouse. Keys: arrows go from piece to piece, Shift and an arrow moves the lower or "
    + "right edge, H and V cut in two, a digit or Enter (the rank to draw as) gives it to a rank, "
    + "Delete removes it, Ctrl+Z takes back the last change.";
  el.append(help);
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
  const seen = (tiles, i) => {  // the largest part of a piece on which no later piece lies
    const cut = (left, [, ...over]) => left.flatMap(part => without(part, over));
    const parts = tiles.slice(i + 1).reduce(cut, [tiles[i]]);
    const area = ([, r0, r1, c0, c1]) => (r1 - r0) * (c1 - c0);
    return parts.length ? parts.reduce((a, b) => area(b) > area(a) ? b : a).slice(1) : null;
  };
  const set = tiles => { model.set("tiles", tiles); model.save_changes(); };

  // ---- the mouse
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

  // ---- the keys
  const ways = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
  const middle = ([, r0, r1, c0, c1]) => [(Y(r0) + Y(r1)) / 2, (X(c0) + X(c1)) / 2];
  const beside = (i, [down, right]) => {
    const tiles = model.get("tiles"), [y, x] = middle(tiles[i]); let best = i, least = Infinity;
    tiles.forEach((tile, j) => {
      const [dy, dx] = [middle(tile)[0] - y, middle(tile)[1] - x], along = dy * down + dx * right;
      const cost = along + 2 * Math.abs(dy * right) + 2 * Math.abs(dx * down);
      if (j !== i && along > 1 && cost < least) { best = j; least = cost; } });
    return best;
  };
  const stretched = (i, [down, right]) => {  // the lower or the right edge moves, and what touches it with it
    const tiles = model.get("tiles"), edge = down ? 2 : 4, near = edge - 1, other = down ? [3, 4] : [1, 2];
    const step = model.get(down ? "row_step" : "col_step") * (down + right), mine = [...tiles[i]];
    const from = mine[edge], to = Math.min(down ? rows() : cols(), Math.max(mine[near] + 1, from + step));
    mine[edge] = to; if (to === from) return null;
    const strip = down ? [from, to, mine[3], mine[4]] : [mine[1], mine[2], from, to], made = [];
    tiles.forEach((tile, j) => {
      const follows = tile[near] === from && tile[other[0]] >= mine[other[0]] && tile[other[1]] <= mine[other[1]];
      if (j === i) { chosen = made.length; made.push(mine); }
      else if (!model.get("carves")) made.push(tile);
      else if (to > from) made.push(...without(tile, strip));
      else made.push(follows ? tile.map((n, k) => k === near ? to : n) : tile); });
    return made;
  };
  const cut = (i, edge) => {
    const tiles = model.get("tiles").map(tile => [...tile]), [low, high] = [tiles[i][edge - 1], tiles[i][edge]];
    if (high - low < 2) return null;
    const step = model.get(edge === 2 ? "row_step" : "col_step");
    const half = Math.min(high - 1, Math.max(low + 1, low + Math.round((high - low) / 2 / step) * step));
    const second = [...tiles[i]]; second[0] = model.get("rank"); second[edge - 1] = half; tiles[i][edge] = half;
    tiles.splice(i + 1, 0, second); chosen = i + 1; return tiles;
  };
  svg.addEventListener("keydown", event => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
      event.preventDefault(); event.stopPropagation(); model.send({ undo: true }); return;
    }
    const hit = event.target.closest("[data-tile]"); if (!hit || event.ctrlKey || event.metaKey || event.altKey) return;
    const i = Number(hit.dataset.tile), way = ways[event.key], key = event.key.toLowerCase();
    let tiles = model.get("tiles").map(tile => [...tile]);
    chosen = i;
    if (way && !event.shiftKey) { chosen = beside(i, way); tiles = null; }
    else if (way) tiles = stretched(i, way);
    else if (key === "h" || key === "v") tiles = cut(i, key === "h" ? 2 : 4);
    else if (key === "delete" || key === "backspace") { tiles.splice(i, 1); chosen = Math.min(i, tiles.length - 1); }
    else if (key === "enter") tiles[i][0] = model.get("rank");
    else if (/^[0-9]$/.test(key) && Number(key) < model.get("world_size")) tiles[i][0] = Number(key);
    else return;
    event.preventDefault(); event.stopPropagation();
    tiles ? set(tiles) : draw();
  });

  // ---- the picture
  const draw = () => {
    const focused = svg.contains(document.activeElement), tiles = model.get("tiles"), told = model.get("told");
    svg.replaceChildren(); preview = null; chosen = Math.min(chosen, tiles.length - 1);
    const fill = hatched(svg);
    make("rect", { x: L, y: T, width: WIDE, height: HIGH, fill: "none", stroke: "currentColor" });
    text(L, T - 8, "column 0"); text(L + WIDE, T - 8, number(cols()), { "text-anchor": "end" });
    text(L - 5, T + 10, "row 0", { "text-anchor": "end" });
    text(L - 5, T + HIGH, number(rows()), { "text-anchor": "end" });
    const list = tiles.length ? { role: "listbox", "aria-label": `pieces of table ${model.get("table")}` } : {};
    const all = make("g", list);
    tiles.forEach(([rank, r0, r1, c0, c1], i) => {
      const label = `rank ${rank}, rows ${number(r0)} to ${number(r1)}, columns ${c0} to ${c1}`;
      const box = { x: X(c0), y: Y(r0), width: X(c1) - X(c0), height: Y(r1) - Y(r0) };
      const [size, ...more] = (told[i] || "").split("\\n");
      const group = make("g", { "data-tile": i, tabindex: i === Math.max(0, chosen) ? 0 : -1, role: "option",
        "aria-selected": i === chosen, "aria-label": [label, size, ...more].filter(Boolean).join(". ") }, all);
      make("rect", { ...box, fill: fill(rank), stroke: INK, "stroke-width": i === chosen ? 3 : 1 }, group);
      make("title", {}, group).textContent = told[i] ? `${label}\\n${told[i]}` : label;
      const free = seen(tiles, i), [f0, f1, g0, g1] = free || [0, 0, 0, 0];  // where no later piece lies on it
      const at = { x: X(g0), y: Y(f0), width: X(g1) - X(g0), height: Y(f1) - Y(f0) };
      const words = [`rank ${rank}`, size].filter(line => line && at.width > 6.2 * line.length + 8);
      if (!words.length && at.width > 12) words.push(String(rank));
      if (at.height < 32) words.splice(1);
      const first = at.y + at.height / 2 + 4 - 7 * (words.length - 1);
      if (at.height > 13) words.forEach((line, k) => text(at.x + at.width / 2, first + 15 * k, line,
        { fill: INK, "text-anchor": "middle", stroke: fill.plain(rank), class: "rs-halo" }, group));
      for (const [name, inset] of [["rs-ring", 3], ["rs-ring rs-ring-dark", 6]])
        make("rect", { x: box.x + inset, y: box.y + inset, width: Math.max(1, box.width - 2 * inset),
          height: Math.max(1, box.height - 2 * inset), class: name }, group); });
    const fault = model.get("fault");
    if (fault.length) {
      const [r0, r1, c0, c1] = fault;
      make("rect", { x: X(c0), y: Y(r0), width: Math.max(3, X(c1) - X(c0)), height: Math.max(3, Y(r1) - Y(r0)),
        fill: fill("fault"), stroke: WARNING, "stroke-width": 2, "pointer-events": "none" });
    }
    const next = svg.querySelector(`[data-tile="${Math.max(0, chosen)}"]`);
    if (focused && next) next.focus({ preventScroll: true });
  };
  for (const key of ["tiles", "rows", "cols", "fault", "table", "told"]) model.on("change:" + key, draw);
  draw();
}
export default { render };
"""
)

_CSS = """
.rs-tile-canvas{color:var(--jp-ui-font-color1,inherit);font-family:var(--jp-ui-font-family,system-ui);
 touch-action:none;user-select:none;max-width:100%;height:auto;cursor:crosshair}
.rs-tile-canvas g{outline:none}
.rs-tile-canvas .rs-ring{display:none;fill:none;stroke:#fff;stroke-width:3;pointer-events:none}
.rs-tile-canvas .rs-ring-dark{stroke:#14181d}
.rs-tile-canvas g:focus-visible .rs-ring{display:inline}
.rs-tile-canvas .rs-halo{paint-order:stroke;stroke-width:4;stroke-linejoin:round}
.rs-tile-help{max-width:480px;font-size:12px;line-height:1.4;color:var(--jp-ui-font-color1,inherit)}
"""


class TileCanvas(anywidget.AnyWidget):
    """Draw with the pointer or by keys, which are written under it.

    Args:
        table: its name.
        rows, cols: its size, E and D.
        tiles: pieces ``[rank, r0, r1, c0, c1]``, half open.
        world_size: ranks W.
        row_step, col_step: the grid that drawing snaps to, and how far a key moves an edge.

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
    told = traitlets.List(traitlets.Unicode(), help="of each piece its size and, in further lines, its tooltip").tag(
        sync=True
    )
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
