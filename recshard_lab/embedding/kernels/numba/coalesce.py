"""Optimizer steps: each touched row once, with the summed gradient of its ids.

The ids of a shard are sorted. Each run of equal ids is a row, and the bags it occurred in are the sources of its
gradient. The gradients of a shard's bags are copied side by side first, so that they stay in the cache. Rows are
stepped in ascending order, and each sum follows the order of the ids, for any number of threads.
"""

from typing import Any

import numpy as np

from recshard_lab.embedding.kernels.numba.loops import AHEAD, BASE, COLUMN, DIM, FULL_DIM, HALF, ROWS, STATE, jit
from recshard_lab.embedding.kernels.numba.rows import (
    add_row,
    dot_row,
    fetch,
    float_at,
    id_at,
    put_float,
    set_row,
    step_adagrad,
    step_row,
)

SGD, ADAGRAD, ROWWISE_ADAGRAD = range(3)
ALL, ONLY_SQUARES, GIVEN_SQUARES = range(3)
DIGITS = 2048  # values of one digit of the sort
WORDS, MORE_WORDS = 7, DIGITS + 2


@jit
def _sort(keys: Any, values: Any, spare_keys: Any, spare_values: Any, counts: Any, n: int, rows: int) -> bool:
    """Sorts by key, equals as they stood (radix sort, lowest digit first). True: the result is in the spares."""
    bits = 1
    while (1 << bits) < rows:
        bits += 1
    passes = (bits + 10) // 11 if n > 1024 else (bits + 6) // 7
    digit = (bits + passes - 1) // passes
    mask = np.uint32((1 << digit) - 1)
    for number in range(passes):
        shift = np.uint32(number * digit)
        counts[: 1 << digit] = 0
        for i in range(n):
            counts[(keys[i] >> shift) & mask] += 1
        total = np.uint32(0)
        for place in range(1 << digit):
            count = counts[place]
            counts[place] = total
            total += count
        for i in range(n):
            key = keys[i]
            place = (key >> shift) & mask
            to = counts[place]
            counts[place] = to + np.uint32(1)
            spare_keys[to] = key
            spare_values[to] = values[i]
        keys, spare_keys = spare_keys, keys
        values, spare_values = spare_values, values
    return passes % 2 == 1


@jit
def _read(
    own: Any,
    ids: int,
    wide: int,
    offsets: Any,
    weights: int,
    batch: int,
    flat: int,
    part: int,
    parts: int,
    keys: Any,
    values: Any,
    bags: Any,
    factors: Any,
) -> int:
    """The ids of the shard features ``own`` as ``keys``, and as ``values`` the source of each one's gradient.

    A source is the bag if pooled, the id's number if flat. With weights it is the id's number, an index of ``bags`` and
    ``factors``. With ``parts``, only every ``parts``-th row from ``part`` on. Returns the number of ids.
    """
    n, bag, number = 0, 0, 0
    for feature in own:
        for b in range(feature * batch, (feature + 1) * batch):
            for i in range(offsets[b], offsets[b + 1]):
                row = id_at(ids, wide, i)
                if parts == 1 or row % parts == part:
                    keys[n] = row
                    values[n] = number if flat or weights else bag
                    n += 1
                if weights:
                    bags[number] = bag
                    factors[number] = float_at(weights, i)
                number += 1
            bag += 1
    return n


@jit
def _runs(keys: Any, n: int, apart: bool, starts: Any, order: Any) -> tuple[int, int]:
    """Where runs of equal keys begin, with the end, and the order to step them in. If ``apart``, runs of one key come
    first. Returns the number of runs, and of runs of one key.

    Whether a key repeats is unpredictable, and a mispredicted branch costs 50 ns. Therefore this code has no branches,
    and the two kinds of runs have separate loops.
    """
    count = 0
    starts[0] = 0
    for i in range(1, n):
        starts[count + 1] = i
        count += int(keys[i] != keys[i - 1])
    count += 1
    starts[count] = n
    singles, others = 0, count - 1
    for run in range(count):
        single = apart & (starts[run + 1] - starts[run] == 1)
        order[singles] = run  # overwritten by the next one unless it is counted
        singles += int(single)
    for run in range(count - 1, -1, -1):
        single = apart & (starts[run + 1] - starts[run] == 1)
        if not single:
            order[others] = run
            others -= 1
    return count, singles


@jit
def _gather_grads(
    features: Any, own: Any, offsets: Any, grad: int, stride: int, batch: int, flat: int, columns: int, into: int
) -> None:
    """Copies the gradients of the bags (flat: of the ids) of the shard features ``own``, one after the other."""
    for feature in own:
        source = grad + 4 * features[feature, COLUMN]
        count, step = batch, stride
        if flat:
            count, step = offsets[feature + 1] - offsets[feature], columns
        for number in range(count):
            set_row(into, source + 4 * number * step, 0, np.float32(1), columns)
            into += 4 * columns


@jit
def step_rows(
    features: Any,
    shards: Any,
    shard_starts: Any,
    shard_features: Any,
    ids: int,
    wide: int,
    offsets: Any,
    weights: int,
    grad: int,
    stride: int,
    batch: int,
    flat: int,
    rule: int,
    rate: float,
    eps: float,
    decay: float,
    part: int,
    parts: int,
    stage: int,
    firsts: Any,
    rows: Any,
    squares: Any,
    counts: Any,
    sorted_keys: Any,
    sorted_values: Any,
    words: Any,
    factors: Any,
    grads: int,
    total: int,
    largest: int,
) -> None:
    """Steps the rows of ``shards`` that the batch touched. Shard s is read by the shard features
    ``shard_features[shard_starts[s] : shard_starts[s + 1]]``.

    Stage `ALL` does everything. If other shards store a row's other columns, there are two stages. `ONLY_SQUARES`
    writes the shard's touched ``rows`` and their ``squares`` from ``firsts[s]`` on, and their number to ``counts[s]``.
    `GIVEN_SQUARES` steps with the squares at that place, and reuses the sorted ids.

    Buffers, for shards of up to ``largest`` ids: ``words``, `WORDS` for each id and `MORE_WORDS`; ``factors``, one for
    each id if weighted; addresses of floats: ``grads`` for the gradients of a shard's bags (flat: ids), ``total`` for
    one row's.
    """
    digits, rest = words[:DIGITS], words[DIGITS:]
    spare_keys, spare_values, first_keys = rest[:largest], rest[largest : 2 * largest], rest[2 * largest : 3 * largest]
    first_values, bags = rest[3 * largest : 4 * largest], rest[4 * largest : 5 * largest]
    starts, order = rest[5 * largest : 6 * largest + 1], rest[6 * largest + 1 : 7 * largest + 2]
    for shard in shards:
        own = shard_features[shard_starts[shard] : shard_starts[shard + 1]]
        first, n = firsts[shard], 0
        counts[shard] = 0
        if len(own) and (stage != GIVEN_SQUARES or weights):
            n = _read(
                own, ids, wide, offsets, weights, batch, flat, part, parts, first_keys, first_values, bags, factors
            )
        elif len(own):
            n = firsts[shard + 1] - first
        if n == 0:
            continue
        feature = own[0]
        base, columns, half = features[feature, BASE], features[feature, DIM], features[feature, HALF]
        state, whole = features[feature, STATE], np.float32(features[feature, FULL_DIM])
        size = columns * (2 if half else 4)
        keys, values = first_keys, first_values
        if stage == GIVEN_SQUARES:
            keys, values = sorted_keys[first : first + n], sorted_values[first : first + n]
        elif _sort(first_keys, first_values, spare_keys, spare_values, digits, n, features[feature, ROWS]):
            keys, values = spare_keys, spare_values
        if stage == ONLY_SQUARES:
            for i in range(n):
                sorted_keys[first + i], sorted_values[first + i] = keys[i], values[i]
        _gather_grads(features, own, offsets, grad, stride, batch, flat, columns, grads)
        count, singles = _runs(keys, n, weights == 0 and decay == 0, starts, order)
        counts[shard] = count
        for turn in range(count):
            run = np.int64(order[turn])
            if turn + AHEAD < count:
                later = np.int64(keys[starts[order[turn + AHEAD]]])
                fetch(base + later * size, size)
                if rule == ADAGRAD:
                    fetch(state + later * columns * 4, columns * 4)
                elif rule == ROWWISE_ADAGRAD:
                    fetch(state + later * 4, 4)
            begin = np.int64(starts[run])
            row = np.int64(keys[begin])
            place = base + row * size
            if turn < singles:
                source = grads + 4 * np.int64(values[begin]) * columns
            else:
                source = total
                for i in range(begin, np.int64(starts[run + 1])):
                    value, factor = np.int64(values[i]), np.float32(1)
                    if weights:
                        value, factor = np.int64(bags[values[i]]), factors[values[i]]
                    if i == begin:
                        set_row(total, grads + 4 * value * columns, 0, factor, columns)
                    else:
                        add_row(total, grads + 4 * value * columns, 0, factor, columns)
                if decay != 0:
                    add_row(total, place, half, decay, columns)
            if rule == SGD:
                step_row(place, half, -rate, source, columns)
            elif rule == ADAGRAD:
                step_adagrad(place, half, state + 4 * row * columns, source, rate, eps, columns)
            else:
                number = first + run
                square = squares[number] if stage == GIVEN_SQUARES else dot_row(source, 0, source, columns)
                if stage == ONLY_SQUARES:
                    rows[number], squares[number] = row, square
                else:
                    sum_of_means = float_at(state, row) + square / whole
                    put_float(state, row, sum_of_means)
                    step_row(place, half, -rate / (np.sqrt(sum_of_means) + eps), source, columns)
