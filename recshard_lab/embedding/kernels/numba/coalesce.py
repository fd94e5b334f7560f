"""Optimizer steps: each touched row once, with the summed gradient of its ids.

The ids of a shard are sorted. Each run of equal ids is a row, and the bags it occurred in are the sources of its
gradient. The gradients of a shard's bags are copied side by side first, so that they stay in the cache. Rows are
stepped in ascending order, and each sum follows the order of the ids, for any number of threads.
"""

from typing import Any

import numpy as np

from recshard_lab.embedding.kernels.numba.loops import AHEAD, BASE, DIM, FACTS, FULL_DIM, HALF, ROWS, STATE, jit
from recshard_lab.embedding.kernels.numba.rows import (
    add_row,
    after,
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
WORDS, MORE_WORDS = 7, DIGITS + 16  # starts and order end with one more number, and the room goes on aligned


@jit
def _sort(keys: Any, values: Any, spare_keys: Any, spare_values: Any, counts: Any, n: int, rows: int) -> bool:
    """Sorts by key, equals as they stood (radix sort, lowest digit first). True: the result is in the spares."""
    bits = 1
    while (1 << bits) < rows:
        bits += 1
    # digits of up to 11 bits; of 7 for few ids, as every pass also clears a count for each value of the digit
    passes = (bits + 10) // 11 if n > 1024 else (bits + 6) // 7
    digit = (bits + passes - 1) // passes  # as short as this number of passes allows
    mask = np.uint32((1 << digit) - 1)
    for number in range(passes):
        shift = np.uint32(number * digit)
        for place in range(1 << digit):
            counts[place] = 0
        for i in range(n):
            counts[(keys[i] >> shift) & mask] += 1
        # counts become the first place of each value
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
        # the next pass reads what this one wrote
        keys, spare_keys = spare_keys, keys
        values, spare_values = spare_values, values
    return passes % 2 == 1


@jit
def _read(
    batch: Any, own: Any, features: int, part: int, parts: int, keys: Any, values: Any, bags: Any, factors: Any
) -> int:
    """The ids of the ``features`` of ``own`` as ``keys``, and as ``values`` the source of each one's gradient.

    A source is the bag if pooled, the id's number if flat. With weights it is the id's number, an index of ``bags`` and
    ``factors``. With ``parts``, only every ``parts``-th row from ``part`` on. Returns the number of ids.
    """
    _, _, ids, wide, offsets, weights, samples, flat = batch
    n, bag, number = 0, 0, 0
    for position in range(features):
        feature = own[position]
        for b in range(feature * samples, (feature + 1) * samples):
            for i in range(offsets[b], offsets[b + 1]):
                row = id_at(ids, wide, i)
                # a row belongs to one thread, with all of its ids
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
        # overwritten by the next one unless a run begins here
        starts[count + 1] = i
        count += int(keys[i] != keys[i - 1])
    count += 1
    starts[count] = n
    singles, others = 0, count - 1
    for run in range(count):
        single = apart & (starts[run + 1] - starts[run] == 1)
        order[singles] = run  # overwritten by the next one unless it is counted
        singles += int(single)
    # from the end, where `order` has its other runs: they stay ascending
    for run in range(count - 1, -1, -1):
        single = apart & (starts[run + 1] - starts[run] == 1)
        if not single:
            order[others] = run
            others -= 1
    return count, singles


@jit
def _gather_grads(batch: Any, own: Any, features: int, grad: int, stride: int, columns: int, into: int) -> None:
    """Copies the gradients of the bags (flat: of the ids) of the ``features`` of ``own``, one after the other."""
    _, places, _, _, offsets, _, samples, flat = batch
    for position in range(features):
        feature = own[position]
        source = grad + 4 * places[feature]
        count, step = samples, stride
        if flat:
            count, step = offsets[feature + 1] - offsets[feature], columns
        for number in range(count):
            set_row(into, source + 4 * number * step, 0, np.float32(1), columns)
            into += 4 * columns


@jit
def step_rows(batch: Any, grad: int, stride: int, wiring: Any, rule: Any, part: Any, found: Any, room: Any) -> None:
    """Steps the rows of the ``num_shards`` of ``shards`` that the batch touched. Shard s is read by the shard features
    ``shard_features[shard_starts[s] : shard_starts[s + 1]]``.

    Stage `ALL` does everything. If other shards store a row's other columns, there are two stages. `ONLY_SQUARES`
    writes the shard's touched ``rows`` and their ``squares`` from ``firsts[s]`` on, and their number to ``counts[s]``.
    `GIVEN_SQUARES` steps with the squares at that place, and reuses the sorted ids.

    Args:
        batch: as of all loops; ``grad`` and ``stride`` are the gradient of its output.
        wiring: ``shards``, ``num_shards``, ``shard_starts``, ``shard_features``.
        rule: its number, learning rate, eps and weight decay.
        part: of each shard's rows only every ``parts``-th from ``part`` on; the stage.
        found: for the two stages.
        room: buffers for shards of up to ``largest`` ids: ``words``, `WORDS` for each id and `MORE_WORDS`; ``factors``,
            one for each id if weighted; ``grads`` for the gradients of a shard's bags (flat: ids), ``total`` for one
            row's.
    """
    facts, _, _, _, _, weights, _, _ = batch
    shards, num_shards, shard_starts, shard_features = wiring
    kind, rate, eps, decay = rule
    own_part, parts, stage = part
    firsts, counts, rows, squares, sorted_keys, sorted_values = found
    words, factors, grads, total, largest = room
    # `words`: the counts of the sort, then 7 arrays of `largest` numbers
    rest = after(words, DIGITS)
    spare_keys, spare_values, first_keys = rest, after(rest, largest), after(rest, 2 * largest)
    first_values, bags = after(rest, 3 * largest), after(rest, 4 * largest)
    starts, order = after(rest, 5 * largest), after(rest, 6 * largest + 1)
    for number in range(num_shards):
        shard = shards[number]
        own = after(shard_features, shard_starts[shard])
        readers = shard_starts[shard + 1] - shard_starts[shard]
        first, n = np.int64(0), np.int64(0)
        if stage != ALL:
            first = firsts[shard]
            counts[shard] = 0
        # the second stage has sorted ids, but reads bags and factors again if weighted
        if readers and (stage != GIVEN_SQUARES or weights):
            n = _read(batch, own, readers, own_part, parts, first_keys, first_values, bags, factors)
        elif readers:
            n = firsts[shard + 1] - first
        if n == 0:
            continue
        about = FACTS * own[0]
        base, columns, half = facts[about + BASE], facts[about + DIM], facts[about + HALF]
        state, whole = facts[about + STATE], np.float32(facts[about + FULL_DIM])
        size = columns * (2 if half else 4)
        keys, values = first_keys, first_values
        if stage == GIVEN_SQUARES:
            keys, values = after(sorted_keys, first), after(sorted_values, first)
        elif _sort(first_keys, first_values, spare_keys, spare_values, words, n, facts[about + ROWS]):
            keys, values = spare_keys, spare_values
        # the next shard uses the same room, so the ids are kept outside of it
        if stage == ONLY_SQUARES:
            for i in range(n):
                sorted_keys[first + i], sorted_values[first + i] = keys[i], values[i]
        _gather_grads(batch, own, readers, grad, stride, columns, grads)
        # a row of one id steps with its bag's gradient as it is, unless a weight or decay changes that
        count, singles = _runs(keys, n, weights == 0 and decay == 0, starts, order)
        if stage == ONLY_SQUARES:
            counts[shard] = count
        for turn in range(count):
            run = np.int64(order[turn])
            if turn + AHEAD < count:
                later = np.int64(keys[starts[order[turn + AHEAD]]])
                fetch(base + later * size, size)
                if kind == ADAGRAD:
                    fetch(state + later * columns * 4, columns * 4)
                elif kind == ROWWISE_ADAGRAD:
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
            if kind == SGD:
                step_row(place, half, -rate, source, columns)
            elif kind == ADAGRAD:
                step_adagrad(place, half, state + 4 * row * columns, source, rate, eps, columns)
            else:
                at = first + run
                # a column shard has only a part of the row's square: the caller adds the others
                square = squares[at] if stage == GIVEN_SQUARES else dot_row(source, 0, source, columns)
                if stage == ONLY_SQUARES:
                    rows[at], squares[at] = row, square
                else:
                    # the mean is over the columns of the whole table, not of this shard
                    sum_of_means = float_at(state, row) + square / whole
                    put_float(state, row, sum_of_means)
                    step_row(place, half, -rate / (np.sqrt(sum_of_means) + eps), source, columns)
