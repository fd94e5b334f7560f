"""One self-contained HTML file that works offline, prints, and follows the reader's light or dark theme.

Every page of the project is written here: the report of a plan, of a comparison, of a sweep, of the demo, and what
widgets export. Each chart is included twice, interactive (`page.py`) and static. The static one is shown where no
script runs, and printed. Geometry is static.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from recshard_lab.lab.draw.svg import without_tooltips
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.page import STYLE, check_plotly, controls_of, head_of, scripts_of
from recshard_lab.text_table import TextTable

LARGEST = 3_000_000  # bytes
LONG = 50_000  # bytes of a file inside a page, from which it is gzipped
Part: TypeAlias = "View | TextTable | Folded | Picture | Code | Attachment | str"


@dataclass(frozen=True)
class Folded:
    """A part that opens with a click; in print, it is open.

    Args:
        summary: always visible, plain text.
        answer: shown below it, an object with ``_repr_html_``.
        share: from 0 to 1, drawn as a bar beside the summary.
    """

    summary: str
    answer: Any
    share: float | None = None


@dataclass(frozen=True)
class Picture:
    """A view under a caption, such as the name of its plan. On a wide page, two are side by side."""

    view: View
    caption: str


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    text: str


@dataclass(frozen=True)
class Attachment:
    """A file inside the page, saved by a click.

    Args:
        name: of the file.
        text: its contents.
        about: a description in a few words.
    """

    name: str
    text: str
    about: str


@dataclass(frozen=True)
class Section:
    """A heading with its contents.

    Args:
        heading: of the section.
        parts: views, tables (`TextTable`), folded answers (`Folded`), captioned views (`Picture`), `Code`, files
            (`Attachment`), or paragraphs of plain text. Text that begins with ">>>" or "$" is shown as code.
    """

    heading: str
    parts: Sequence[Part]


def write_report(
    path: str | Path,
    title: str,
    sections: Mapping[str, Part | Sequence[Part]] | Iterable[Section],
    *,
    subtitle: str = "",
    note: str = "",
    plotly: str = "embed",
) -> Path:
    """Writes the file.

    Args:
        path: of the HTML file; its folder must exist.
        title: the page's heading.
        sections: heading -> parts, or a list of `Section`.
        subtitle: a sentence under the title, such as the run and its machine.
        note: the last line: source of the data, and which numbers were measured.
        plotly: "embed" puts plotly.js into the file (2 MB), "cdn" loads it from the network, "none" shows still
            pictures only.

    Returns:
        The path written.

    Raises:
        ValueError: no section, an unknown ``plotly``, or a page of more than 3 MB.

    >>> from tempfile import mkdtemp
    >>> write_report(mkdtemp() + "/plans.html", "Plans", {"Result": "All four fit."}).name
    'plans.html'
    """
    text = report_text(title, sections, subtitle=subtitle, note=note, plotly=plotly)
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path


def report_text(
    title: str,
    sections: Mapping[str, Part | Sequence[Part]] | Iterable[Section],
    *,
    subtitle: str = "",
    note: str = "",
    plotly: str = "embed",
) -> str:
    """The page that `write_report` writes."""
    if isinstance(sections, Mapping):
        sections = [Section(heading, _listed(parts)) for heading, parts in sections.items()]
    sections = list(sections)
    if not sections:
        raise ValueError("a report needs at least one section. Fix: pass a mapping of headings to views or text")
    drawn = _Drawn(live=check_plotly(plotly) != "none")
    body = "".join(_section(i, section, drawn) for i, section in enumerate(sections))
    plotly = plotly if drawn.figures else "none"  # a page without pictures needs no library
    links = "".join(f'<li><a href="#s{i}">{escape(s.heading)}</a></li>' for i, s in enumerate(sections))
    navigation = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 2 else ""
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{head_of(plotly)}<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_paragraph(subtitle)}{navigation}{controls_of(plotly)}</header>"
        f"<main>{body}</main>"
        + (f'<footer><p class="note">{escape(note)}</p></footer>' if note else "")
        + scripts_of(plotly, json.dumps(drawn.figures))
        + "</body></html>\n"
    )
    size = len(page.encode())
    if size > LARGEST:
        fixes = {"embed": "plotly='cdn' (2 MB less) or fewer sections", "cdn": "plotly='none' or fewer sections"}
        raise ValueError(
            f"the report would take {size:,} bytes, more than {LARGEST:,}. Fix: "
            f"{fixes.get(plotly, 'leave out some sections')}"
        )
    return page


@dataclass
class _Drawn:
    """The interactive pictures of a page, by the id of their element."""

    live: bool
    figures: dict[str, Any] = field(default_factory=dict)


def _listed(parts: Part | Sequence[Part]) -> Sequence[Part]:
    return [parts] if isinstance(parts, (View, TextTable, Folded, Picture, Code, Attachment, str)) else parts


def _section(number: int, section: Section, drawn: _Drawn) -> str:
    parts = ""
    for pictures, some in groupby(enumerate(section.parts), lambda each: isinstance(each[1], Picture)):
        made = "".join(_part(part, f"s{number}-{i}", drawn) for i, part in some)
        parts += f'<div class="beside">{made}</div>' if pictures else made
    return f'<section id="s{number}"><h2>{escape(section.heading)}</h2>{parts}</section>'


def _part(part: Part, uid: str, drawn: _Drawn) -> str:
    match part:
        case View():
            return _figure(part, "", uid, drawn)
        case Picture():
            return _figure(part.view, part.caption, uid, drawn)
        case TextTable():
            return f'<div class="wide">{part.html}</div>'
        case Code():
            return f'<pre tabindex="0">{escape(part.text)}</pre>'
        case Folded():
            inside = f'<div class="wide">{part.answer._repr_html_()}</div>'
            bar = "" if part.share is None else f'<span class="bar"><i style="width:{part.share:.1%}"></i></span>'
            return f'<details class="fold"><summary>{escape(part.summary)}{bar}</summary>{inside}</details>'
        case Attachment():
            return _attached(part)
    if part.startswith((">>>", "$")):
        return f'<pre tabindex="0">{escape(part)}</pre>'
    return "".join(_paragraph(words) for words in part.split("\n\n"))


def _attached(part: Attachment) -> str:
    """A link that saves it, gzipped if it is long. It needs no script."""
    raw, name, kind = part.text.encode(), part.name, "text/plain"
    if len(raw) > LONG:
        raw, name, kind = gzip.compress(raw, 9, mtime=0), f"{name}.gz", "application/gzip"
    link = f'href="data:{kind};base64,{b64encode(raw).decode()}" download="{escape(name, quote=True)}"'
    return f'<p class="files"><a {link}>{escape(name)}</a>: {escape(part.about)} ({bytes_text(len(raw))})</p>'


def _figure(view: View, caption: str, uid: str, drawn: _Drawn) -> str:
    """The still picture, the element of the interactive one, and the numbers."""
    numbers = ""
    if view.numbers.rows:
        numbers = f'<details><summary>The numbers</summary><div class="wide">{view.table}</div></details>'
    head = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    still = view.inline(uid)
    if not drawn.live or view.chart is None:
        words = f'<div class="caption"><p><b>{escape(view.title)}</b></p><p>{escape(view.summary)}</p></div>'
        return f'<figure>{head}{words}<div class="wide drawn">{still}</div>{numbers}</figure>'
    made = json.loads(view.figure.to_json())
    narrow = made["layout"]["meta"].pop("narrow")
    made["layout"], narrow = (_untitled(layout) for layout in (made["layout"], {**made["layout"], **narrow}))
    made["layout"]["meta"]["narrow"] = narrow
    drawn.figures[f"p{uid}"] = {"data": made["data"], "layout": made["layout"]}
    high = made["layout"]["height"]  # kept free until it is drawn
    label = escape(f"{caption}: {view.title}" if caption else view.title, quote=True)
    live = (
        f'<div class="plot"><p><b>{escape(view.title)}</b></p><p>{escape(view.summary)}</p>'
        f'<div id="p{uid}" role="group" aria-label="{label}, interactive" style="min-height:{high}px"></div>'
        f"{_paragraph(view.chart.note)}</div>"
    )
    return f'<figure>{head}<div class="still">{without_tooltips(still)}</div>{live}{numbers}</figure>'


def _untitled(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout without the title, which is written above the plot, where it can wrap."""
    top = 12 + layout["meta"]["over"]
    height = layout["height"] - layout["margin"]["t"] + top
    kept = {name: part for name, part in layout.items() if name != "title"}
    return {**kept, "meta": dict(layout["meta"]), "height": height, "margin": {**layout["margin"], "t": top}}


def _paragraph(words: str) -> str:
    return f"<p>{escape(words)}</p>" if words else ""
