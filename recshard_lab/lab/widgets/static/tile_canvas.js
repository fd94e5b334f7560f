import { hatched, number, rankFill, SVG, svgElement } from "./surface.js";
import { added, between, halved, neighbour, snapped, stretched, visible } from "./tiling.js";

const WIDE = 420, HIGH = 300, LEFT = 50, TOP = 22;
const DIRECTIONS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
const HELP = "Draw with the mouse. Keys: arrows select another shard. Shift and an arrow move the lower or right edge. "
  + "H and V split a shard in two. A digit, or Enter for the rank to draw as, assigns a rank. Delete removes the shard. "
  + "Ctrl+Z undoes the last change.";

function render({ model, el }) {
  const svg = document.createElementNS(SVG, "svg"), width = LEFT + WIDE + 10, height = TOP + HIGH + 10;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.setAttribute("width", width);
  svg.setAttribute("height", height); svg.classList.add("rs-tile-canvas"); svg.setAttribute("role", "group");
  const help = document.createElement("div");
  help.className = "rs-tile-help"; help.textContent = HELP;
  el.append(svg, help);
  const make = (name, attributes, parent = svg) => svgElement(name, attributes, parent);
  const text = (x, y, words, extra = {}, parent = svg) => {
    const node = make("text", { x, y, "font-size": 11, fill: "currentColor", ...extra }, parent);
    node.textContent = words;
    return node;
  };
  const rows = () => model.get("rows"), cols = () => model.get("cols");
  const X = c => LEFT + WIDE * c / cols(), Y = r => TOP + HIGH * r / rows();
  const middle = ([, r0, r1, c0, c1]) => [(Y(r0) + Y(r1)) / 2, (X(c0) + X(c1)) / 2];
  const set = tiles => { model.set("tiles", tiles); model.save_changes(); };
  let start = null, preview = null, chosen = -1;

  // ---- the mouse
  const corner = event => {
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const x = ((event.clientX - box.left) * scale - LEFT) / WIDE, y = ((event.clientY - box.top) * scale - TOP) / HIGH;
    return [snapped(Math.max(0, y) * rows(), model.get("row_step"), rows()),
            snapped(Math.max(0, x) * cols(), model.get("col_step"), cols())];
  };
  svg.addEventListener("pointerdown", event => {
    start = corner(event); svg.setPointerCapture(event.pointerId);
    event.preventDefault();
    const hit = event.target.closest("[data-tile]");
    chosen = hit ? Number(hit.dataset.tile) : -1;
    if (hit) hit.focus({ preventScroll: true });
  });
  svg.addEventListener("pointermove", event => {
    if (!start) return;
    const [r0, r1, c0, c1] = between(start, corner(event));
    preview ||= make("rect", { fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": "5 3" });
    for (const [key, value] of Object.entries({ x: X(c0), y: Y(r0), width: X(c1) - X(c0), height: Y(r1) - Y(r0) }))
      preview.setAttribute(key, value);
  });
  svg.addEventListener("pointerup", event => {
    if (!start) return;
    const drawn = between(start, corner(event));
    start = null; preview = preview && preview.remove() && null;
    if (drawn[0] < drawn[1] && drawn[2] < drawn[3])
      set(added(model.get("tiles"), model.get("rank"), drawn, model.get("overwrites")));
  });

  // ---- the keys
  svg.addEventListener("keydown", event => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
      event.preventDefault(); event.stopPropagation(); model.send({ undo: true });
      return;
    }
    const hit = event.target.closest("[data-tile]");
    if (!hit || event.ctrlKey || event.metaKey || event.altKey) return;
    const i = Number(hit.dataset.tile), direction = DIRECTIONS[event.key], key = event.key.toLowerCase();
    const steps = { rowStep: model.get("row_step"), colStep: model.get("col_step") };
    let tiles = model.get("tiles").map(tile => [...tile]);
    chosen = i;
    if (direction && !event.shiftKey) { chosen = neighbour(tiles, i, direction, middle); tiles = null; }
    else if (direction) {
      const size = { rows: rows(), cols: cols(), ...steps, overwrites: model.get("overwrites") };
      ({ tiles, chosen } = stretched(tiles, i, direction, size) || { tiles: null, chosen });
    } else if (key === "h" || key === "v") {
      const rank = model.get("rank");
      tiles = key === "h" ? halved(tiles, i, 2, steps.rowStep, rank) : halved(tiles, i, 4, steps.colStep, rank);
      if (tiles) chosen = i + 1;
    } else if (key === "delete" || key === "backspace") { tiles.splice(i, 1); chosen = Math.min(i, tiles.length - 1); }
    else if (key === "enter") tiles[i][0] = model.get("rank");
    else if (/^[0-9]$/.test(key) && Number(key) < model.get("world_size")) tiles[i][0] = Number(key);
    else return;
    event.preventDefault(); event.stopPropagation();
    tiles ? set(tiles) : draw();
  });

  // ---- the picture
  const draw = () => {
    const focused = svg.contains(document.activeElement), tiles = model.get("tiles"), look = model.get("look");
    svg.replaceChildren(); preview = null; chosen = Math.min(chosen, tiles.length - 1);
    const fill = hatched(svg, look);
    make("rect", { x: LEFT, y: TOP, width: WIDE, height: HIGH, fill: "none", stroke: "currentColor" });
    text(LEFT, TOP - 8, "column 0"); text(LEFT + WIDE, TOP - 8, number(cols()), { "text-anchor": "end" });
    text(LEFT - 5, TOP + 10, "row 0", { "text-anchor": "end" });
    text(LEFT - 5, TOP + HIGH, number(rows()), { "text-anchor": "end" });
    const list = tiles.length ? { role: "listbox", "aria-label": `shards of table ${model.get("table")}` } : {};
    const all = make("g", list);
    tiles.forEach(([rank, r0, r1, c0, c1], i) => {
      const label = `rank ${rank}, rows ${number(r0)} to ${number(r1)}, columns ${c0} to ${c1}`;
      const box = { x: X(c0), y: Y(r0), width: X(c1) - X(c0), height: Y(r1) - Y(r0) };
      const details = model.get("details")[i] || "", [size, ...more] = details.split("\n");
      const group = make("g", { "data-tile": i, tabindex: i === Math.max(0, chosen) ? 0 : -1, role: "option",
        "aria-selected": i === chosen, "aria-label": [label, size, ...more].filter(Boolean).join(". ") }, all);
      make("rect", { ...box, fill: fill(rank), stroke: look.ink, "stroke-width": i === chosen ? 3 : 1 }, group);
      make("title", {}, group).textContent = details ? `${label}\n${details}` : label;
      const [f0, f1, g0, g1] = visible(tiles, i) || [0, 0, 0, 0];
      const at = { x: X(g0), y: Y(f0), width: X(g1) - X(g0), height: Y(f1) - Y(f0) };
      const words = [`rank ${rank}`, size].filter(line => line && at.width > 6.2 * line.length + 8);
      if (!words.length && at.width > 12) words.push(String(rank));
      if (at.height < 32) words.splice(1);
      const first = at.y + at.height / 2 + 4 - 7 * (words.length - 1);
      if (at.height > 13) words.forEach((line, k) => text(at.x + at.width / 2, first + 15 * k, line, { fill: look.ink,
        "text-anchor": "middle", stroke: rankFill(rank, look).fill, class: "rs-halo" }, group));
      for (const [name, inset] of [["rs-ring", 3], ["rs-ring rs-ring-dark", 6]])
        make("rect", { x: box.x + inset, y: box.y + inset, width: Math.max(1, box.width - 2 * inset),
          height: Math.max(1, box.height - 2 * inset), class: name }, group);
    });
    const fault = model.get("fault");
    if (fault.length) {
      const [r0, r1, c0, c1] = fault;
      make("rect", { x: X(c0), y: Y(r0), width: Math.max(3, X(c1) - X(c0)), height: Math.max(3, Y(r1) - Y(r0)),
        fill: fill("fault"), stroke: look.warning, "stroke-width": 2, "pointer-events": "none" });
    }
    const next = svg.querySelector(`[data-tile="${Math.max(0, chosen)}"]`);
    if (focused && next) next.focus({ preventScroll: true });
  };
  for (const key of ["tiles", "rows", "cols", "fault", "table", "details"]) model.on("change:" + key, draw);
  draw();
}
export default { render };
