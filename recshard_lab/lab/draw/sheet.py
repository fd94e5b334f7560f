"""Several views as one picture, a column of them for each plan; and a picture as PNG."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.util import find_spec

from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import FONT
from recshard_lab.lab.draw.view import View

THEMES = {"light": ("#ffffff", "#1b1f24"), "dark": ("#16191d", "#e4e7ea")}  # paper, ink
GAP, HEAD = 24, 34
_DRAWN_IN = "'DejaVu Sans','Noto Sans','Segoe UI','Helvetica Neue',Arial,sans-serif"  # resvg knows no system-ui
_DRAW = (
    "import resvg_py, sys; svg = sys.stdin.buffer.read().decode(); "
    "sys.stdout.buffer.write(resvg_py.svg_to_bytes(svg_string=svg, zoom=%r))"
)
MOST_PIXELS = 60_000_000


def sheet(columns: Mapping[str, Sequence[View]], title: str, uid: str = "rs") -> Svg:
    """One picture of many: a heading and a column of views for each entry; views of one name stand in one row.

    Raises:
        ValueError: no view at all.

    >>> from recshard_lab.lab.draw.view import message_view
    >>> one = message_view("placement", "Placement", "the plan is empty")
    >>> sheet({"Your plan": [one]}, "Two plans").width
    640
    """
    columns = {heading: views for heading, views in columns.items() if views}
    if not columns:
        raise ValueError(f"{title}: there is no picture in it. Fix: .html")
    if len(columns) == 1 and len(next(iter(columns.values()))) == 1:
        return next(iter(columns.values()))[0].draw(uid)
    drawn = {
        heading: [(view.name, view.draw(f"{uid}-{c}-{i}")) for i, view in enumerate(views)]
        for c, (heading, views) in enumerate(columns.items())
    }
    rows: dict[tuple[str, int], float] = {}  # view's name, and the how-manieth of it -> height
    placed: list[tuple[int, tuple[str, int], Svg]] = []
    widths = []
    for c, pictures in enumerate(drawn.values()):
        widths.append(max(picture.width for _, picture in pictures))
        count: dict[str, int] = {}
        for name, picture in pictures:
            count[name] = count.get(name, 0) + 1
            rows[name, count[name]] = max(rows.get((name, count[name]), 0.0), picture.height)
            placed.append((c, (name, count[name]), picture))
    lefts = [sum(widths[:c]) + GAP * c for c in range(len(widths))]
    top = HEAD if len(columns) > 1 else 0
    tops, y = {}, float(top)
    for row, height in rows.items():
        tops[row], y = y, y + height + GAP
    whole = Svg(sum(widths) + GAP * (len(widths) - 1), y - GAP, title, "; ".join(columns), uid)
    for heading, left, width in zip(drawn, lefts, widths, strict=True):
        if top:
            whole.text(left + 14, 22, fit([heading], width - 28, 15), size=16, bold=True)
    for c, row, picture in placed:
        whole.raw(picture.group(lefts[c], tops[row]))
    return whole


def png_of(picture: Svg, theme: str = "light", scale: float = 2.0) -> bytes:
    """A picture as PNG, drawn by resvg: no browser, no network.

    Args:
        theme: "light" or "dark": paper and ink.
        scale: pixels of the PNG for one of the picture's.

    Raises:
        ValueError: another theme, a scale that gives no pixel or more than 60 million, no font on this machine.
        ImportError: resvg is not installed.
    """
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, got {theme!r}")
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive number of pixels, got {scale!r}")
    width, height = round(picture.width * scale), round(picture.height * scale)
    if not 1 <= width * height <= MOST_PIXELS:
        most = (MOST_PIXELS / max(picture.width * picture.height, 1)) ** 0.5
        raise ValueError(f"a PNG of {width:,} x {height:,} pixels is not made. Fix: scale={most:.2g} at most, or .svg")
    if not _has_fonts():
        raise ValueError(
            "no font is installed on this machine, so that a PNG would show no words. Fix: install one "
            "(Debian: apt-get install fonts-dejavu-core), or .svg"
        )
    return _rastered(themed(picture, theme), scale)


def themed(picture: Svg, theme: str) -> str:
    """The picture on paper of its own, in one theme."""
    paper, ink = THEMES[theme]
    head, rest = str(picture).replace(FONT, _DRAWN_IN, 1).split(">", 1)
    return f'{head} color="{ink}"><rect width="100%" height="100%" fill="{escape(paper)}"/>{rest}'


def _rastered(svg: str, scale: float) -> bytes:
    """Drawn in a process of its own: resvg holds the interpreter while it draws, for seconds where there is much."""
    if find_spec("resvg_py") is None:
        raise ImportError("PNG needs resvg_py. Fix: pip install resvg_py, or .svg")
    done = subprocess.run([sys.executable, "-c", _DRAW % scale], input=svg.encode(), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"resvg could not draw the picture: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout


@lru_cache(1)
def _has_fonts() -> bool:
    """Whether words are drawn at all: where there is no font they are left out without a word."""
    probe = Svg(40, 20, "probe")
    blank = _rastered(themed(probe, "light"), 1)
    probe.text(2, 15, "rank 0")
    return _rastered(themed(probe, "light"), 1) != blank
