"""The loads that a rectangle puts on its rank: rows of every ``[K, ...]`` array of the planner.

They add up: the loads of a rank are the sum over its rectangles, whatever tables they belong to. Bytes of the output
side are those for one home, that is for the batch of one rank, in fp32; which of OUT, HOP and SCATTER a rectangle fills
is its table's route. What a codec makes of them is `codec_bytes.py`.
"""

from collections.abc import Sequence
from itertools import pairwise

from recshard_lab.sharding.plan.tiling import Span
from recshard_lab.sharding.plan.types import DISTINCT_ROWS

IN = 0  # bytes of ids from each peer
OUT = 1  # direct: bytes of rows to each home
BACK = 2  # direct, and replicas: bytes of gradients from each home
HOP = 3  # two_hop: bytes of rows for each home, before they are added inside the node
ACROSS = 4  # two_hop: its share of the bytes that its node sends to each home, added up
SCATTER = 5  # reduce_scatter: its share of the bytes that *every* rank puts into the sum for each home
ROWS = 6  # rows that a codec writes in OUT's bytes, and so on to SCATTER's; 0 where no codec adds to a row
IDS = ROWS + 5  # ids from each peer
LOOKUP = IDS + 1  # ms, on a core of its own
UPDATE = IDS + 2  # ms, on a core of its own
NORMS = IDS + 3  # bytes of row norms
LANES = IDS + 4  # features of rectangles
ROW_CUT = IDS + 5  # those of row stripes
SORT = IDS + 6  # ms of packing a replica's ids: mostly of finding the rows that its own batch touches
SUM = IDS + 7  # ms of packing its gradients: mostly of adding them up by row
DEDUP = IDS + 8  # ms on every source rank of finding the distinct ids that it sends
POOL = IDS + 9  # ms on every source rank, in each direction, of passing from rows of distinct ids to rows of all ids
COPIES = IDS + 10  # features of replicas, where there is more than one rank
HOST = IDS + 11  # bytes of weights and optimizer state in the host's memory
MEMORY = IDS + 12  # bytes of weights, optimizer state, input and output buffers, in the rank's own
K = MEMORY + 4
COMPUTED = [LOOKUP, UPDATE, SORT, SUM, DEDUP, POOL]  # in ms
PLAIN = slice(OUT, SCATTER + 1)  # bytes of rows, before a codec
CODED_ROWS = slice(ROWS, ROWS + 5)
ACROSS_BOTH = [ACROSS, ROWS + ACROSS - OUT]
SCATTER_BOTH = [SCATTER, ROWS + SCATTER - OUT]

DIRECT, REDUCE_SCATTER, TWO_HOP, DISTINCT = 0.0, 1.0, 2.0, 3.0
ROUTE_NUMBERS = {"direct": DIRECT, "reduce_scatter": REDUCE_SCATTER, "two_hop": TWO_HOP, DISTINCT_ROWS: DISTINCT}

BY_NODE = ("table_row_wise", "grid_shard")  # schemes whose row stripes fill a node


def across_shares(cols: Sequence[Span], nodes: Sequence[int]) -> list[float]:
    """Of each rectangle's columns, the share that its node sends on for it once row stripes are added up.

    Stripes of one node that cover the same columns become one message, so each counts for its part of it.

    Args:
        cols: column spans of one table's rectangles.
        nodes: the node that each lies on.

    >>> across_shares([(0, 8), (0, 8), (0, 4)], [0, 0, 1])
    [0.5, 0.5, 1.0]
    """
    shares = [0.0] * len(cols)
    by_node: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        by_node.setdefault(node, []).append(i)
    for members in by_node.values():
        ends = sorted({end for i in members for end in cols[i]})
        for low, high in pairwise(ends):
            holders = [i for i in members if cols[i][0] <= low and high <= cols[i][1]]
            for i in holders:
                shares[i] += (high - low) / len(holders)
    return [share / (end - start) for share, (start, end) in zip(shares, cols, strict=True)]
