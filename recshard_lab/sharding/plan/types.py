"""What a plan is made of: shards, the names of schemes and kernels, and the error of an invalid plan.

Names are spelled as TorchRec spells them. They are strings: ``ShardingType.ROW_WISE`` and ``"row_wise"`` are equal.
A scheme that you register under another name needs no entry here.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any

from recshard_lab.sharding.plan.tiling import Rect


class PlanError(ValueError):
    """An invalid plan: it has a hole or an overlap, names an unknown table or rank, or exceeds memory.

    Attributes:
        search: the plans that a planner with ``keep_search=True`` compared before it found that none fits; else None.
    """

    search: Any = None


HBM, DDR = "hbm", "ddr"
TIERS = (HBM, DDR)
"""Memories of a rank: the device's and the host's. On a CPU rank both are the same memory."""


@dataclass(frozen=True, order=True, slots=True, repr=False)
class Shard:
    """One rectangle of one table: ``rows [r0, r1) x cols [c0, c1)`` on ``rank``, in one of the rank's memories.

    Args:
        tier: "hbm", the device's memory; "ddr", the host's memory, larger and slower.

    >>> Shard(rank=1, rows=(0, 500), cols=(0, 64)).num_elements
    32000
    """

    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    tier: str = HBM

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_cols(self) -> int:
        return self.cols[1] - self.cols[0]

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_cols

    @property
    def rect(self) -> Rect:
        """Rows and columns, without the rank."""
        return (self.rows, self.cols)

    def __str__(self) -> str:
        return f"{rect_text(self.rect)} on rank {self.rank}"

    def __repr__(self) -> str:
        slow = "" if self.tier == HBM else f", tier={self.tier!r}"
        return f"Shard(rank={self.rank!r}, rows={self.rows!r}, cols={self.cols!r}{slow})"


def rect_text(rect: Rect) -> str:
    """A rectangle in words, for messages.

    >>> rect_text(((0, 1682), (0, 16)))
    'rows [0, 1,682) x cols [0, 16)'
    """
    (r0, r1), (c0, c1) = rect
    return f"rows [{r0:,}, {r1:,}) x cols [{c0:,}, {c1:,})"


@unique
class ShardingType(StrEnum):
    """How a table is split into shards.

    >>> ShardingType.ROW_WISE == "row_wise"
    True
    """

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


@unique
class EmbeddingComputeKernel(StrEnum):
    """How a shard's weights are updated: FUSED in the backward pass, DENSE by an optimizer that reads ``.grad``.

    FUSED_UVM is FUSED with the weights in the host's memory, looked up and stepped there. FUSED_UVM_CACHING also stores
    them there, and looks up and steps cached rows in the rank's memory.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"


ROUTES = ("direct", "reduce_scatter", "two_hop")
"""Output paths: how looked-up rows return to the source ranks. All paths give the same result.

direct: each rank sends its partial rows to every source rank, which adds them. reduce_scatter: a reduce-scatter adds
them. two_hop: partial rows are added inside each node first, then each node sends one message.
"""

DISTINCT_ROWS = "distinct_rows"
"""The output path on which each distinct id of a batch travels once, without its bag, and its row returns unpooled.

The source rank pools. It moves fewer bytes where a shard sees fewer distinct ids than bags: small or skewed tables, and
row shards on many ranks. It does not apply to per-sample weights or variable batches. The planner considers it if it
knows how often ids repeat, see `Workload`.
"""


def check_route(route: object) -> str:
    """`route` as a string.

    Raises:
        PlanError: an unknown route.
    """
    name = str(getattr(route, "value", route))
    known = (*ROUTES, DISTINCT_ROWS)
    if name not in known:
        raise PlanError(
            f"route {name!r} does not exist{nearest(name, known)}; known: {', '.join(known)}. Fix: use one of these"
        )
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` if a known name is similar, otherwise empty."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
