"""Bytes, milliseconds, ranks, placements and estimates as text."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.planner.model.memory import INDEX
from recshard_lab.sharding.export.plan_table import ranks_text
from recshard_lab.sharding.plan.types import nearest
from recshard_lab.text_table import TextTable, shortened, wrapped

if TYPE_CHECKING:
    from recshard_lab.planner.model.estimate import Estimate
    from recshard_lab.sharding import ParameterSharding

UNITS = {"GB": 1e9, "MB": 1e6, "KB": 1e3}
MOST_LETTERS = 26  # of a list of ranks
MOST_RANKS = 8  # rows of an estimate's table; the slowest ranks are kept


def gigabytes(num_bytes: float) -> str:
    """Bytes in the unit that reads best.

    >>> gigabytes(20_480_000_000), gigabytes(1_500_000)
    ('20.5 GB', '1.5 MB')
    """
    for unit, size in UNITS.items():
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def milliseconds(ms: float) -> str:
    """Three digits, or two decimals from 1 ms on.

    >>> milliseconds(27.3456), milliseconds(0.0273456)
    ('27.35 ms', '0.0273 ms')
    """
    return f"{ms:.2f} ms" if ms >= 1 else f"{ms:.3g} ms"


def use_one_of(name: object, names: Collection[str]) -> str:
    """The end of an error for a name that does not exist.

    >>> use_one_of("row_wide", ["table_wise", "row_wise"])
    " (did you mean 'row_wise'?). Fix: use one of table_wise, row_wise"
    """
    listed = ", ".join(list(names)[:16]) + (", ..." if len(names) > 16 else "")
    return f"{nearest(str(name)[:80], names)}. Fix: use one of {listed}"


def usable_text(usable: float, capacity: float) -> str:
    """The memory of a rank that a plan may use.

    >>> usable_text(68e9, 80e9)
    '68.0 of 80.0 GB usable'
    """
    words = gigabytes(capacity)
    return f"{usable / UNITS.get(words.split()[-1], 1):,.1f} of {words} usable"


def ranks_word(ranks: Sequence[int]) -> str:
    """Ranks by name; a list that is too long to read is counted and shortened.

    >>> ranks_word([3]), ranks_word([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2,5')
    >>> ranks_word(range(0, 64, 2))
    '32 ranks (0,2,4,6,8,10,12,14,16,18,…)'
    """
    runs = ranks_text(ranks)
    if len(runs) > MOST_LETTERS:
        return f"{len(ranks)} ranks ({shortened(runs, MOST_LETTERS)})"
    return f"rank{'s' if len(ranks) > 1 else ''} {runs}"


def sharding_text(sharding: "ParameterSharding") -> str:
    """Scheme, ranks, and the output path if it is not the direct one.

    >>> from recshard_lab.sharding import ParameterSharding
    >>> sharding_text(ParameterSharding("row_wise", ranks=[0, 1], route="two_hop"))
    'row_wise on ranks 0-1 by two_hop'
    """
    ranks = sorted(set(sharding.ranks or []))
    named = ranks_word(ranks)
    where = "all ranks" if sharding.replicated else named if len(named) <= MOST_LETTERS else f"{len(ranks)} ranks"
    return f"{sharding.sharding_type} on {where}{'' if sharding.route == 'direct' else f' by {sharding.route}'}"


def estimate_text(costs: "Estimate") -> str:
    """The step, the memory, and a row per rank (the slowest eight), in lines of at most 100 characters."""
    lines = [
        f"predicted step {costs.step_ms:.2f} ms (rank with the most work: {costs.critical_rank}, "
        f"{costs.max_rank_ms:.2f} ms)",
        f"{'fits' if costs.fits else 'DOES NOT FIT'}: the fullest rank holds {gigabytes(costs.fullest_bytes)}, "
        f"{usable_text(costs.usable_bytes[0], costs.capacity_bytes[0])}",
    ]
    if INDEX in costs.memory_categories:
        most = gigabytes(costs.memory_bytes[:, costs.memory_categories.index(INDEX)].max())
        lines.append(f"indexes of dynamic tables: at most {most} of a rank's memory")
    if costs.host_bytes is not None:
        most = gigabytes(costs.host_bytes.max())
        lines.append(f"in the host's memory: {most} of {gigabytes(costs.host_room_bytes)} per rank")
    for where, ranks in (("", costs.overfull_ranks), (" in the host's memory", costs.host_overfull_ranks)):
        if ranks:
            lines.append(f"too full{where}: {ranks_word(ranks)}")
    if costs.overlap is not None:
        lines.append(str(costs.overlap))
    slowest = np.argsort(-costs.ms.sum(axis=1), kind="stable")[:MOST_RANKS]
    names = [name.replace("output_dist_backward", "output_bwd") for name in costs.phases]
    rows = [[str(rank), *(f"{ms:.3f}" for ms in costs.ms[rank])] for rank in sorted(slowest.tolist())]
    text = [*map(wrapped, lines), TextTable(["rank", *names], rows, right=range(1 + len(names))).text]
    if len(slowest) < len(costs.ms):
        more = len(costs.ms) - len(slowest)
        text.append(f"... and {more} rank{'s' * (more != 1)} with less work")
    return "\n".join(text)
