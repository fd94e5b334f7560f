"""The loads that a shard puts on its rank: rows of every ``[K, ...]`` array of the planner.

Loads are additive: a rank's loads are the sum over its shards, of all tables. Output bytes are those of one source
rank's batch, in fp32. The table's output path decides which of OUT, HOP and SCATTER a shard fills. `codecs.py` computes
the bytes of another number format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from recshard_lab.planner.workload import Array
from recshard_lab.sharding.plan.tiling import Span
from recshard_lab.sharding.plan.types import DISTINCT_ROWS

IN = 0  # bytes of ids from each peer
OUT = 1  # direct: bytes of rows to each source rank
BACK = 2  # direct, and replicas: bytes of gradients from each source rank
HOP = 3  # two_hop: bytes of rows for each source rank, before the sum inside the node
ACROSS = 4  # two_hop: the shard's share of the summed bytes that its node sends to each source rank
SCATTER = 5  # reduce_scatter: its share of the bytes that *every* rank adds for each source rank
ROWS = 6  # rows that a codec writes in OUT's bytes, and so on to SCATTER's; 0 if no codec has bytes per row
IDS = ROWS + 5  # ids from each peer
LOOKUP = IDS + 1  # ms, on a core that the rank does not share
UPDATE = IDS + 2  # ms, on a core that the rank does not share
NORMS = IDS + 3  # bytes of row norms
SHARD_FEATURES = IDS + 4  # features of shards
ROW_CUT = IDS + 5  # features of row shards
SORT = IDS + 6  # ms of packing a replica's ids, mostly of finding the rows that its local batch touches
SUM = IDS + 7  # ms of packing its gradients, mostly of adding them by row
DEDUP = IDS + 8  # ms on every source rank to find the distinct ids that it sends
POOL = IDS + 9  # ms on every source rank, in each direction, between rows of distinct ids and rows of all ids
COPIES = IDS + 10  # features of replicas, if there is more than one rank
HOST = IDS + 11  # bytes of weights and optimizer state in host memory
MEMORY = IDS + 12  # bytes of weights, optimizer state, input and output buffers, in the rank's memory
K = MEMORY + 4
COMPUTED = [LOOKUP, UPDATE, SORT, SUM, DEDUP, POOL]  # in ms
PLAIN = slice(OUT, SCATTER + 1)  # bytes of rows, before a codec
CODED_ROWS = slice(ROWS, ROWS + 5)
ACROSS_BOTH = [ACROSS, ROWS + ACROSS - OUT]
SCATTER_BOTH = [SCATTER, ROWS + SCATTER - OUT]

DIRECT, REDUCE_SCATTER, TWO_HOP, DISTINCT = 0.0, 1.0, 2.0, 3.0
ROUTE_NUMBERS = {"direct": DIRECT, "reduce_scatter": REDUCE_SCATTER, "two_hop": TWO_HOP, DISTINCT_ROWS: DISTINCT}

BY_NODE = ("table_row_wise", "grid_shard")  # schemes whose row shards fill a node


@dataclass(frozen=True, eq=False)
class Rects:
    """n shards, as `CostModel.rect_loads` takes them.

    Attributes:
        of: ``[n]`` table of each shard, an integer; rows, cols: ``[n]`` its sizes.
        replicated: ``[n]`` 1.0 for a replica: it sends no row in forward.
        dense: ``[n]`` 1.0 for kernel "dense": a gradient of the whole shard, and an optimizer over it.
        route: ``[n]`` DIRECT, REDUCE_SCATTER, TWO_HOP or DISTINCT. Default: all direct. The load ACROSS is that of a
            single shard on its node; scale it by `across_shares`.
        by_node: ``[n]`` 1.0 for a shard of a scheme whose row shards fill one node. Only TorchRec's formulas use it.
        first: ``[n]`` first row of each shard, used if lookups spread unevenly over the rows. Default: 0.
        host: ``[n]`` 1.0 for shards in host memory. Default: none; ignored on CPUs.
        cached: ``[n]`` share of the rows that kernel "fused_uvm_caching" caches; 0 for other kernels. Default: none.
    """

    of: Any
    rows: Array
    cols: Array
    replicated: Array
    dense: Array
    route: Array | None = None
    by_node: Array | None = None
    first: Array | None = None
    host: Array | None = None
    cached: Array | None = None


def across_shares(cols: Sequence[Span], nodes: Sequence[int]) -> list[float]:
    """Per shard, the share of its columns that its node sends on after it has added its row shards.

    Row shards of one node with the same columns become one message, so each counts for its part.

    Args:
        cols: column spans of one table's shards.
        nodes: the node of each shard.

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
