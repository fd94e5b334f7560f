"""Placement: one column per rank, every rectangle of the plan in it, area in proportion to bytes.

Each block carries a glyph: the outline is the whole table, the filled part is what this rank holds of it. Blocks too
small to draw to scale are listed below their column with a dashed outline, so that all areas are to scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.draw.rank_columns import MARGIN, Columns, nodes_of
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, SCHEMES, as_sentence, bytes_text, counted, look_of
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.blocks import Block, blocks_by_rank, merged_by_scheme
from recshard_lab.lab.views.registry import register_view
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.text_table import TextTable

THINNEST = 2.0  # pixels: what is lower is listed, not drawn
LABELLED = 12.0  # pixels: what is lower has no room for its name and is listed too
LISTED = 5  # lines of small blocks under a column
NAMED = 56.0  # pixels: a narrower column has only the number of its small blocks
_BOLD = 1.15  # how much wider bold letters are
MOST_DRAWN = 420  # blocks in one picture; beyond, each rank shows its schemes


@register_view("Placement", place=1)
def placement(
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology | None = None,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    note: str = "",
    width: int = 860,
    extent: float = 0.0,
) -> View:
    """Which rank holds which rectangle of which table.

    Args:
        plan: the tiling; need not be valid, so that a hole can be looked at.
        tables: the configs of all its tables.
        topology: gives the number of ranks; without it, as many as the plan names.
        groups: the sharding groups of a model in replicas (`DMPCollection`): lists of ranks, each of which holds the
            plan, which is for the ranks of one group; groups are framed side by side.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: bytes of the rank that fills the picture, where several are to one scale; 0 for its own fullest.
    """
    if not tables or not plan.plan:
        return message_view("placement", "Placement", "The plan is empty: no table is placed.")
    local = topology.local_world_size if topology is not None else None
    if groups is None:
        world_size = topology.world_size if topology is not None else plan.world_size
        ranks = blocks_by_rank(plan, tables, world_size, local)
        row = Row(list(range(world_size)), nodes_of(world_size, local))
    else:
        row = row_of_groups(groups)
        one = blocks_by_rank(plan, tables, len(groups[0]), None)
        ranks, world_size = [blocks for _ in groups for blocks in one], len(row.numbers)
    totals = [sum(block.num_bytes for block in blocks) for blocks in ranks]
    fullest = row.numbers[max(range(world_size), key=totals.__getitem__)]
    most_held = max(totals)
    title = f"Placement: {counted(len(tables), 'table')} on {counted(world_size, 'rank')}"
    mean = sum(totals) / world_size
    summary = f"Rank {fullest} holds most: {bytes_text(most_held)} of weights; the mean is {bytes_text(mean)}."
    summary += _in_host(ranks) + _routes(ranks)
    by_scheme = not Columns(world_size, width).legible or sum(map(len, ranks)) > MOST_DRAWN

    def draw(uid: str) -> Svg:
        return _draw(ranks, totals, row, (title, summary, note), width, by_scheme, extent, uid)

    return View("placement", title, summary, _numbers(ranks, totals, row), draw, extent=most_held)


@dataclass(frozen=True)
class Row:
    """The columns' ranks, and what is framed: the ranks of a node, or of a replica."""

    numbers: list[int]
    frames: list[tuple[int, int, str]]
    of_groups: bool = False


def row_of_groups(groups: Sequence[Sequence[int]]) -> Row:
    """Sharding groups one beside the other.

    Raises:
        ValueError: groups of different sizes, or that are none.

    >>> row_of_groups([[0, 2], [1, 3]])
    Row(numbers=[0, 2, 1, 3], frames=[(0, 2, 'group 0'), (2, 4, 'group 1')], of_groups=True)
    """
    size = len(groups[0]) if groups else 0
    numbers = [rank for group in groups for rank in group]
    if not size or any(len(group) != size for group in groups) or sorted(numbers) != list(range(len(numbers))):
        raise ValueError(f"groups must have all ranks once, in equal parts, got {[list(group) for group in groups]}")
    frames = [(size * i, size * (i + 1), f"group {i}") for i in range(len(groups))]
    return Row(numbers, frames, True)


def _draw(
    ranks: list[list[Block]],
    totals: list[float],
    row: Row,
    told: tuple[str, str, str],
    width: int,
    by_scheme: bool,
    extent: float,
    uid: str,
) -> Svg:
    title, summary, note = told
    columns = Columns(len(ranks), width)
    most = max(*totals, extent) or 1.0
    tallest = 230.0 if by_scheme or extent else min(max(230.0, 17.0 * max(map(len, ranks))), 430.0)
    scale = tallest / most
    shown = [merged_by_scheme(blocks) if by_scheme else blocks for blocks in ranks]
    small = [[b for b in blocks if b.num_bytes * scale < LABELLED] for blocks in shown]
    lines = 0 if by_scheme else min(max(map(len, small)), LISTED if columns.each >= NAMED else 1)
    dashed = any(b.num_bytes * scale < THINNEST for blocks in small for b in blocks) and lines
    svg = Svg(width, 0, title, summary, uid)
    head = svg.head(title, summary, MARGIN) + (20 if row.frames else 0)
    columns.frame(svg, head, row.frames)
    floor = head + 12 + tallest
    below = floor + 34 + (15 * lines + 6 if lines else 0) + (14 if columns.each < 44 else 0)
    under = floor + (28 if columns.each >= 44 else 42)
    for rank, blocks in enumerate(shown):
        left, y = columns.left(rank), floor
        for block in blocks:
            height = block.num_bytes * scale
            if height < THINNEST:
                continue
            y -= height
            _block(svg, block, left, y, columns.each, height)
        if small[rank] and y == floor and not columns.legible:
            svg.rect(left, floor - 2, columns.each, 2, "currentColor", _held(small[rank]), 'opacity=".55"')
        if not blocks and columns.legible:
            svg.rect(
                left,
                floor - 26,
                columns.each,
                26,
                "none",
                extra='stroke="currentColor" stroke-opacity=".5" stroke-dasharray="3 3"',
            )
            svg.text(left + columns.each / 2, floor - 9, "empty", anchor="middle", soft=True)
        if columns.legible:
            words = fit([bytes_text(totals[rank]), bytes_text(totals[rank]).replace(" ", "")], columns.each + 4, 10.5)
            svg.text(left + columns.each / 2, under, words, size=10.5, anchor="middle", soft=True)
            _listed(svg, small[rank], left, under + 8, columns.each, lines, scale)
    svg.line(MARGIN - 4, floor + 0.5, columns.right + 4, floor + 0.5, 'stroke-opacity=".6"')
    columns.label_ranks(svg, floor + 15, numbers=row.numbers)
    end = svg.legend(MARGIN, below + 4, _legend(ranks), width - 2 * MARGIN)
    words = "Area is bytes."
    if any(b.num_bytes * scale < THINNEST for blocks in small for b in blocks):
        words += " Dashed: too small to draw." if dashed and columns.legible else " A line: too small to draw."
    if any(block.in_host for blocks in ranks for block in blocks):
        words += " Double outline and a house: in the host's memory."
    words += " Framed: one replica of the tables." if row.of_groups else ""
    for line in wrap(f"{words} {as_sentence(note)}".strip(), int((width - 2 * MARGIN) / 6.1)):
        svg.text(MARGIN, end + 9, line, soft=True)
        end += 15
    svg.height = end + 3
    return svg


def _block(svg: Svg, block: Block, left: float, y: float, width: float, height: float) -> None:
    """One rectangle to scale: glyph, name, part, bytes, as far as there is room."""
    svg.rect(
        left,
        y,
        width,
        height,
        svg.fill(look_of(block.scheme, SCHEMES)),
        block.hover,
        f'stroke="{LABEL_INK}" stroke-width=".7"',
    )
    if block.in_host and height >= 7 and width >= 10:
        inner = f'stroke="{LABEL_INK}" stroke-width=".9"'
        svg.rect(left + 2.5, y + 2.5, width - 5, height - 5, "none", extra=inner)
    if height < LABELLED:
        return
    glyph = width >= 64 and block.count == 1
    house = block.in_host and width >= 34
    room = width - 8 - (16 if glyph else 0) - (18 if house else 0)
    text_left = left + 5 + (16 if glyph else 0)
    size = 11 if height >= 14 else 9.5
    sizes = bytes_text(block.num_bytes)
    lines = [
        fit([f"{block.name}, {sizes}", block.name] if height < 30 else [block.name], room, size * _BOLD),
        _whole([block.part, block.short_part], room) if height >= 30 else "",
        _whole([f"{sizes}, host memory", sizes] if block.in_host else [sizes], room)
        if height >= 44 and block.count == 1
        else "",
    ]
    middle = height < 30
    first = y + height / 2 + size * 0.36 if middle else y + 14
    if house:
        _house(svg, left + width - 16, first - 9.5)
    if glyph and lines[0]:
        _glyph(svg, block, left + 5, first - 9.5)
    halo = f'stroke="{look_of(block.scheme, SCHEMES).fill}" stroke-width="3" paint-order="stroke"'
    for i, (named, words) in enumerate([(i == 0, words) for i, words in enumerate(lines) if words]):
        svg.text(text_left, first + 13 * i, words, size=size if named else 10, ink=LABEL_INK, bold=named, extra=halo)


def _whole(candidates: Sequence[str], room: float) -> str:
    """As `fit`, but nothing rather than a cut number."""
    words = fit(candidates, room, 10)
    return "" if words.endswith("…") else words


def _listed(svg: Svg, small: list[Block], left: float, y: float, width: float, lines: int, scale: float) -> None:
    """The blocks too low for a name, one per line, dashed if they are not drawn. The last line sums up the rest."""
    shown = small if len(small) <= lines else small[: lines - 1]
    for i, block in enumerate(shown):
        top = y + 15 * i
        part = f"{block.part}, host" if block.in_host else block.part
        words = fit(
            [f"{block.name}, {part}", f"{block.name}, {bytes_text(block.num_bytes)}", block.name], width - 22, 10
        )
        dashes = ' stroke-dasharray="2 2"' if block.num_bytes * scale < THINNEST else ""
        outline = f'stroke="currentColor" stroke-opacity=".45"{dashes} pointer-events="all"'
        svg.rect(left, top, width, 13, "none", block.hover, outline)
        _glyph(svg, block, left + 3, top + 1.5, "currentColor")
        svg.text(left + 18, top + 10, words, size=10)
    if len(shown) < len(small):
        rest = small[len(shown) :]
        total = bytes_text(sum(block.num_bytes for block in rest))
        words = fit([f"{len(rest)} more, {total}", f"+{len(rest)}, {total}", f"+{len(rest)}"], width - 4, 10)
        svg.text(left + 3, y + 15 * len(shown) + 10, words, size=10, soft=True)


def _held(small: Sequence[Block]) -> str:
    """A tooltip for blocks of which none is drawn."""
    names = ", ".join(block.name for block in small[:4]) + (f" and {len(small) - 4} more" if len(small) > 4 else "")
    return f"{names}\n{bytes_text(sum(block.num_bytes for block in small))}"


def _house(svg: Svg, x: float, y: float) -> None:
    """The host's memory: a house of 11 x 10."""
    svg.path(
        f"M{x:.1f} {y + 5:.1f}l5.5 -5l5.5 5h-1.5v5h-8v-5z",
        f'fill="{LABEL_INK}" fill-opacity=".8" stroke="#fff" stroke-width=".6"',
        "in the host's memory",
    )


def _glyph(svg: Svg, block: Block, x: float, y: float, ink: str = LABEL_INK) -> None:
    """The table as a 10 x 10 outline, the part held here filled."""
    x0, y0 = 10 * block.cols[0] / block.of_cols, 10 * block.rows[0] / block.of_rows
    across = max(10 * (block.cols[1] - block.cols[0]) / block.of_cols, 1)
    down = max(10 * (block.rows[1] - block.rows[0]) / block.of_rows, 1)
    svg.rect(x, y, 10, 10, "none", extra=f'stroke="{ink}" stroke-width=".8"')
    svg.rect(x + min(x0, 9), y + min(y0, 9), across, down, ink, extra='fill-opacity=".7"')


def _legend(ranks: list[list[Block]]) -> list[tuple[Any, str]]:
    """The schemes in use, each with the number of tables it cuts."""
    tables: dict[str, set[str]] = {}
    for blocks in ranks:
        for block in blocks:
            tables.setdefault(block.scheme, set()).add(block.table)
    order = [name for name in SCHEMES if name in tables] + sorted(set(tables) - set(SCHEMES))
    looks = [(look_of(name, SCHEMES), len(tables[name])) for name in order]
    return [(look, f"{look.label} ({counted(count, 'table')})") for look, count in looks]


def _routes(ranks: list[list[Block]]) -> str:
    """A sentence on tables with another output path than direct; empty if none has one."""
    tables: dict[str, set[str]] = {}
    for block in (block for blocks in ranks for block in blocks if block.route != "direct"):
        tables.setdefault(block.route, set()).add(block.table)
    said = []
    for route, names in sorted(tables.items()):
        listed = sorted(names)
        named = ", ".join(listed) if len(listed) <= 4 else f"{', '.join(listed[:3])} and {len(listed) - 3} more"
        said.append(f"{route} ({named})")
    return f" Output path: {' and '.join(said)}." if said else ""


def _in_host(ranks: list[list[Block]]) -> str:
    """A sentence on the bytes in host memory; empty if none are there."""
    held = sum(block.num_bytes for blocks in ranks for block in blocks if block.in_host)
    return f" Host memory holds {bytes_text(held)}." if held else ""


def _numbers(ranks: list[list[Block]], totals: list[float], row: Row) -> TextTable:
    """A row per shard where they can be read one by one, else a row per rank."""
    if sum(map(len, ranks)) <= 64:
        routed = any(b.route != "direct" for blocks in ranks for b in blocks)
        tiers = any(b.in_host for blocks in ranks for b in blocks)
        rows = [
            [
                str(row.numbers[rank]),
                b.table,
                look_of(b.scheme, SCHEMES).label,
                *([b.route] if routed else []),
                *(["host" if b.in_host else "own"] if tiers else []),
                _span(b.rows),
                _span(b.cols),
                bytes_text(b.num_bytes),
            ]
            for rank, blocks in enumerate(ranks)
            for b in blocks
        ]
        heads = ("rank", "table", "scheme", *(["route"] if routed else []), *(["memory"] if tiers else []))
        heads = (*heads, "rows", "cols", "bytes")
        return TextTable(heads, rows)
    rows = [[str(row.numbers[rank]), f"{len(b):,}", bytes_text(totals[rank])] for rank, b in enumerate(ranks)]
    return TextTable(("rank", "shards", "bytes"), rows)


def _span(pair: tuple[int, int]) -> str:
    return f"{pair[0]:,} to {pair[1]:,}"
