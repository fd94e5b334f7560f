"""The parts of every report page: the style sheet, and plotly.js packed so that one file works offline.

plotly.js is 4.8 MB of text. Gzipped and in base64 it takes 1.96 MB of the page, and the browser unpacks it
(``DecompressionStream``: Chrome 80, Firefox 113, Safari 16.4 and later). Without it, without scripts and in print, the
page shows still pictures.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from functools import lru_cache
from hashlib import sha256
from html import escape

from recshard_lab.lab.draw.theme import MIDDLE_INK

PLOTLY = ("embed", "cdn", "none")  # source of a page's interactive pictures

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59626c;--paper:#fff;--line:#d5dae0;--sheet:#f6f8fa}
@media screen and (prefers-color-scheme:dark){
:root{--ink:#e4e7ea;--soft:#a2abb5;--paper:#14171b;--line:#343b43;--sheet:#1c2127}}
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 20px 60px;max-width:980px;background:var(--paper);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.2;margin:0 0 6px}h2{font-size:19px;margin:40px 0 8px}
header p,.note{color:var(--soft);margin:0 0 8px}
p{margin:0 0 10px;max-width:70ch;overflow-wrap:anywhere}
nav ul{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;padding:0;margin:14px 0 0}
a{color:inherit}
figure{margin:14px 0;padding:10px;border:1px solid var(--line);border-radius:6px;min-width:0}
figcaption{font-weight:600;margin:0 0 6px;overflow-wrap:anywhere}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:0 14px}
.plot,.live .still{display:none}.live .plot{display:block}.plot p{color:var(--soft);margin:0}
.plot b,.caption b{color:var(--ink)}.caption{display:none;color:var(--soft)}.caption p{margin:0}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:8px 0}
th,td{padding:3px 14px 3px 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;white-space:nowrap}
.wraps th,.wraps td{white-space:normal}.wraps td:first-child{white-space:nowrap}
.wide{overflow-x:auto}
@media screen and (max-width:600px){.caption{display:block}.drawn svg{max-width:640px!important}
.drawn{background:linear-gradient(90deg,transparent,var(--paper) 60%) right/40px 100% no-repeat local,
linear-gradient(90deg,transparent,var(--line)) right/24px 100% no-repeat scroll}}
@media (max-width:600px){.wraps th,.wraps td,.wraps td:first-child{white-space:normal;overflow-wrap:anywhere;
padding-right:8px}}
pre{background:var(--sheet);padding:10px 12px;overflow-x:auto;font-size:12.5px;border-radius:6px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
.fold{border-bottom:1px solid var(--line);padding:6px 0}
.fold>summary{color:var(--ink);font-size:14px}
.bar{float:right;width:18%;height:10px;margin-top:6px;border:1px solid var(--line);border-radius:5px;overflow:hidden}
.bar i{display:block;height:100%;background:#5b94d6}
.fold .wide{padding:6px 0 4px 16px}
.pictures{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center;margin:14px 0 0;font-size:13px;color:var(--soft)}
.pictures[hidden]{display:none}
button{font:inherit;color:var(--ink);background:var(--sheet);border:1px solid var(--line);border-radius:6px;
padding:3px 10px;cursor:pointer}
a:focus-visible,button:focus-visible,summary:focus-visible{outline:2px solid #1f83d6;outline-offset:2px}
@media print{
body{max-width:none;padding:0;font-size:12px}nav,.pictures,.files{display:none}
.live .still{display:block}.plot,.live .plot{display:none}
figure{break-inside:avoid}h2{break-after:avoid}
details::details-content{content-visibility:visible;display:block}summary{list-style:none}
table{font-size:9px}th,td{white-space:normal;padding-right:8px}pre{white-space:pre-wrap}.wide,figure{overflow:visible}}
"""

# Draws each picture when it comes near the window, again where the reader's theme changes; still until then.
_SCRIPT = """
(async () => {
  const page = document.documentElement, bar = document.querySelector(".pictures");
  const button = bar.querySelector("button"), status = bar.querySelector("[role=status]");
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
  bar.hidden = false;
  const unpacked = async id => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), c => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const plots = [...document.querySelectorAll(".plot > div")];
  try {
    if (!window.Plotly && document.getElementById("plotly")) {
      const script = document.createElement("script");
      script.textContent = await unpacked("plotly");
      document.head.append(script);
    }
    if (!window.Plotly) throw new Error("plotly.js could not be loaded");
    const text = await unpacked("figures"), dark = matchMedia("(prefers-color-scheme: dark)");
    let figures;
    const themed = () => { figures = JSON.parse(text.replaceAll("@MIDDLE@", dark.matches ? "#ccd2d8" : "#3d454e")); };
    const draw = async at => {
      const { data, layout } = figures[at.id];
      const own = part => ({ ...part, ...(at.clientWidth < 560 ? part.meta?.narrow : {}) });
      const font = { ...layout.font, family: getComputedStyle(document.body).fontFamily };
      const made = { ...own(layout), font, autosize: true };
      await Plotly.react(at, data.map(own), made, { responsive: true, displaylogo: false });
      at.dataset.drawn = "true";
    };
    const near = new IntersectionObserver(seen => seen.forEach(each => {
      if (each.isIntersecting) { near.unobserve(each.target); draw(each.target); }
    }), { rootMargin: "600px" });
    const still = yes => {
      page.classList.toggle("live", !yes);
      button.setAttribute("aria-pressed", String(yes));
    };
    themed();
    dark.addEventListener("change", () => {
      themed();
      plots.filter(at => at.dataset.drawn).forEach(draw);
    });
    button.addEventListener("click", () => still(page.classList.contains("live")));
    still(false);
    plots.forEach(at => near.observe(at));
  } catch (error) {
    button.hidden = true;
    status.textContent = `Still pictures: this browser could not draw the interactive ones (${error.message}).`;
  }
})();
"""

_OFFLINE = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:\">"
)


def check_plotly(plotly: str) -> str:
    """One of `PLOTLY`.

    Raises:
        ValueError: something else.
    """
    if plotly not in PLOTLY:
        raise ValueError(
            f"plotly must be one of {', '.join(PLOTLY)}, got {plotly!r}. Fix: 'embed' (works offline, 2 MB "
            f"more), 'cdn' (loaded from the network), 'none' (still pictures only)"
        )
    return plotly


def packed(text: str) -> str:
    """Gzipped, in base64.

    >>> gzip.decompress(__import__("base64").b64decode(packed("ranks"))).decode()
    'ranks'
    """
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@lru_cache(1)
def _plotly_js() -> tuple[str, str, str]:
    """Version, text packed, and its hash for a ``<script integrity>``."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    text = get_plotlyjs()
    return get_plotlyjs_version(), packed(text), b64encode(sha256(text.encode()).digest()).decode()


def plotly_version() -> str:
    """Version of plotly.js in pages."""
    return _plotly_js()[0]


def cdn_address() -> str:
    """The address from which a page of ``plotly="cdn"`` loads plotly.js."""
    return f"https://cdn.plot.ly/plotly-{plotly_version()}.min.js"


def head_of(plotly: str) -> str:
    """The end of the page's ``<head>``: an offline page forbids all network requests."""
    if plotly != "cdn":
        return _OFFLINE
    integrity = f'integrity="sha256-{_plotly_js()[2]}" crossorigin="anonymous"'
    return f'<script defer src="{cdn_address()}" {integrity}></script>'


def controls_of(plotly: str) -> str:
    """The line under the page's title: a button for still pictures, and the source of the interactive ones."""
    if plotly == "none":
        return ""
    words = "Zoom and hover for details."
    if plotly == "cdn":
        words += f" They load plotly.js from {cdn_address()}. Without it, the page shows still pictures."
    return (
        '<div class="pictures" hidden><button type="button" aria-pressed="false">Still pictures</button>'
        f'<span role="status">{escape(words)}</span></div>'
    )


def scripts_of(plotly: str, figures: str) -> str:
    """The page's end: plotly.js and the figures, packed, and the script that draws them.

    Args:
        figures: JSON: id of a picture's element -> ``{data, layout}``.
    """
    if plotly == "none":
        return ""
    library = f'<script type="text/plain" id="plotly">{_plotly_js()[1]}</script>' if plotly == "embed" else ""
    kind = ' type="module"' if plotly == "cdn" else ""  # after plotly.js, which is deferred
    script = _SCRIPT.replace("@MIDDLE@", MIDDLE_INK)
    return f'{library}<script type="text/plain" id="figures">{packed(figures)}</script><script{kind}>{script}</script>'
