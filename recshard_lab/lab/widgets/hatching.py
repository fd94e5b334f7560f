"""Ranks on the surfaces that a reader draws on: a colour and a hatching each, so that neither is needed alone."""

from __future__ import annotations

import json

from recshard_lab.lab.draw.theme import HATCHES, LABEL_INK, SCHEMES, WARNING

_FILLS = [*[look.fill for look in SCHEMES.values()][:7], "#c9ced6"]
_STROKES = [strokes for _, strokes in HATCHES.values()]

HATCHED = (
    f"const FILLS = {json.dumps(_FILLS)}, STROKES = {json.dumps(_STROKES)}, INK = {json.dumps(LABEL_INK)}, "
    f"WARNING = {json.dumps(WARNING)};"
    + """
let HATCHINGS = 0;
// A function from a rank to the fill of its pieces. Hatchings are looked up page-wide, so each has its own name.
function hatched(svg) {
  const ns = "http://www.w3.org/2000/svg", uid = `rs-hatch-${Date.now().toString(36)}-${HATCHINGS++}`, known = {};
  const make = (name, attributes, parent) => {
    const node = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node); return node;
  };
  const defs = make("defs", {}, svg);
  const fill = rank => {
    const faulty = rank === "fault", place = faulty ? 0 : rank % FILLS.length;
    const strokes = faulty ? STROKES[4] : STROKES[(place + Math.floor(rank / FILLS.length)) % STROKES.length];
    if (!strokes) return FILLS[place];
    const id = `${uid}-${rank}`;
    if (!known[id]) {
      const tile = { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" };
      const pattern = known[id] = make("pattern", tile, defs);
      if (!faulty) make("rect", { width: 8, height: 8, fill: FILLS[place] }, pattern);
      make("path", { d: strokes, stroke: faulty ? WARNING : INK, "stroke-opacity": faulty ? 1 : .28,
        "stroke-width": faulty ? 2 : 1, fill: "none" }, pattern);
    }
    return `url(#${id})`;
  };
  fill.plain = rank => FILLS[rank % FILLS.length];  // behind words, so that no hatching strikes them through
  return fill;
}
"""
)
