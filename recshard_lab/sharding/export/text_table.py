"""A plan as a text table of at most 100 columns, and the same as HTML."""

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from recshard_lab.sharding.plan.types import DDR, Shard
from recshard_lab.sharding.plan.validate import replica_flags

if TYPE_CHECKING:
    from recshard_lab.sharding.plan.sharding_plan import ShardingPlan

WIDTH = 100
_HEADER = ("table", "size", "scheme", "kernel", "ranks", "route", "shards")
_WIDEST = (24, 20, 18, 9, 12, 14, 40)
_NARROWEST = 16  # of the first column
_KERNEL, _ROUTE = _HEADER.index("kernel"), _HEADER.index("route")


def text_table(plan: "ShardingPlan") -> str:
    """One line per table; long cells end in an ellipsis so that lines fit `WIDTH`."""
    lines = [_HEADER, *rows(plan)]
    keep = _kept(lines)
    return align([[line[c] for c in keep] for line in lines], [_WIDEST[c] for c in keep], WIDTH)


def html_table(plan: "ShardingPlan") -> str:
    """The plan as an HTML table, with full cells."""

    def line(cells: Iterable[str], tag: str) -> str:
        return (
            "<tr>" + "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in cells) + "</tr>"
        )

    lines = [_HEADER, *rows(plan)]
    keep = _kept(lines)
    head, *body = ([cells[c] for c in keep] for cells in lines)
    text = "".join(line(cells, "td") for cells in body)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{text}</tbody></table>"


def rows(plan: "ShardingPlan") -> list[tuple[str, ...]]:
    """The cells: table (with its module if there are several), size, scheme, kernel, ranks, route, shards."""
    several = len(plan.plan) > 1
    return [
        (
            f"{path}.{name}" if several and path else name,
            _size(sharding.shards),
            sharding.sharding_type,
            sharding.compute_kernel,
            "all" if sharding.replicated and not sharding.shards else ranks_text(sharding.ranks or []),
            "" if sharding.replicated else sharding.route,
            shards_text(sharding.shards),
        )
        for path, tables in plan.plan.items()
        for name, sharding in tables.items()
    ]


def _kept(lines: Sequence[Sequence[str]]) -> list[int]:
    """Indices of the columns to show.

    Routes are shown if one is not direct. Then kernels are shown only if one is not fused, to save space.
    """
    routes = {line[_ROUTE] for line in lines[1:]} - {"direct", ""}
    kernels = {line[_KERNEL] for line in lines[1:]} - {"fused"}
    hidden = {_ROUTE} if not routes else set() if kernels else {_KERNEL}
    return [c for c in range(len(_HEADER)) if c not in hidden]


def align(lines: Sequence[Sequence[str]], widest: Sequence[int], width: int) -> str:
    """Columns two spaces apart, each at most `widest` wide, together at most `width`.

    If the space does not suffice, the first column is shortened, then the last.
    """
    limits = [min(most, max(len(line[c]) for line in lines)) for c, most in enumerate(widest)]
    missing = sum(limits) + 2 * (len(limits) - 1) - width
    if missing > 0:
        first = min(missing, max(0, limits[0] - _NARROWEST))
        limits[0] -= first
        limits[-1] -= missing - first
    return "\n".join(
        "  ".join(shortened(cell, limit).ljust(limit) for cell, limit in zip(line, limits, strict=True)).rstrip()
        for line in lines
    )


def shortened(text: str, limit: int) -> str:
    """`text`, shortened to `limit` characters with an ellipsis if it is longer."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as runs.

    >>> ranks_text([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def shards_text(shards: Sequence[Shard]) -> str:
    """Replicated shards, then counts of the other shards by size, most frequent first.

    >>> shards_text([Shard(0, (0, 5), (0, 4)), Shard(1, (5, 10), (0, 4)), Shard(2, (10, 12), (0, 4))])
    '2 x [5 x 4], 1 x [2 x 4]'
    >>> shards_text([Shard(0, (0, 5), (0, 4)), Shard(1, (0, 5), (0, 4)), Shard(1, (5, 12), (0, 4))])
    '[5 x 4] everywhere, 1 x [7 x 4]'
    """
    copies = replica_flags([shard.rect for shard in shards])
    if all(copies):
        copies = (False,) * len(shards)
    hot = dict.fromkeys(shard.rect for shard, copy in zip(shards, copies, strict=True) if copy)
    words = [f"[{r1 - r0:,} x {c1 - c0:,}] everywhere" for (r0, r1), (c0, c1) in hot]
    mixed = len({shard.tier for shard in shards}) > 1
    sizes = Counter(
        (s.num_rows, s.num_cols, " in ddr" if mixed and s.tier == DDR else "")
        for s, copy in zip(shards, copies, strict=True)
        if not copy
    )
    return ", ".join([*words, *(f"{count} x [{r:,} x {c:,}]{where}" for (r, c, where), count in sizes.most_common())])


def _size(shards: Sequence[Shard]) -> str:
    if not shards:
        return "?"
    num_rows, num_cols = max(shard.rows[1] for shard in shards), max(shard.cols[1] for shard in shards)
    return f"{num_rows:,} x {num_cols:,}"
