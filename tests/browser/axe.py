"""What is hard to read or to reach on a page: axe-core's findings, and the contrast of words inside SVG.

axe-core (the copy inside the package axe-playwright-python) reads everything but words in pictures: their colour is
``fill``, and what lies behind them is a shape drawn earlier. Those are measured here, by the same formula (WCAG 2.2,
success criterion 1.4.3: relative luminances, 4.5 to 1).
"""

from __future__ import annotations

from typing import Any

GRAVE = ("serious", "critical")
LEAST_CONTRAST = 4.5

# JupyterLab's body has no height and hides what overflows, so that axe-core takes every word on the page for clipped
# away, and reads no contrast at all; all that is seen lies in an absolute child, which a height leaves as it is.
_BODY_HAS_A_HEIGHT = "() => { document.body.style.height = '100vh'; }"

_SVG_TEXT = """
selector => {
  const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const over = ([r, g, b], alpha, under) => [r, g, b].map((c, i) => c * alpha + under[i] * (1 - alpha));
  const luminance = colour => { const [r, g, b] = colour.map(c => { c /= 255;
    return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; });
    return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + .05) / (y + .05); };
  const seen = node => { let all = 1;
    for (let at = node; at && at.nodeType === 1; at = at.parentNode) all *= Number(getComputedStyle(at).opacity);
    return all; };
  const paper = node => { const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (r !== undefined && a > 0) { layers.push([[r, g, b], a]); if (a === 1) break; } }
    return layers.reverse().reduce((under, [colour, a]) => over(colour, a, under), [255, 255, 255]); };
  const paint = (node, svg) => { const style = getComputedStyle(node), found = style.fill;
    if (found === "none") return null;
    const alpha = Number(style.fillOpacity) * seen(node), link = found.match(/url\\("?#([^")]+)/);
    if (link) { const base = document.getElementById(link[1]).querySelector("rect");
      return base && [numbers(getComputedStyle(base).fill), alpha]; }
    const [r, g, b, a = 1] = numbers(found); return [[r, g, b], a * alpha]; };
  const poor = [];
  for (const svg of document.querySelectorAll(`${selector} svg`)) {
    if (!svg.getClientRects().length) continue;
    const shapes = [];
    for (const node of svg.querySelectorAll("rect, path, circle, polygon, text")) {
      if (node.closest("defs, pattern")) continue;
      if (node.tagName !== "text") { shapes.push(node); continue; }
      const box = node.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
      if (!node.textContent.trim() || !box.width) continue;
      let behind = paper(svg);
      for (const shape of shapes) {
        const at = shape.getBoundingClientRect();
        if (at.x > x || at.right < x || at.y > y || at.bottom < y) continue;
        const here = new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse());
        if (!shape.isPointInFill(here)) continue;
        const painted = paint(shape, svg); if (painted) behind = over(painted[0], painted[1], behind); }
      const [colour, alpha] = paint(node, svg), found = ratio(over(colour, alpha, behind), behind);
      if (found < %LEAST%) poor.push(`"${node.textContent}" at ${found.toFixed(2)} to 1`); }
  }
  return poor;
}
""".replace("%LEAST%", str(LEAST_CONTRAST))


def findings(page: Any, area: str) -> list[str]:
    """Serious and critical violations inside ``area``, one line each; rules about a whole page are not applied."""
    from axe_playwright_python.sync_playwright import Axe

    page.evaluate(_BODY_HAS_A_HEIGHT)
    found = Axe().run(page, context={"include": [[area]]}, options={"resultTypes": ["violations"]})
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:200]}"
        for rule in found.response["violations"]
        if rule["impact"] in GRAVE
        for node in rule["nodes"]
    ]


def faint_words(page: Any, area: str) -> list[str]:
    """Words in SVG pictures inside ``area`` that stand out too little from what is behind them."""
    return [str(one) for one in page.evaluate(_SVG_TEXT, area)]
