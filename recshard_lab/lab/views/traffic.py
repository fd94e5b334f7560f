"""Traffic: bytes per step from every rank to every other, as numbers on a heat map; counted beside predicted.

Frames hold the ranks of a node (or of a sharding group, where there are replicas); a cell with a marked corner is a
link between nodes. Below, the same bytes by phase and route; ``phase=`` shows one of them on the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit, text_width
from recshard_lab.lab.draw.theme import bytes_text, bytes_unit, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.links import Links, links_of
from recshard_lab.lab.views.registry import register_view
from recshard_lab.lab.views.traffic_phases import PHASES, Part, parts_of
from recshard_lab.text_table import TextTable

NUMBERED = 16  # cells a side up to which each carries its number
PALE, DEEP = (232, 241, 250), (12, 74, 132)


@register_view("Traffic", place=4)
def traffic(
    estimate: Any,
    measured: Any = None,
    *,
    phase: str | None = None,
    topology: Any = None,
    groups: Sequence[Sequence[int]] | None = None,
    note: str = "",
    width: int = 860,
    extent: float = 0.0,
) -> View:
    """Who sends how much to whom in one step.

    Args:
        estimate: has ``traffic_bytes`` ``[W, W]``: row = sender, column = receiver, bytes per step; and, to be taken
            apart by phase and route, ``traffic_by_phase`` (label of the collectives -> ``[W, W]``).
        measured: has the same counted on the ranks; its numbers stand below the predicted ones.
        phase: "sizes", "ids", "rows", "gradients", "row_norms", "dense", "sync", ...: only this part of the step.
        topology: its ``local_world_size`` defines the ranks of a node.
        groups: the sharding groups of a model in replicas (`DMPCollection`): lists of ranks.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: bytes of the darkest cell, where several are to one scale; 0 for its own.
    """
    whole = np.asarray(estimate.traffic_bytes, dtype=float)
    if whole.size == 0:
        return message_view("traffic", "Traffic", "No rank to show.")
    counted = None if measured is None else getattr(measured, "traffic_bytes", None)
    counted = None if counted is None else np.asarray(counted, dtype=float)
    if counted is not None and counted.shape != whole.shape:
        words = f"{len(counted)} ranks were counted, {len(whole)} predicted: not the same plan."
        return message_view("traffic", "Traffic", words)
    parts = parts_of(estimate, measured)
    matrices = [("predicted", whole), ("counted", counted)]
    matrices += [(kind, m) for part in parts for kind, m in (("predicted", part.predicted), ("counted", part.counted))]
    for kind, matrix in matrices:
        if matrix is not None and not np.isfinite(matrix).all():
            source, target = np.argwhere(~np.isfinite(matrix))[0]
            words = f"The {kind} traffic from rank {source} to rank {target} is not a number."
            return message_view("traffic", "Traffic", words)
    sent = whole
    if phase is not None:
        chosen = parts_of(estimate, measured, phase)
        if not parts:
            return message_view("traffic", "Traffic", "This estimate does not divide its traffic into phases.")
        sent = _sum([part.predicted for part in chosen], whole)
        counted = None if counted is None else _sum([part.counted for part in chosen], whole)
    counted = None if counted is None else counted - np.diag(np.diag(counted))
    links = links_of(len(whole), getattr(topology, "local_world_size", None) if topology is not None else None, groups)
    away = sent - np.diag(np.diag(sent))
    what = "" if phase is None else f", {PHASES[phase]}"
    title = f"Traffic per step{what}: {bytes_text(away.sum())} between {len(sent)} rank{'s' * (len(sent) != 1)}"
    summary = _summary(away, links)

    def draw(uid: str) -> Svg:
        return _draw(away, counted, parts, phase, links, (title, summary, note), width, extent, uid)

    most, numbers = float(links.cells(away).max()), _numbers(away, counted, parts, links)
    return View("traffic", title, summary, numbers, draw, extent=most)


def _sum(matrices: Sequence[np.ndarray | None], like: np.ndarray) -> np.ndarray:
    return np.sum([np.zeros_like(like), *(one for one in matrices if one is not None)], axis=0)


def _summary(away: np.ndarray, links: Links) -> str:
    if not away.any():
        return "Nothing crosses a rank's border."
    source, target = np.unravel_index(int(away.argmax()), away.shape)
    busiest = int((away.sum(axis=1) + away.sum(axis=0)).argmax())
    words = (
        f"Most goes from rank {source} to rank {target}: {bytes_text(away.max())}. Rank {busiest} sends "
        f"{bytes_text(away.sum(axis=1)[busiest])} and receives {bytes_text(away.sum(axis=0)[busiest])}."
    )
    if links.nodes.max() > 0:
        near, far = links.split(away)
        words += f" Inside nodes stay {bytes_text(near)}, {bytes_text(far)} cross between nodes."
    return words


Words = tuple[str, str, str]  # title, summary, note


def _draw(
    away: np.ndarray,
    counted: np.ndarray | None,
    parts: list[Part],
    phase: str | None,
    links: Links,
    words: Words,
    width: int,
    extent: float,
    uid: str,
) -> Svg:
    title, summary, note = words
    cells = links.cells(away)
    other = None if counted is None else links.cells(counted)
    side = len(cells)
    size, unit = bytes_unit(float(max(cells.max(), extent, other.max() if other is not None else 0)))
    left = MARGIN + 76.0
    numbered = side <= NUMBERED
    totals = 74 if numbered else 0
    across = min((width - left - MARGIN - totals) / side, 96 if numbered else 14)
    numbered = numbered and across >= 26
    down = min(across, 40 if other is not None else 30) if numbered else across
    svg = Svg(width, 0, title, summary, uid)
    framed = bool(links.frames)
    top = svg.head(title, summary, MARGIN) + (62 if framed else 44)
    svg.text(left, top - (42 if framed else 22), f"to →   (numbers in {unit})" if numbered else "to →", soft=True)
    svg.text(left - 10, top - 8, "from ↓", anchor="end", soft=True)
    most = max(float(cells.max()), extent) or 1.0
    every = 1 if across >= 26 else 4 if across >= 8 else 8
    for i in range(side):
        if i % every == 0:
            short = links.names[i].split()[-1]
            svg.text(left + (i + 0.5) * across, top - 8, short, anchor="middle", size=10)
            svg.text(left - 10, top + (i + 0.5) * down + 4, links.names[i], anchor="end", size=10)
        for j in range(side):
            box = (left + j * across, top + i * down, across - 1, down - 1)
            _cell(svg, box, links, (i, j), cells, other, most, (size, unit), numbered)
    _frames(svg, links, left, top, across, down)
    bottom = top + side * down
    if numbered:
        _totals(svg, cells, left, top, across, down, size)
        bottom += down
    else:
        _key(svg, left, bottom + 12, bytes_text(most))
        bottom += 26
    told = _legend(links, other is not None and numbered)
    for line in (part for words in told for part in wrap(words, int((width - 2 * MARGIN) / 6.1))):
        bottom += 15
        svg.text(MARGIN, bottom + 3, line, soft=True)
    bottom += 8
    if parts:
        bottom = _phases(svg, parts, phase, links, bottom + 22, width)
    if note:
        bottom += 14
        svg.text(MARGIN, bottom, note, soft=True)
    svg.height = bottom + 10
    return svg


def _legend(links: Links, counted: bool) -> list[str]:
    several = links.nodes.max() > 0
    first = "Struck out: what stays on its rank." if links.unit == "rank" else f"Each cell adds up {_each(links)}."
    first += " Below: counted." if counted else ""
    marked = " A marked corner ◥: a link between nodes." if several and links.across.any() else ""
    framed = ""
    if links.frames:
        grouped = links.frames[0][2].startswith("group")
        framed = "Framed: the ranks of one replica (its sharding group)." if grouped else "Framed: links inside a node."
    elif links.unit == "node":
        framed = "On the diagonal: links inside a node."
    second = f"{framed}{marked}".strip()
    return [first, second] if second else [first]


def _each(links: Links) -> str:
    count = int(links.starts[1] - links.starts[0]) if len(links.starts) > 1 else len(links.order)
    return f"{count} x {count} ranks"


def _cell(
    svg: Svg,
    box: tuple[float, float, float, float],
    links: Links,
    at: tuple[int, int],
    cells: np.ndarray,
    other: np.ndarray | None,
    most: float,
    scale: tuple[float, str],
    numbered: bool,
) -> None:
    (x, y, across, down), (i, j) = box, at
    if i == j and links.unit == "rank":
        svg.rect(x, y, across, down, "none", extra='stroke="currentColor" stroke-opacity=".25"')
        svg.line(x, y + down, x + across, y, 'stroke-opacity=".25"')
        return
    share = cells[i, j] / most
    hover = f"{links.names[i]} to {links.names[j]}"
    hover += " (between nodes)" if links.across[i, j] else ""
    hover += f": {bytes_text(cells[i, j])}" + ("" if other is None else f", counted {bytes_text(other[i, j])}")
    svg.rect(x, y, across, down, _colour(share), hover)
    if links.across[i, j] and across >= 8:
        corner = min(across, down, 24) / 3
        svg.path(f"M{x + across - corner:.1f} {y:.1f}h{corner:.1f}v{corner:.1f}z", f'fill="{_ink(share)}"')
    if not numbered:
        return
    ink, size = _ink(share), scale[0]
    words = number(cells[i, j] / size, 3)
    words = words if text_width(words, 10) <= across - 2 else number(cells[i, j] / size, 2)
    middle = x + across / 2
    if other is None:
        svg.text(middle, y + down / 2 + 4, words, anchor="middle", size=10.5, ink=ink)
        return
    svg.text(middle, y + down / 2 - 2, words, anchor="middle", size=10.5, ink=ink)
    svg.text(middle, y + down / 2 + 10.5, number(other[i, j] / size, 3), anchor="middle", size=10.5, ink=ink, bold=True)


def _frames(svg: Svg, links: Links, left: float, top: float, across: float, down: float) -> None:
    """Around the ranks of one node, or one sharding group, with its name above."""
    for first, end, name in links.frames:
        x, y, long = left + first * across, top + first * down, (end - first) * across
        shape = f"M{x - 1.5:.1f} {y - 1.5:.1f}h{long + 2:.1f}v{(end - first) * down + 2:.1f}h{-long - 2:.1f}z"
        svg.path(shape, 'fill="none" stroke="currentColor" stroke-width="2"')
        svg.path(f"M{x + 1:.1f} {top - 21:.1f}v-4h{long - 3:.1f}v4", 'fill="none" stroke="currentColor"')
        words = fit([name, name.split()[-1]], long, 10)
        svg.text(x + long / 2, top - 29, words, anchor="middle", size=10, bold=True)


def _phases(svg: Svg, parts: list[Part], phase: str | None, links: Links, y: float, width: int) -> float:
    """One line a part: its name, a bar, bytes predicted and counted, and how much of it crosses nodes."""
    several, counted = links.nodes.max() > 0, any(part.counted is not None for part in parts)
    heads = ["predicted", *(["counted"] if counted else []), *(["between nodes"] if several else [])]
    room = [76 if head != "between nodes" else 88 for head in heads]
    names = min(204.0, width * 0.4)
    bar_left, bar_right = MARGIN + names, width - MARGIN - sum(room) - 8
    most = max(float(m.sum()) for part in parts for m in (part.predicted, part.counted) if m is not None) or 1.0
    svg.text(MARGIN, y, "By phase and route", bold=True)
    ends = [width - MARGIN - sum(room[i + 1 :]) for i in range(len(room))]
    for end, head in zip(ends, heads, strict=True):
        svg.text(end, y, head, anchor="end", size=10, soft=True)
    for part in parts:
        y += 18
        mark = "▸ " if part.phase == phase else ""
        svg.text(MARGIN, y, fit([mark + part.words], names - 4, 10.5), bold=part.phase == phase)
        total, found = (None if m is None else float(m.sum()) for m in (part.predicted, part.counted))
        long = max(bar_right - bar_left, 0)
        if total:
            svg.rect(bar_left, y - 9, max(long * total / most, 0.8), 7, _colour(0.55), f"{part.words}: predicted")
        if found:
            shape = 'fill="none" stroke="currentColor" stroke-width="1.2"'
            svg.path(f"M{bar_left:.1f} {y + 1:.1f}h{max(long * found / most, 0.8):.1f}", shape)
        cells = ["not predicted" if total is None else bytes_text(total)]
        cells += ["" if not counted else "not run" if found is None else bytes_text(found)] if counted else []
        source = part.predicted if part.predicted is not None else part.counted
        cells += [_share(links, source)] if several else []
        for end, words in zip(ends, cells, strict=True):
            svg.text(end, y, words, anchor="end", size=10.5, soft=words in ("not predicted", "not run"))
    if counted:
        y += 16
        svg.text(MARGIN, y, "Bar: predicted. Line under it: counted.", soft=True)
    return y


def _share(links: Links, matrix: np.ndarray | None) -> str:
    if matrix is None:
        return ""
    near, far = links.split(matrix)
    return f"{number(100 * far / (near + far), 2)}%" if near + far else ""


def _key(svg: Svg, left: float, y: float, most: str) -> None:
    """What the colours mean where cells have no numbers."""
    svg.text(left, y + 10, "0", anchor="start")
    for i in range(12):
        svg.rect(left + 14 + 12 * i, y, 12, 12, _colour(i / 11))
    svg.text(left + 164, y + 10, most)


def _colour(share: float) -> str:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(PALE, DEEP, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _ink(share: float) -> str:
    """Black or white, whichever stands out more: 4.58 to 1 at least (WCAG 2; both are equal at luminance 0.179)."""
    channels = [(a + (b - a) * share) / 255 for a, b in zip(PALE, DEEP, strict=True)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return "#000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#fff"


def _totals(svg: Svg, cells: np.ndarray, left: float, top: float, across: float, down: float, size: float) -> None:
    """What each rank sends (right) and receives (below)."""
    side = len(cells)
    right = left + side * across + 8
    svg.text(right, top - 8, "sends", soft=True, size=10)
    svg.text(left - 10, top + (side + 0.5) * down + 4, "receives", anchor="end", soft=True, size=10)
    for i in range(side):
        svg.text(right, top + (i + 0.5) * down + 4, number(cells[i].sum() / size), size=10.5, bold=True)
        words = number(cells[:, i].sum() / size)
        svg.text(left + (i + 0.5) * across, top + (side + 0.5) * down + 4, words, anchor="middle", size=10.5, bold=True)


def _numbers(away: np.ndarray, counted: np.ndarray | None, parts: list[Part], links: Links) -> TextTable:
    """By phase if phases are known, then the matrix if it is small, else what each rank sends and receives."""
    if len(away) <= 8:
        heads = ["from \\ to", *(f"rank {j}" for j in range(len(away)))]
        rows = [[f"rank {i}", *map(bytes_text, row)] for i, row in enumerate(away)]
        if counted is not None:
            rows += [[f"rank {i}, counted", *map(bytes_text, row)] for i, row in enumerate(counted)]
    else:
        heads = ["rank", "sends", "receives"]
        pairs = zip(away.sum(axis=1), away.sum(axis=0), strict=True)
        rows = [[str(i), bytes_text(a), bytes_text(b)] for i, (a, b) in enumerate(pairs)]
    if not parts:
        return TextTable(heads, rows)
    wide = max(len(heads), 4)
    told = []
    for part in parts:
        total, found = ("" if m is None else bytes_text(float(m.sum())) for m in (part.predicted, part.counted))
        source = part.predicted if part.predicted is not None else part.counted
        told.append([part.words, total, found, _share(links, source) if links.nodes.max() > 0 else ""])
    first, *rest = _padded([["by phase", "predicted", "counted", "between nodes"], *told, heads, *rows], wide)
    return TextTable(first, rest)


def _padded(rows: Sequence[Sequence[str]], wide: int) -> list[list[str]]:
    return [[*row, *[""] * (wide - len(row))] for row in rows]
