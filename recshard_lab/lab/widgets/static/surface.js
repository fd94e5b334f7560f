// What the drawing surfaces share: SVG elements, numbers as text, and the fill of each rank.
export const SVG = "http://www.w3.org/2000/svg";

export const number = n => n.toLocaleString("en-US");

export function svgElement(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

// The plain colour and the hatching (path data, "" for none) of a rank. A second round of colours changes the hatching.
export function rankFill(rank, { fills, strokes }) {
  const place = rank % fills.length;
  return { fill: fills[place], hatching: strokes[(place + Math.floor(rank / fills.length)) % strokes.length] };
}

// Returns a function: rank, or "fault" -> the value of a `fill` attribute. Pattern ids are unique on the page.
export function hatched(svg, look) {
  const prefix = `rs-hatch-${Math.random().toString(36).slice(2)}`, patterns = {}, defs = svgElement("defs", {}, svg);
  return rank => {
    const isFault = rank === "fault";
    const { fill, hatching } = isFault ? { fill: null, hatching: look.strokes[4] } : rankFill(rank, look);
    if (!hatching) return fill;
    const id = `${prefix}-${rank}`;
    if (!patterns[id]) {
      const pattern = svgElement("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, defs);
      patterns[id] = pattern;
      if (fill) svgElement("rect", { width: 8, height: 8, fill }, pattern);
      svgElement("path", { d: hatching, stroke: isFault ? look.warning : look.ink, "stroke-opacity": isFault ? 1 : 0.28,
        "stroke-width": isFault ? 2 : 1, fill: "none" }, pattern);
    }
    return `url(#${id})`;
  };
}
