"""Functions of ``torchrec.distributed.sharding_plan`` that split a table, and placements as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from recshard_lab.compat import sharding_plan
from recshard_lab.sharding import ShardingType

MIN_CW_DIM = 128


def calculate_shard_sizes_and_offsets(
    tensor: Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: Sequence[int] | None = None,
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes ``[rows, columns]`` and offsets of a table's shards under a scheme.

    Args:
        tensor: the table ``[E, D]``.
        world_size: ranks.
        local_world_size: ranks of a node.
        sharding_type: the scheme.
        col_wise_shard_dim: columns of a column shard. Default: at least 128.
        device_memory_sizes: of row shards: memory of each rank, to which rows are proportional.
        num_buckets: of row shards: buckets of which each shard has whole ones.

    Raises:
        ValueError: an unknown scheme, or rows that are no multiple of the buckets.

    >>> import torch
    >>> calculate_shard_sizes_and_offsets(torch.empty(10, 4), 2, 2, "row_wise")
    ([[5, 4], [5, 4]], [[0, 0], [5, 0]])
    """
    rows, cols = tensor.shape
    if sharding_type == "data_parallel":
        return [[rows, cols]] * world_size, [[0, 0]] * world_size
    if sharding_type == "table_wise":
        return [[rows, cols]], [[0, 0]]
    by_row = [rows]
    if sharding_type == "row_wise":
        by_row = _rows_of(rows, world_size, device_memory_sizes, num_buckets)
    elif sharding_type in ("table_row_wise", "grid_shard"):
        by_row = _equal(rows, local_world_size)
    elif sharding_type not in ("column_wise", "table_column_wise"):
        raise ValueError(f"sharding_type={sharding_type!r} is unknown. Fix: use a value of ShardingType")
    by_col = [cols] if sharding_type in ("row_wise", "table_row_wise") else _columns_of(cols, col_wise_shard_dim)
    tops, lefts = (list(accumulate(sizes, initial=0))[:-1] for sizes in (by_row, by_col))
    return (
        [[height, width] for width in by_col for height in by_row],
        [[min(top, rows), left] for left in lefts for top in tops],
    )


def _equal(rows: int, ranks: int) -> list[int]:
    """Equal row shards, rounded up; the last ones have fewer rows."""
    block = -(-rows // ranks)
    return [max(0, min(block, rows - number * block)) for number in range(ranks)]


def _rows_of(rows: int, ranks: int, memory: Sequence[int] | None, buckets: int | None) -> list[int]:
    if memory is not None:
        sizes = [rows * own // sum(memory) for own in memory]
        return [*sizes[:-1], rows - sum(sizes[:-1])]
    if buckets is None:
        return _equal(rows, ranks)
    if rows % buckets:
        raise ValueError(f"{rows} rows are not divisible by {buckets} buckets. Fix: use a divisor of {rows}")
    least, more = divmod(buckets, ranks)
    return [(least + (number < more)) * (rows // buckets) for number in range(ranks)]


def _columns_of(cols: int, width: int | None) -> list[int]:
    """Column shards of one width, which divides the columns; otherwise one shard."""
    width = max(MIN_CW_DIM, 0) if width is None else width
    return [width] * (cols // width) if width < cols and cols % width == 0 else [cols]


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """A shard's placement as text.

    >>> placement("cuda", 3, 2), placement("cpu", 3, 2)
    ('rank:3/cuda:1', 'rank:3/cpu')
    """
    return f"rank:{rank}/cpu" if compute_device == "cpu" else f"rank:{rank}/{compute_device}:{rank % local_size}"


def placement_helper(device_type: str, index: int = 0, rank: int = 0) -> str:
    """A shard's placement as text, on a device by its number. CPU shards are those of rank 0.

    >>> placement_helper("cuda", 1, 3)
    'rank:3/cuda:1'
    """
    return "rank:0/cpu" if device_type == "cpu" else f"rank:{rank}/{device_type}:{index}"


def get_sharding_constructor_from_type(sharding_type: ShardingType) -> Callable[..., Any]:
    """The function that makes the generators of a scheme, such as `row_wise`.

    Raises:
        KeyError: a scheme without one.
    """
    makers = {
        "data_parallel": sharding_plan.data_parallel,
        "table_wise": sharding_plan.table_wise,
        "row_wise": sharding_plan.row_wise,
        "column_wise": sharding_plan.column_wise,
        "table_row_wise": sharding_plan.table_row_wise,
        "grid_shard": sharding_plan.grid_shard,
    }
    return makers[str(getattr(sharding_type, "value", sharding_type))]
