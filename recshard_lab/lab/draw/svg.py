"""A small SVG writer: exactly what the views draw, escaped, titled, and readable with no script and no style sheet.

Inside a page the picture takes the page's ink (``currentColor``). On its own (:meth:`Svg.standalone`), it brings paper
and ink of its own, for a light and a dark page.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from html import escape
from textwrap import wrap

from recshard_lab.lab.draw.theme import FONT, HATCHES, LABEL_INK, Look

_PAPER = (
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#e4e7ea;background:#16191d}}</style>"
)

_TOOLTIP = re.compile(r"><title>[^<]*</title></(?:rect|path)>")


class Svg:
    """Collects shapes; ``str()`` gives the markup.

    Args:
        width, height: of the drawing, in pixels; the page may scale it.
        title: what the picture is, read out by a screen reader and shown on hover.
        description: what it says, in a sentence.
        uid: told apart from the other pictures of one page by this; hatchings are looked up page-wide.
    """

    def __init__(self, width: float, height: float, title: str, description: str = "", uid: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.uid = uid or "rs"
        self._parts: list[str] = []
        self._hatchings: dict[tuple[str, str], str] = {}

    def raw(self, markup: str) -> None:
        self._parts.append(markup)

    def fill(self, look: Look) -> str:
        """The ``fill`` attribute's value for a look: its colour, hatched."""
        strokes = HATCHES[look.hatch][1]
        if not strokes:
            return look.fill
        key = f"{self.uid}-{look.hatch}-{look.fill.lstrip('#')}"
        self._hatchings[look.fill, look.hatch] = (
            f'<pattern id="{key}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{look.fill}"/>'
            f'<path d="{strokes}" stroke="{LABEL_INK}" stroke-opacity=".28" fill="none"/></pattern>'
        )
        return f"url(#{key})"

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, hover: str = "", extra: str = ""
    ) -> None:
        """A rectangle; ``hover`` is its tooltip, ``extra`` further attributes."""
        shape = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{fill}"{_pad(extra)}'
        self.raw(f"{shape}><title>{escape(hover)}</title></rect>" if hover else f"{shape}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, extra: str = "") -> None:
        self.raw(f'<path d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" fill="none" stroke="currentColor"{_pad(extra)}/>')

    def path(self, d: str, extra: str = "", hover: str = "") -> None:
        shape = f'<path d="{d}"{_pad(extra)}'
        self.raw(f"{shape}><title>{escape(hover)}</title></path>" if hover else f"{shape}/>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        anchor: str = "start",
        ink: str = "currentColor",
        bold: bool = False,
        soft: bool = False,
        extra: str = "",
    ) -> None:
        """One line of text with its baseline at ``y``; ``soft`` is for what may be overread."""
        attributes = f' font-size="{_n(size)}"' if size != 11 else ""
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        attributes += f' fill="{ink}"' if ink != "currentColor" else ""
        attributes += ' font-weight="600"' if bold else ""
        attributes += ' opacity=".75"' if soft else ""
        self.raw(f'<text x="{_n(x)}" y="{_n(y)}"{attributes}{_pad(extra)}>{escape(words)}</text>')

    def head(self, title: str, sentence: str, left: float, warn: bool = False) -> float:
        """Title and sentence, wrapped to the picture; returns the y below them."""
        letters = int((self.width - 2 * left) / 6.1)
        self.text(left, 20, fit([title], self.width - 2 * left, 14.2), size=14, bold=True)
        y = 20.0
        for words in wrap(sentence, letters)[:3]:
            y += 16
            self.text(left, y, words, soft=not warn, bold=warn)
        return y + 2

    def legend(self, x: float, y: float, entries: Iterable[tuple[Look, str]], width: float) -> float:
        """Swatches with their labels, wrapped to ``width``; returns the y below the last line."""
        left = x
        for look, words in entries:
            room = 24 + text_width(words, 11) + 16
            if left > x and left + room > x + width:
                left, y = x, y + 18
            self.rect(left, y, 16, 11, self.fill(look), extra='stroke="currentColor" stroke-opacity=".5"')
            self.text(left + 22, y + 9.5, words)
            left += room
        return y + 18

    def group(self, x: float, y: float) -> str:
        """The picture as a part of another one, its corner at ``(x, y)``."""
        return f'<g transform="translate({_n(x)} {_n(y)})" role="img" aria-label="{self._label}">{self._inside}</g>'

    @property
    def _label(self) -> str:
        return escape(f"{self.title}. {self.description}" if self.description else self.title, quote=True)

    @property
    def _inside(self) -> str:
        hatchings = f"<defs>{''.join(self._hatchings.values())}</defs>" if self._hatchings else ""
        description = f"<desc>{escape(self.description)}</desc>" if self.description else ""
        return f"<title>{escape(self.title)}</title>{description}{hatchings}{''.join(self._parts)}"

    def __str__(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{self._label}" '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}" '
            f'style="max-width:100%;height:auto" font-family="{FONT}" font-size="11" fill="currentColor">'
            f"{self._inside}</svg>"
        )


def standalone(svg: str) -> str:
    """The same picture with paper and ink of its own, for a file or an ``<img>``."""
    head, rest = svg.split(">", 1)
    return f"{head}>{_PAPER}{rest}"


def without_tooltips(svg: str) -> str:
    """The same picture for where nothing is hovered; title and description stay."""
    return _TOOLTIP.sub("/>", svg)


def img_tag(svg: str, alt: str, width: float) -> str:
    """The picture as an ``<img>``: pages that strip ``<svg>`` (GitHub, an untrusted notebook) still show it."""
    plain = without_tooltips(standalone(svg))
    data = b64encode(plain.encode()).decode()
    return (
        f'<img alt="{escape(alt, quote=True)}" width="{_n(width)}" style="max-width:100%" '
        f'src="data:image/svg+xml;base64,{data}">'
    )


def text_width(words: str, size: float) -> float:
    """About how wide a line is set, in pixels; a little too wide rather than too narrow.

    >>> text_width("rank 0", 10)
    36.0
    """
    return len(words) * size * 0.6


def fit(candidates: Iterable[str], width: float, size: float) -> str:
    """The first of ``candidates`` that fits into ``width``, else the last one cut with an ellipsis, else nothing.

    >>> fit(["movies 0-841 x 0-16", "movies"], 60, 11), fit(["occupation"], 40, 11), fit(["movies"], 9, 11)
    ('movies', 'occup…', '')
    """
    last = ""
    for last in candidates:
        if text_width(last, size) <= width:
            return last
    letters = int(width / (size * 0.6))
    return f"{last[: letters - 1]}…" if letters >= 4 else ""


def _n(value: float) -> str:
    """A coordinate to a hundredth of a pixel, without trailing zeros."""
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def _pad(extra: str) -> str:
    return f" {extra}" if extra else ""
