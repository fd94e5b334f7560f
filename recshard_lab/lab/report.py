"""One self-contained HTML file: opens offline, prints, follows the reader's light or dark theme, runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from recshard_lab.lab.view import Numbers, View

LARGEST = 3_000_000  # bytes
Part: TypeAlias = "View | Numbers | Folded | str"

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59626c;--paper:#fff;--line:#d5dae0;--sheet:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--ink:#e4e7ea;--soft:#a2abb5;--paper:#14171b;--line:#343b43;--sheet:#1c2127}}
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 20px 60px;max-width:940px;background:var(--paper);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.2;margin:0 0 6px}h2{font-size:19px;margin:40px 0 8px}
header p,.note{color:var(--soft);margin:0 0 8px}
p{margin:0 0 10px;max-width:70ch}
nav ul{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;padding:0;margin:14px 0 0}
a{color:inherit}
figure{margin:14px 0;padding:10px;border:1px solid var(--line);border-radius:6px;overflow-x:auto}
figure svg{min-width:640px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:8px 0}
th,td{padding:3px 14px 3px 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;white-space:nowrap}
.wide{overflow-x:auto}
pre{background:var(--sheet);padding:10px 12px;overflow-x:auto;font-size:12.5px;border-radius:6px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
.fold{border-bottom:1px solid var(--line);padding:6px 0}
.fold>summary{color:var(--ink);font-size:14px}
.bar{float:right;width:18%;height:10px;margin-top:6px;border:1px solid var(--line);border-radius:5px;overflow:hidden}
.bar i{display:block;height:100%;background:#5b94d6}
.fold .wide{padding:6px 0 4px 16px}
@media print{figure{break-inside:avoid}nav{display:none}}
"""


@dataclass(frozen=True)
class Folded:
    """Something to open with a click; printed, it is open.

    Args:
        summary: what is always seen, plain text.
        answer: shown below it; what notebooks show (``_repr_html_``).
        share: from 0 to 1, drawn as a bar beside the summary, which says it in words.
    """

    summary: str
    answer: Any
    share: float | None = None


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it.

    Args:
        heading: of the section.
        parts: views, tables (`Numbers`), answers to be opened (`Folded`), or paragraphs of plain text; text that begins
            with ">>>" or "$" is shown as code.
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
) -> Path:
    """Writes the file.

    Args:
        path: of the HTML file; its folder must exist.
        title: the page's heading.
        sections: heading -> parts, or a list of `Section`.
        subtitle: a sentence under the title: what was run, on what.
        note: the last line: where the data come from, which numbers were measured and where.

    Returns:
        The path written.

    Raises:
        ValueError: no section, or a page of more than 3 MB.

    >>> from tempfile import mkdtemp
    >>> write_report(mkdtemp() + "/plans.html", "Plans", {"Result": "All four fit."}).name
    'plans.html'
    """
    if isinstance(sections, Mapping):
        sections = [Section(heading, _listed(parts)) for heading, parts in sections.items()]
    sections = list(sections)
    if not sections:
        raise ValueError("a report needs at least one section: give a mapping of headings to views, tables or text")
    links = "".join(f'<li><a href="#s{i}">{escape(s.heading)}</a></li>' for i, s in enumerate(sections))
    navigation = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 2 else ""
    body = "".join(_section(i, section) for i, section in enumerate(sections))
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_paragraph(subtitle)}{navigation}</header><main>{body}</main>"
        + (f'<footer><p class="note">{escape(note)}</p></footer>' if note else "")
        + "</body></html>\n"
    )
    size = len(page.encode())
    if size > LARGEST:
        raise ValueError(f"the report would take {size:,} bytes, more than {LARGEST:,}: leave out some sections")
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _listed(parts: Part | Sequence[Part]) -> Sequence[Part]:
    return [parts] if isinstance(parts, (View, Numbers, Folded, str)) else parts


def _section(number: int, section: Section) -> str:
    parts = "".join(_part(part, f"s{number}-{i}") for i, part in enumerate(section.parts))
    return f'<section id="s{number}"><h2>{escape(section.heading)}</h2>{parts}</section>'


def _part(part: Part, uid: str) -> str:
    if isinstance(part, Folded):
        inside = f'<div class="wide">{part.answer._repr_html_()}</div>'
        bar = "" if part.share is None else f'<span class="bar"><i style="width:{part.share:.1%}"></i></span>'
        return f'<details class="fold"><summary>{escape(part.summary)}{bar}</summary>{inside}</details>'
    if isinstance(part, Numbers):
        return f'<div class="wide">{part.html}</div>'
    if isinstance(part, str):
        if part.startswith((">>>", "$")):
            return f"<pre>{escape(part)}</pre>"
        return "".join(_paragraph(words) for words in part.split("\n\n"))
    numbers = ""
    if part.numbers.rows:
        numbers = f'<details><summary>The numbers</summary><div class="wide">{part.table}</div></details>'
    return f"<figure>{part.inline(uid)}{numbers}</figure>"


def _paragraph(words: str) -> str:
    return f"<p>{escape(words)}</p>" if words else ""
