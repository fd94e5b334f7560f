"""The loops of the numba kernel that read tables: checks of a batch, lookups, gradients of per-sample weights.

Rows are far apart in memory. Therefore every loop prefetches the row of `AHEAD` ids later.

``features`` is ``[F, 7]`` int64, by the names `BASE`... below; ``ids`` the address of int32 or, ``wide``, int64 ids;
``offsets`` where bags begin ``[F * B + 1]`` int64; ``weights`` the address of the float per-sample weights or 0;
``flat`` 1 for sequences: one bag per shard feature, with its ids' rows one after the other.
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
"""Of each shard feature: address of its shard's weights, columns, whether they are fp16, its first column in the output
(flat: its first number), address of the state, columns of the whole table, rows."""

AHEAD = 32  # 8: a third slower, 64: the same (26 tables x 100k x 64, batch 4096, pooling 10)


def jit(function: Any) -> Any:
    """Machine code that runs without numba and Python: without wrappers, and without allocations."""
    bare = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return njit(nogil=True, boundscheck=False, error_model="numpy", **bare)(function)


@jit
def first_bad_feature(rows: Any, ids: int, wide: int, offsets: Any, total: int, batch: int) -> int:
    """The first shard feature with offsets that do not ascend within ``total`` ids, or an id beyond ``rows``; or -1."""
    for feature in range(len(rows)):
        before = np.int64(0)
        for b in range(feature * batch, (feature + 1) * batch + 1):
            if offsets[b] < before or offsets[b] > total:
                return feature
            before = offsets[b]
        largest = np.uint64(0)  # a negative one is larger than any row
        for i in range(offsets[feature * batch], offsets[(feature + 1) * batch]):
            largest = max(largest, np.uint64(id_at(ids, wide, i)))
        if offsets[feature * batch] < offsets[(feature + 1) * batch] and largest >= np.uint64(rows[feature]):
            return feature
    return -1


# ---- forward ----


@jit
def pool(
    features: Any,
    ids: int,
    wide: int,
    offsets: Any,
    weights: int,
    out: int,
    stride: int,
    batch: int,
    first: int,
    end: int,
) -> None:
    """Sums the bags ``first`` to ``end`` (feature-major) into ``out [batch, stride]``."""
    bag = first
    while bag < end:
        feature = bag // batch
        last = min(end, (feature + 1) * batch)
        base, columns, half = features[feature, BASE], features[feature, DIM], features[feature, HALF]
        size = columns * (2 if half else 4)
        stop = offsets[last]
        for i in range(offsets[bag], min(offsets[bag] + AHEAD, stop)):
            fetch(base + id_at(ids, wide, i) * size, size)
        for b in range(bag, last):
            into = out + 4 * ((b - feature * batch) * stride + features[feature, COLUMN])
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
def gather(features: Any, ids: int, wide: int, offsets: Any, out: int, first: int, end: int) -> None:
    """Copies the rows of the ids ``first`` to ``end`` to their places in the flat ``out``."""
    for feature in range(len(features)):
        start, stop = max(first, offsets[feature]), min(end, offsets[feature + 1])
        base, columns, half = features[feature, BASE], features[feature, DIM], features[feature, HALF]
        size = columns * (2 if half else 4)
        into = out + 4 * (features[feature, COLUMN] - offsets[feature] * columns)
        for i in range(start, stop):
            if i + AHEAD < stop:
                fetch(base + id_at(ids, wide, i + AHEAD) * size, size)
            set_row(into + 4 * i * columns, base + id_at(ids, wide, i) * size, half, np.float32(1), columns)


# ---- backward ----


@jit
def weight_grads(
    features: Any, ids: int, wide: int, offsets: Any, grad: int, stride: int, batch: int, out: int, first: int, end: int
) -> None:
    """The gradients of the per-sample weights in the bags ``first`` to ``end``: row times gradient of the bag."""
    for b in range(first, end):
        feature = b // batch
        base, columns, half = features[feature, BASE], features[feature, DIM], features[feature, HALF]
        size = columns * (2 if half else 4)
        source = grad + 4 * ((b - feature * batch) * stride + features[feature, COLUMN])
        for i in range(offsets[b], offsets[b + 1]):
            put_float(out, i, dot_row(base + id_at(ids, wide, i) * size, half, source, columns))
