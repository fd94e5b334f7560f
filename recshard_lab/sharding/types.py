"""The names of the schemes and of the kernels, spelled as TorchRec spells them.

They are strings, so ``ShardingType.ROW_WISE`` and ``"row_wise"`` mean the same everywhere, and a scheme that a
reader registers under a name of their own needs no entry here.
"""

import difflib
from collections.abc import Iterable
from enum import StrEnum, unique

from recshard_lab.sharding.shard import PlanError


@unique
class ShardingType(StrEnum):
    """How a table is cut.

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

    FUSED_UVM is FUSED with the weights in the host's memory, looked up and stepped there.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"


ROUTES = ("direct", "reduce_scatter", "two_hop")
"""How looked-up rows come home; every route gives the same result.

direct: each rank sends its partial rows to every home, which adds them. reduce_scatter: they are added on the way.
two_hop: they are added inside each node first, and one message a node goes on.
"""


def check_route(route: object) -> str:
    """`route` as a string, after refusing what is none."""
    name = str(getattr(route, "value", route))
    if name not in ROUTES:
        raise PlanError(
            f"route {name!r} does not exist{nearest(name, ROUTES)}; known: {', '.join(ROUTES)}. Fix: one of these"
        )
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where a known name is near."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
