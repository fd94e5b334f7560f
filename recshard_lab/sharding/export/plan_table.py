"""A plan as a table: a row per embedding table."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recshard_lab.sharding.plan.types import DDR, Shard
from recshard_lab.sharding.plan.validate import replica_flags
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.sharding.plan.sharding_plan import ShardingPlan

_WIDEST = {"table": 24, "size": 20, "scheme": 18, "kernel": 9, "ranks": 12, "route": 14, "shards": 40}


def plan_table(plan: "ShardingPlan") -> TextTable:
    """Table (with its module if there are several), size, scheme, kernel, ranks, route and shards.

    Routes are shown if one is not direct. Then kernels are shown only if one is not fused, to save space.
    """
    several = len(plan.plan) > 1
    lines = [
        {
            "table": f"{path}.{name}" if several and path else name,
            "size": _size(sharding.shards),
            "scheme": sharding.sharding_type,
            "kernel": sharding.compute_kernel,
            "ranks": "all" if sharding.replicated and not sharding.shards else ranks_text(sharding.ranks or []),
            "route": "" if sharding.replicated else sharding.route,
            "shards": shards_text(sharding.shards),
        }
        for path, tables in plan.plan.items()
        for name, sharding in tables.items()
    ]
    hidden = set()
    if all(line["route"] in ("direct", "") for line in lines):
        hidden = {"route"}
    elif all(line["kernel"] == "fused" for line in lines):
        hidden = {"kernel"}
    heads = [name for name in _WIDEST if name not in hidden]
    return TextTable(heads, [[line[name] for name in heads] for line in lines], widest=[_WIDEST[n] for n in heads])


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
