"""The loops of the numba kernel that read tables: what a batch may ask for, lookups, gradients of weights.

Rows lie far apart in memory: every loop asks for the row that it will need `AHEAD` ids later.

``lanes`` is ``[L, 7]`` int64, by the names `BASE`... below; ``ids`` the address of int32 or, ``wide``, int64 ids;
``offsets`` where bags begin ``[L * B + 1]`` int64; ``weights`` the address of the float per-sample weights or 0;
``flat`` 1 for sequences: one bag a lane, whose ids' rows lie one after the other.
"""

from typing import Any

import numpy as np
from numba import njit

from recshard_lab.embedding.kernels.numba.rows import (
    add_row,
    dot_row,
    fetch,
    float_at,
    id_at,
    put_float,
    set_row,
    zero_row,
)

BASE, DIM, HALF, COLUMN, STATE, FULL_DIM, ROWS = range(7)
"""Of a lane's slot: address of the weights, columns, whether they are half, where the lane begins in a row of output
(flat: in the whole output), address of the state, columns of the whole table, rows."""

AHEAD = 32  # 8: a third slower, 64: the same (26 tables x 100k x 64, batch 4096, pooling 10)


def jit(function: Any) -> Any:
    """Machine code that needs nothing of numba or Python to run: no wrappers, no memory of its own."""
    bare = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return njit(nogil=True, boundscheck=False, error_model="numpy", **bare)(function)


@jit
def first_bad_lane(rows: Any, ids: int, wide: int, offsets: Any, total: int, batch: int) -> int:
    """The first lane whose offsets do not ascend within ``total`` ids or with an id outside of its ``rows``; or -1."""
    for lane in range(len(rows)):
        before = np.int64(0)
        for b in range(lane * batch, (lane + 1) * batch + 1):
            if offsets[b] < before or offsets[b] > total:
                return lane
            before = offsets[b]
        largest = np.uint64(0)  # a negative one is larger than any row
        for i in range(offsets[lane * batch], offsets[(lane + 1) * batch]):
            largest = max(largest, np.uint64(id_at(ids, wide, i)))
        if offsets[lane * batch] < offsets[(lane + 1) * batch] and largest >= np.uint64(rows[lane]):
            return lane
    return -1


# ---- forward ----


@jit
def pool(
    lanes: Any, ids: int, wide: int, offsets: Any, weights: int, out: int, stride: int, batch: int, first: int, end: int
) -> None:
    """Sums the bags ``first`` to ``end`` (lane-major) into ``out [batch, stride]``."""
    bag = first
    while bag < end:
        lane = bag // batch
        last = min(end, (lane + 1) * batch)
        base, columns, half = lanes[lane, BASE], lanes[lane, DIM], lanes[lane, HALF]
        size = columns * (2 if half else 4)
        stop = offsets[last]
        for i in range(offsets[bag], min(offsets[bag] + AHEAD, stop)):
            fetch(base + id_at(ids, wide, i) * size, size)
        for b in range(bag, last):
            into = out + 4 * ((b - lane * batch) * stride + lanes[lane, COLUMN])
            if offsets[b] == offsets[b + 1]:
                zero_row(into, columns)
            for i in range(offsets[b], offsets[b + 1]):
                if i + AHEAD < stop:
                    fetch(base + id_at(ids, wide, i + AHEAD) * size, size)
                factor = float_at(weights, i) if weights else np.float32(1)
                row = base + id_at(ids, wide, i) * size
                if i == offsets[b]:
                    set_row(into, row, half, factor, columns)
                else:
                    add_row(into, row, half, factor, columns)
        bag = last


@jit
def gather(lanes: Any, ids: int, wide: int, offsets: Any, out: int, first: int, end: int) -> None:
    """Copies the rows of the ids ``first`` to ``end`` to their places in the flat ``out``."""
    for lane in range(len(lanes)):
        start, stop = max(first, offsets[lane]), min(end, offsets[lane + 1])
        base, columns, half = lanes[lane, BASE], lanes[lane, DIM], lanes[lane, HALF]
        size = columns * (2 if half else 4)
        into = out + 4 * (lanes[lane, COLUMN] - offsets[lane] * columns)
        for i in range(start, stop):
            if i + AHEAD < stop:
                fetch(base + id_at(ids, wide, i + AHEAD) * size, size)
            set_row(into + 4 * i * columns, base + id_at(ids, wide, i) * size, half, np.float32(1), columns)


# ---- backward ----


@jit
def weight_grads(
    lanes: Any, ids: int, wide: int, offsets: Any, grad: int, stride: int, batch: int, out: int, first: int, end: int
) -> None:
    """The gradients of the per-sample weights in the bags ``first`` to ``end``: row times gradient of the bag."""
    for b in range(first, end):
        lane = b // batch
        base, columns, half = lanes[lane, BASE], lanes[lane, DIM], lanes[lane, HALF]
        size = columns * (2 if half else 4)
        source = grad + 4 * ((b - lane * batch) * stride + lanes[lane, COLUMN])
        for i in range(offsets[b], offsets[b + 1]):
            put_float(out, i, dot_row(base + id_at(ids, wide, i) * size, half, source, columns))
