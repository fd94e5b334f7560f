"""Replica grid: ranks of a `DMPCollection` in two dimensions, replica by shard, and what is sent along each of them.

Shape letters: R replicas (rows), S ranks of a sharding group (columns), W = R x S ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, SCHEMES, bytes_text, counted, look_of, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.blocks import Block, blocks_by_rank
from recshard_lab.lab.views.registry import register_view
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.text_table import TextTable

MOST_SHARDS, MOST_REPLICAS, MOST_TABLES, MOST_LISTED = 8, 8, 4, 256
LEAST = 86.0  # pixels of a cell


@dataclass(frozen=True)
class Grid:
    """The ranks, and what the first replica's ranks store.

    Attributes:
        ranks: ``[R][S]``.
        blocks: for each of S positions, its shards.
        local: ranks of a node; None if unknown.
    """

    ranks: list[list[int]]
    blocks: list[list[Block]]
    local: int | None

    def bytes_of(self, position: int) -> float:
        """Weights that each rank of this position stores."""
        return float(sum(block.num_bytes for block in self.blocks[position]))

    def sync_bytes(self, position: int) -> float:
        """Weights that a rank of this position sends in a sync: a ring all-reduce over R ranks."""
        replicas = len(self.ranks)
        return 2 * (replicas - 1) / replicas * self.bytes_of(position)

    def crosses(self, groups: Sequence[Sequence[int]]) -> bool | None:
        """Whether a group has ranks of several nodes; None if nodes are unknown."""
        if self.local is None:
            return None
        return any(len({rank // self.local for rank in group}) > 1 for group in groups)


@register_view("Replica grid", place=23)
def replica_grid(
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    sharding_groups: Sequence[Sequence[int]],
    *,
    topology: Topology | None = None,
    note: str = "",
    width: int = 860,
) -> View:
    """Ranks as replicas (rows) by shards (columns). A step exchanges along a row, `sync` averages along a column.

    Args:
        plan: of one sharding group, for its ranks ``0 .. S - 1``.
        tables: their configs.
        sharding_groups: the ranks of each replica, as `DMPCollection.grid.sharding_groups` has them.
        topology: for the ranks of each node.
        note: a sentence under the summary.
        width: of the picture, in pixels.
    """
    title = "Replica grid"
    if not tables:
        return message_view("replica_grid", title, "The plan has no table.")
    ranks = [list(group) for group in sharding_groups]
    every = sorted(rank for group in ranks for rank in group)
    if not every or len({len(group) for group in ranks}) > 1 or every != list(range(len(every))):
        raise ValueError(
            f"sharding_groups must have each rank once, in groups of one size, got {ranks!r:.80}. "
            f"Fix: sharding_groups=dmp.grid.sharding_groups"
        )
    size = len(ranks[0])
    local = topology.local_world_size if topology is not None else None
    grid = Grid(ranks, blocks_by_rank(plan, tables, size, None), local)
    replicas = len(ranks)
    title = f"Replica grid: {counted(replicas, 'replica')} x {counted(size, 'shard')}"
    synced = max(grid.sync_bytes(position) for position in range(size))
    columns = [list(column) for column in zip(*ranks, strict=True)]
    summary = f"Each row is a whole model. A step exchanges rows along a row{_where(grid.crosses(ranks))}. "
    summary += f"sync averages along a column{_where(grid.crosses(columns))}: at most {bytes_text(synced)} a rank."
    if replicas == 1:
        summary = f"One replica on {counted(size, 'rank')}: no sync is needed."
    listed = f"the table lists the first {MOST_LISTED} ranks" if len(every) > MOST_LISTED else ""
    summary = with_notes(summary, [listed, note.removesuffix(".")])
    rows = [
        [
            str(rank),
            str(replica),
            str(position),
            "" if local is None else str(rank // local),
            bytes_text(grid.bytes_of(position)),
            bytes_text(grid.sync_bytes(position)),
        ]
        for replica, group in enumerate(ranks)
        for position, rank in enumerate(group)
    ]
    numbers = TextTable(("rank", "replica", "shard", "node", "weights", "sent in a sync"), rows[:MOST_LISTED])
    return View(
        "replica_grid",
        title,
        summary,
        numbers,
        lambda uid: _draw(grid, title, summary, width, uid),
    )


def _where(crosses: bool | None) -> str:
    return "" if crosses is None else ", across nodes" if crosses else ", inside a node"


def _draw(grid: Grid, title: str, summary: str, width: int, uid: str) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 34
    replicas, size = len(grid.ranks), len(grid.ranks[0])
    left, gap = MARGIN + 76.0, 18.0
    across = min(size, MOST_SHARDS, max(1, int((width - left - MARGIN + gap) / (LEAST + gap))))
    down = min(replicas, MOST_REPLICAS)
    each = min(190.0, (width - left - MARGIN - gap * (across - 1)) / across)
    lines = max(min(len(blocks), MOST_TABLES) + (len(blocks) > MOST_TABLES) for blocks in grid.blocks[:across])
    high = 40.0 + 16 * lines
    right = left + across * each + (across - 1) * gap
    for position in range(across):
        x = left + position * (each + gap)
        svg.text(
            x + each / 2, top - 18, fit([f"shard {position}", str(position)], each, 11), anchor="middle", bold=True
        )
        size_text = fit(
            [f"{bytes_text(grid.bytes_of(position))} of weights", bytes_text(grid.bytes_of(position))], each, 10
        )
        svg.text(x + each / 2, top - 5, size_text, anchor="middle", size=10)
    for replica in range(down):
        y = top + replica * (high + gap)
        svg.text(MARGIN, y + high / 2 + 4, f"replica {replica}", bold=True)
        if across > 1:
            svg.line(left, y + high / 2, right, y + high / 2, 'stroke-width="2.4"')
        for position in range(across):
            x = left + position * (each + gap)
            if replica + 1 < down:
                svg.line(
                    x + each / 2, y + high, x + each / 2, y + high + gap, 'stroke-width="2.4" stroke-dasharray="4 3"'
                )
            _cell(svg, x, y, each, high, grid, replica, position)
    y = top + down * (high + gap) + 4
    for dash, words in (("", "solid: ids, rows and gradients of every step"), ("4 3", "dashed: averages of a sync")):
        svg.line(MARGIN, y - 4, MARGIN + 26, y - 4, f'stroke-width="2.4" stroke-dasharray="{dash}"')
        svg.text(MARGIN + 34, y, words)
        y += 17
    used = dict.fromkeys(block.scheme for blocks in grid.blocks[:across] for block in blocks)
    y = svg.legend(MARGIN, y - 6, [(look_of(n, SCHEMES), look_of(n, SCHEMES).label) for n in used], width - 2 * MARGIN)
    hidden = [counted(size - across, "shard")] if across < size else []
    hidden += [counted(replicas - down, "replica")] if down < replicas else []
    if hidden:
        svg.text(MARGIN, y + 8, f"Not drawn: {', '.join(hidden)}.", soft=True)
        y += 18
    svg.height = y + 4
    return svg


def _cell(svg: Svg, x: float, y: float, wide: float, high: float, grid: Grid, replica: int, position: int) -> None:
    """One rank with its shards, a line for each of the first tables."""
    rank, blocks = grid.ranks[replica][position], grid.blocks[position]
    hover = f"rank {rank}: replica {replica}, shard {position}, {bytes_text(grid.bytes_of(position))} of weights"
    svg.rect(x, y, wide, high, "#b9cfe8", hover, f'rx="6" stroke="{LABEL_INK}"')
    node = "" if grid.local is None else f", node {rank // grid.local}"
    svg.text(
        x + 9, y + 18, fit([f"rank {rank}{node}", f"rank {rank}"], wide - 14, 12), ink=LABEL_INK, bold=True, size=12
    )
    for n, block in enumerate(blocks[:MOST_TABLES]):
        line = y + 28 + 16 * n
        svg.rect(
            x + 9,
            line,
            11,
            11,
            svg.fill(look_of(block.scheme, SCHEMES)),
            extra=f'stroke="{LABEL_INK}" stroke-width=".6"',
        )
        part = f"{block.table} rows {block.rows[0]:,} to {block.rows[1] - 1:,}"
        svg.text(x + 25, line + 10, fit([part, block.table], wide - 32, 10), size=10, ink=LABEL_INK)
    if len(blocks) > MOST_TABLES:
        line = y + 38 + 16 * MOST_TABLES
        svg.text(x + 25, line, f"+{len(blocks) - MOST_TABLES} more", size=10, ink=LABEL_INK)
    if not blocks:
        svg.text(x + 9, y + 36, "no shard", size=10, ink=LABEL_INK)
