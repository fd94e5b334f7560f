"""An estimate as text."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.sharding.export.text_table import WIDTH, ranks_text, shortened

if TYPE_CHECKING:
    from recshard_lab.planner.model.estimate import Estimate

UNITS = {"GB": 1e9, "MB": 1e6, "KB": 1e3}
MOST_LETTERS = 26  # of a list of ranks
MOST_RANKS = 8  # lines of a text table; the slowest ranks are kept


def gigabytes(num_bytes: float) -> str:
    """Bytes in the unit that reads best.

    >>> gigabytes(20_480_000_000), gigabytes(1_500_000)
    ('20.5 GB', '1.5 MB')
    """
    for unit, size in UNITS.items():
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def usable_text(usable: float, capacity: float) -> str:
    """What a plan may use of a rank's memory.

    >>> usable_text(68e9, 80e9)
    '68.0 of 80.0 GB usable'
    """
    words = gigabytes(capacity)
    return f"{usable / UNITS.get(words.split()[-1], 1):,.1f} of {words} usable"


def ranks_word(ranks: Sequence[int]) -> str:
    """Ranks by name; a list that is too long to read is counted and cut.

    >>> ranks_word([3]), ranks_word([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2,5')
    >>> ranks_word(range(0, 64, 2))
    '32 ranks (0,2,4,6,8,10,12,14,16,18,…)'
    """
    runs = ranks_text(ranks)
    if len(runs) > MOST_LETTERS:
        return f"{len(ranks)} ranks ({shortened(runs, MOST_LETTERS)})"
    return f"rank{'s' if len(ranks) > 1 else ''} {runs}"


def estimate_text(found: "Estimate") -> str:
    """At most 100 columns: the step, then a line a rank (the slowest eight)."""
    order = np.argsort(-found.ms.sum(axis=1), kind="stable")[:MOST_RANKS]
    header = f"{'rank':>4} " + " ".join(
        f"{name.replace('output_dist_backward', 'output_bwd'):>15}" for name in found.phases
    )
    piped = [] if found.overlap is None else textwrap.wrap(str(found.overlap), WIDTH)
    in_host = []
    if found.host_bytes is not None:
        most = gigabytes(found.host_bytes.max())
        in_host = [f"in the host's memory: {most} of {gigabytes(found.host_room_bytes)} a rank"]
    too_full = [
        f"too full{where}: {ranks_word(ranks)}"
        for where, ranks in (("", found.overfull_ranks), (" in the host's memory", found.host_overfull_ranks))
        if ranks
    ]
    bound = [] if found.gap is None else [f"no plan is shorter than {found.lower_bound:.2f} ms: gap {found.gap:.1%}"]
    lines = [
        f"predicted step {found.step_ms:.2f} ms (busiest rank {found.critical_rank}: {found.max_rank_ms:.2f} ms)",
        f"{'fits' if found.fits else 'DOES NOT FIT'}: the fullest rank holds {gigabytes(found.fullest_bytes)}, "
        f"{usable_text(found.usable_bytes[0], found.capacity_bytes[0])}",
        *in_host,
        *too_full,
        *piped,
        *bound,
        header,
    ]
    for rank in sorted(order.tolist()):
        lines.append(f"{rank:>4} " + " ".join(f"{ms:>15.3f}" for ms in found.ms[rank]))
    if len(order) < len(found.ms):
        lines.append(f"  ... and {len(found.ms) - len(order)} ranks with less work")
    return "\n".join(lines)
