import { hatched, number, rankFill, SVG, svgElement } from "./surface.js";

const WIDTH = 250, HIGH = 190, TOP = 20, LEFT = 6, WIDE = 150, HEIGHT = HIGH + 46;

// The ends with line i at a row, at most as far as its neighbours and the table's edges.
export function moved(ends, i, row, rows) {
  const low = i ? ends[i - 1] : 0, high = i + 1 < ends.length ? ends[i + 1] : rows;
  return ends.map((end, j) => (j === i ? Math.min(high, Math.max(low, Math.round(row))) : end));
}

// The row that a key moves a line to: 1% of the rows, 10% by page, 0.1% with Shift. undefined for another key.
export function rowOfKey(key, here, rows, shift) {
  const one = Math.max(1, Math.round(rows * (shift ? 0.001 : 0.01)));
  return { ArrowDown: here + one, ArrowUp: here - one, PageDown: here + 10 * one, PageUp: here - 10 * one,
    Home: 0, End: rows }[key];
}

function render({ model, el }) {
  const svg = document.createElementNS(SVG, "svg"), look = model.get("look");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`); svg.setAttribute("width", WIDTH);
  svg.setAttribute("height", HEIGHT); svg.setAttribute("role", "group"); svg.classList.add("rs-split-lines");
  el.append(svg);
  const make = (name, attributes, parent = svg) => svgElement(name, attributes, parent);
  const title = make("text", { x: LEFT, y: 12, "font-size": 11, fill: "currentColor" });
  const fill = hatched(svg, look);
  const hint = make("text", { x: LEFT, y: TOP + HIGH + 20, "font-size": 11, fill: "currentColor" });
  let shapes = [], lines = [], held = -1, pending = false;
  const rows = () => model.get("rows"), y = row => TOP + HIGH * row / rows();
  const move = (i, row) => {
    const ends = moved(model.get("ends"), i, row, rows());
    if (ends[i] === model.get("ends")[i]) return;
    model.set("ends", ends); draw();
    if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; model.save_changes(); }); }
  };
  const build = () => {
    for (const node of [...shapes.flat(), ...lines]) node.remove();
    const ends = model.get("ends");
    shapes = [...ends, rows()].map((_, i) => [
      make("rect", { x: LEFT, width: WIDE, fill: fill(i), stroke: look.ink, "stroke-width": 0.6 }),
      make("text", { x: LEFT + 8, "font-size": 11, fill: look.ink, stroke: rankFill(i, look).fill, class: "rs-halo" })]);
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
        const at = svg.getBoundingClientRect();
        move(i, rows() * ((event.clientY - at.top) * HEIGHT / at.height - TOP) / HIGH); });
      group.addEventListener("pointerup", () => { held = -1; model.save_changes(); });
      group.addEventListener("keydown", event => {
        const to = rowOfKey(event.key, model.get("ends")[i], rows(), event.shiftKey);
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
