"""The loops of the numba kernel that read tables: checks of a batch, lookups, gradients of per-sample weights.

Rows are far apart in memory. Therefore every loop prefetches the row of `AHEAD` ids later.

Arrays come as addresses. Every loop takes a ``batch``: ``facts`` is ``[F, FACTS]`` int64, by the names `BASE`... below;
``places`` each shard feature's first column in the output (flat: its first number), int64; ``ids`` int32 or, ``wide``,
int64; ``offsets`` where bags begin ``[F * samples + 1]`` int64; ``weights`` the float per-sample weights or 0;
``samples``; ``flat`` 1 for sequences: one bag per shard feature, with its ids' rows one after the other.
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

BASE, DIM, HALF, STATE, FULL_DIM, ROWS, SHARD = range(7)
"""Of each shard feature: address of its shard's weights, columns, whether they are fp16, address of the state, columns
of the whole table, rows, the shard."""
FACTS = 7

AHEAD = 32  # 8: a third slower, 64: the same (26 tables x 100k x 64, batch 4096, pooling 10)


def jit(function: Any) -> Any:
    """Machine code that runs without numba and Python: without wrappers, and without allocations."""
    bare = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return njit(nogil=True, boundscheck=False, error_model="numpy", **bare)(function)


@jit
def look_at(batch: Any, features: int, total: int, shards: int, counts: Any) -> int:
    """Checks a batch, and writes the ids of each shard to ``counts``, and its ``places``, with their end.

    Returns the most ids of a shard, or ``-1 - feature`` for the first shard feature with offsets that do not ascend
    within ``total`` ids, or an id that is no row.
    """
    facts, places, ids, wide, offsets, _, samples, flat = batch
    end = np.int64(0)
    for shard in range(shards):
        counts[shard] = 0
    for feature in range(features):
        about = FACTS * feature
        before = np.int64(0)
        # with the end of the last bag
        for b in range(feature * samples, (feature + 1) * samples + 1):
            if offsets[b] < before or offsets[b] > total:
                return -1 - feature
            before = offsets[b]
        first = offsets[feature * samples]
        largest = np.uint64(0)  # a negative one is larger than any row
        for i in range(first, before):
            largest = max(largest, np.uint64(id_at(ids, wide, i)))
        if first < before and largest >= np.uint64(facts[about + ROWS]):
            return -1 - feature
        counts[facts[about + SHARD]] += before - first
        places[feature] = end
        end += facts[about + DIM] * (before - first if flat else 1)
    places[features] = end
    most: Any = np.int64(0)
    for shard in range(shards):
        most = max(most, counts[shard])
    return most


# ---- forward ----


@jit
def pool(batch: Any, out: int, stride: int, first: int, end: int) -> None:
    """Sums the bags ``first`` to ``end`` (feature-major) into ``out [samples, stride]``."""
    facts, places, ids, wide, offsets, weights, samples, _ = batch
    bag = first
    while bag < end:
        feature = bag // samples
        last = min(end, (feature + 1) * samples)  # of this feature: its facts are read once
        about = FACTS * feature
        base, columns, half = facts[about + BASE], facts[about + DIM], facts[about + HALF]
        size = columns * (2 if half else 4)
        stop = offsets[last]
        # the first rows; then each row fetches the one `AHEAD` later
        for i in range(offsets[bag], min(offsets[bag] + AHEAD, stop)):
            fetch(base + id_at(ids, wide, i) * size, size)
        for b in range(bag, last):
            into = out + 4 * ((b - feature * samples) * stride + places[feature])
            if offsets[b] == offsets[b + 1]:
                zero_row(into, columns)
            for i in range(offsets[b], offsets[b + 1]):
                if i + AHEAD < stop:
                    fetch(base + id_at(ids, wide, i + AHEAD) * size, size)
                factor = float_at(weights, i) if weights else np.float32(1)
                row = base + id_at(ids, wide, i) * size
                # the first row overwrites, so `out` needs no zeros
                if i == offsets[b]:
                    set_row(into, row, half, factor, columns)
                else:
                    add_row(into, row, half, factor, columns)
        bag = last


@jit
def gather(batch: Any, out: int, features: int, first: int, end: int) -> None:
    """Copies the rows of the ids ``first`` to ``end`` to their places in the flat ``out``."""
    facts, places, ids, wide, offsets, _, _, _ = batch
    for feature in range(features):
        start, stop = max(first, offsets[feature]), min(end, offsets[feature + 1])
        about = FACTS * feature
        base, columns, half = facts[about + BASE], facts[about + DIM], facts[about + HALF]
        size = columns * (2 if half else 4)
        # where id 0 of the batch would be, so that id i is i rows later
        into = out + 4 * (places[feature] - offsets[feature] * columns)
        for i in range(start, stop):
            if i + AHEAD < stop:
                fetch(base + id_at(ids, wide, i + AHEAD) * size, size)
            set_row(into + 4 * i * columns, base + id_at(ids, wide, i) * size, half, np.float32(1), columns)


# ---- backward ----


@jit
def weight_grads(batch: Any, grad: int, stride: int, out: int, first: int, end: int) -> None:
    """The gradients of the per-sample weights in the bags ``first`` to ``end``: row times gradient of the bag."""
    facts, places, ids, wide, offsets, _, samples, _ = batch
    for b in range(first, end):
        feature = b // samples
        about = FACTS * feature
        base, columns, half = facts[about + BASE], facts[about + DIM], facts[about + HALF]
        size = columns * (2 if half else 4)
        source = grad + 4 * ((b - feature * samples) * stride + places[feature])
        for i in range(offsets[b], offsets[b + 1]):
            put_float(out, i, dot_row(base + id_at(ids, wide, i) * size, half, source, columns))
