"""Outputs of notebook cells: which part of them is stored, what may not be in them, and whether two runs gave the same.

Of each output the richest static form is stored: HTML if it has one, else SVG, else text. GitHub and the docs show
that form. Charts and widgets have their picture in it, as an ``<img>``, and their numbers, as a table.
"""

from __future__ import annotations

import base64
import difflib
import os
import re
import socket
import sys
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[2]
STATIC = ("text/html", "image/svg+xml", "text/plain")  # the first that an output has is stored
WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_BYTES = 400_000  # of a notebook
MOST_TEXT = 6_000  # characters of an output's text
ALIKE = 0.6  # share of words that two outputs of a timed cell have in common, at least

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DRAWN = re.compile(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")
_BITMAP = re.compile(r"data:image/(?!svg)[\w.+-]+")
_PATH = re.compile(
    r"(?<![\w.:/])(?:/(?:home|root|tmp|Users|mnt|work|workspace|opt|var|usr|proc)/|[A-Z]:\\)[^\s'\"<>,;:)]*"
)
_PROCESS = re.compile(r"\b(?:pids?|process(?:es)?)\b(?:\s+id)?[\s=:#]*(\d{2,})", re.IGNORECASE)
_PROCESSES = re.compile(r"<th[^>]*>\s*(?:pid|process)\s*</th>", re.IGNORECASE)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_DECIMAL = re.compile(r"\d+\.(\d+)(?:[eE]([-+]?\d+))?")
_SIGNS = re.compile(r"[^A-Za-z]+")


class NotStorable(ValueError):
    """An output that must not be in the repository."""


def plain(text: str) -> str:
    """A text without the codes that colour it in a terminal."""
    return _ANSI.sub("", text)


def stored_form(output: Any) -> Any | None:
    """What the repository keeps of an output; None if nothing.

    An error keeps its last line, as its traceback names files of the machine.

    Raises:
        NotStorable: it has no static form, or was written to stderr.
    """
    if output.output_type == "stream":
        if output.name == "stderr":
            raise NotStorable(f"the cell wrote to stderr: {output.text[:200]!r}")
        return nbformat.v4.new_output("stream", name="stdout", text=plain(output.text))
    if output.output_type == "error":
        last = plain(f"{output.ename}: {output.evalue}")
        return nbformat.v4.new_output("error", ename=output.ename, evalue=plain(output.evalue), traceback=[last])
    kind = next((kind for kind in STATIC if kind in output.data), None)
    if kind is None or (WIDGET in output.data and kind == "text/plain"):
        raise NotStorable(f"no static form in {sorted(output.data)}: the widget needs text/html")
    data = plain(output.data[kind]) if kind == "text/plain" else output.data[kind]
    form = nbformat.v4.new_output(output.output_type, data={kind: data})
    if "execution_count" in form:
        form.execution_count = None
    return form


def stored_forms(outputs: list[Any]) -> list[Any]:
    """What is kept of a cell's outputs; neighbouring prints are joined."""
    kept: list[Any] = []
    for form in filter(None, map(stored_form, outputs)):
        if kept and form.output_type == kept[-1].output_type == "stream":
            kept[-1].text += form.text
        else:
            kept.append(form)
    return kept


def kind_of(form: Any) -> str:
    """``stream``, ``error``, or the MIME type."""
    return next(iter(form.data)) if "data" in form else str(form.output_type)


def markup(form: Any) -> str:
    """A stored output as it is written, pictures in it as markup."""
    if form.output_type == "stream":
        return str(form.text)
    if form.output_type == "error":
        return "\n".join(form.traceback)
    (raw,) = form.data.values()
    return _DRAWN.sub(lambda found: base64.b64decode(found[1]).decode(), raw)


def text_of(form: Any) -> str:
    """What a reader of a stored output reads: descriptions of pictures, rows of tables, printed lines."""
    if kind_of(form) not in STATIC[:2]:
        return markup(form)
    (raw,) = form.data.values()
    raw = re.sub(r"<(style|script|title|desc)\b.*?</\1>", "", raw, flags=re.DOTALL)
    raw = re.sub(r"<(?:img|svg)\b[^>]*?\b(?:alt|aria-label)=\"([^\"]*)\"[^>]*>", r"\1\n", raw)
    raw = re.sub(r"</(?:tr|p|div|caption|summary|li|text|pre|h\d)>|<br\s*/?>", "\n", raw)
    raw = re.sub(r"</(?:td|th)>", "  ", raw)
    lines = (line.strip() for line in unescape(re.sub(r"<[^>]+>", "", raw)).splitlines())
    return "\n".join(line for line in lines if line)


def problems(form: Any) -> list[str]:
    """Why a stored output must not be in the repository; empty if it may."""
    seen = markup(form)
    found = [f"it names the path {path!r}" for path in _PATH.findall(seen)]
    here = {str(ROOT), str(Path.home()), tempfile.gettempdir(), sys.prefix, os.environ.get("RECSHARD_MOVIELENS", "")}
    found += [f"it names the path {path!r}" for path in here if len(path) > 2 and path + "/" in seen + "/"]
    host = socket.gethostname()
    if len(host) > 3 and re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", seen):
        found.append(f"it names the host {host!r}")
    found += [f"it names process {pid}" for pid in _PROCESS.findall(text_of(form))]
    found += ["it has a column of processes" for _ in _PROCESSES.findall(seen)]
    found += [f"it names the address {address}" for address in _ADDRESS.findall(text_of(form))]
    found += [f"it holds a bitmap ({kind.removeprefix('data:')})" for kind in _BITMAP.findall(seen)]
    if (size := len(text_of(form))) > MOST_TEXT:
        found.append(f"its text has {size:,} characters, {MOST_TEXT:,} are allowed")
    return sorted(set(found))


def words(form: Any) -> list[str]:
    """The words of an output without digits, units and bars."""
    return [word for word in _SIGNS.split(text_of(form)) if len(word) > 2]


def same(old: str, new: str) -> bool:
    """Whether two texts are equal. Decimals may differ by one in their last digit, as processors round differently.

    >>> same("AUC 0.7331 of 29 ids", "AUC 0.7332 of 29 ids"), same("AUC 0.7331", "AUC 0.7334"), same("29", "30")
    (True, False, False)
    """
    if old == new:
        return True
    if _DECIMAL.sub("", old) != _DECIMAL.sub("", new):
        return False
    pairs = zip(_DECIMAL.finditer(old), _DECIMAL.finditer(new), strict=True)
    return all(
        abs(float(one[0]) - float(other[0])) <= 1.001 * max(_last_digit(one), _last_digit(other))
        for one, other in pairs
    )


def _last_digit(number: re.Match[str]) -> float:
    return float(10 ** (int(number[2] or 0) - len(number[1])))


def difference(old: list[Any], new: list[Any], timed: bool = False) -> str:
    """Where two stored outputs of a cell differ; empty if they are the same.

    Args:
        old, new: of `stored_forms`.
        timed: compare only how many outputs there are, their kinds, and their words. Digits, units, bars and
            coordinates are ignored, and 40% of the words may be others, as conclusions depend on the times.
    """
    kinds = [[kind_of(form) for form in forms] for forms in (old, new)]
    if kinds[0] != kinds[1]:
        return f"stored are the outputs {kinds[0]}, the run gave {kinds[1]}"
    for before, after in zip(old, new, strict=True):
        if timed:
            alike = difflib.SequenceMatcher(None, words(before), words(after), autojunk=False).ratio()
            if alike < ALIKE:
                return f"{alike:.0%} of the words are alike, {ALIKE:.0%} are needed:\n{text_of(after)[:1000]}"
        elif not same(markup(before), markup(after)):
            lines = [re.sub(r"(<(?!/))", r"\n\1", markup(form)).splitlines() for form in (before, after)]
            return "\n".join([*difflib.unified_diff(*lines, "stored", "run", lineterm="", n=1)][:40])
    return ""
