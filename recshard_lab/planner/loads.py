"""The loads that a rectangle puts on its rank: rows of every ``[K, ...]`` array of the planner.

They add up: the loads of a rank are the sum over its rectangles, whatever tables they belong to. Bytes of the output
side are those for one home, that is for the batch of one rank; which of OUT, HOP and SCATTER a rectangle fills is its
table's route.
"""

from collections.abc import Sequence
from itertools import pairwise

from recshard_lab.sharding.tiling import Span

IN = 0  # bytes of ids from each peer
OUT = 1  # direct: bytes of rows to each home
BACK = 2  # direct, and replicas: bytes of gradients from each home
HOP = 3  # two_hop: bytes of rows for each home, before they are added inside the node
ACROSS = 4  # two_hop: its share of the bytes that its node sends to each home, added up
SCATTER = 5  # reduce_scatter: its share of the bytes that *every* rank puts into the sum for each home
IDS = 6  # ids from each peer
LOOKUP = 7  # ms
UPDATE = 8  # ms
NORMS = 9  # bytes of row norms
LANES = 10  # features of rectangles
ROW_CUT = 11  # those of row stripes
MEMORY = 12  # bytes of weights, optimizer state, input and output buffers
K = MEMORY + 4
WIRES = slice(IN, SCATTER + 1)

DIRECT, REDUCE_SCATTER, TWO_HOP = 0.0, 1.0, 2.0
ROUTE_NUMBERS = {"direct": DIRECT, "reduce_scatter": REDUCE_SCATTER, "two_hop": TWO_HOP}

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
