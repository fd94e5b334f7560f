"""The loops of `ScoredIndex` on CPU. numba compiles them (`kernels/numba/compiled.py`).

A bucket has 128 slots. Each slot has a tag of two bytes: `EMPTY`, `ERASED`, or a negative number of 15 bits of the
id's hash. One vector instruction compares the `WORD` tags of a cache line, so that a lookup reads one line of tags and
one of keys. A search starts at the word of tags that the hash names. It ends at the id, or after a word with an empty
slot.

``partitions`` (of the table), ``offset`` (the first of them that is here), ``buckets`` (of one partition) and
``choices`` are those of the index. Arrays of slots are ``[slots]``.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recshard_lab.embedding.kernels.numba.loops import jit
from recshard_lab.embedding.kernels.numba.rows import fetch

SLOTS, WORD = 128, 32
EMPTY, ERASED = 0, 1
CHUNK = 512  # ids that are searched at a time: 64 to 256 are 5 to 20% slower
SCRATCH = 5 * CHUNK
WORDS = SLOTS // WORD
AHEAD = 12  # accesses
KEYS, TAGS, META, PARTITIONS, OFFSET, OWN, BUCKETS, CHOICES, HOW, NOW, STEP = range(11)
"""Of each index: addresses of its keys, tags and accesses; its shape; what `find` does to the accesses of present ids,
or `NOT`."""
INDEX, FIRST, END, MISSES = range(4)
"""Of each span of ids: its index, the first and the one after the last, and how many are absent."""
SET, ADD, ADD_IN_EPOCH, HIGHEST = range(4)
"""How an access changes a score: to ``now``; by 1; by 1 in the low 32 bits, with ``now`` in the high ones; to the
highest of ``given``."""
NOT = -1

_U64 = np.uint64
_LOW, _SHIFT = _U64(0xFFFFFFFF), _U64(32)
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


@intrinsic
def _equal(_context: Any, address: Any, tag: Any) -> Any:
    """Bit i is set where the i-th of `WORD` tags equals ``tag``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        shape = ir.VectorType(_I16, WORD)
        tags = builder.load(builder.inttoptr(values[0], shape.as_pointer()), align=1)
        nothing = ir.Constant(shape, ir.Undefined)
        one = builder.insert_element(nothing, builder.trunc(values[1], _I16), _I32(0))
        same = builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, WORD), [0] * WORD))
        found = builder.bitcast(builder.icmp_unsigned("==", tags, same), ir.IntType(WORD))
        return builder.zext(found, _I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _lowest(_context: Any, bits: Any) -> Any:
    """The number of the lowest bit that is set. ``bits`` is not 0."""
    return types.int64(types.int64), lambda _c, builder, _s, values: builder.cttz(values[0], ir.IntType(1)(1))


@intrinsic
def _count(_context: Any, bits: Any) -> Any:
    """How many bits are set."""
    return types.int64(types.int64), lambda _c, builder, _s, values: builder.ctpop(values[0])


def _number(builder: Any, address: Any, index: Any) -> Any:
    return builder.inttoptr(builder.add(address, builder.mul(index, _I64(8))), _I64.as_pointer())


@intrinsic
def _number_at(_context: Any, address: Any, index: Any) -> Any:
    """The index-th int64."""
    return types.int64(types.int64, types.int64), lambda _c, builder, _s, values: builder.load(
        _number(builder, *values), align=8
    )


@intrinsic
def _put_number(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the index-th int64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _number(builder, *values[:2]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit
def _mixed(key: int) -> Any:
    """A key's hash of 64 bits."""
    h = _U64(key)
    h = (h ^ (h >> _SHIFT)) * _U64(0xD6E8FEB86659FD93)
    h = (h ^ (h >> _SHIFT)) * _U64(0xD6E8FEB86659FD93)
    return h ^ (h >> _SHIFT)


@jit
def _other(h: Any) -> Any:
    """A second hash, of the first."""
    return h * _U64(0x9E3779B97F4A7C15)


@jit
def _partition(h: Any, partitions: int) -> Any:
    # the high 32 bits, as a fraction of 2**32, times the number: no division
    return ((h >> _SHIFT) * _U64(partitions)) >> _SHIFT


@jit
def _bucket(h: Any, g: Any, choice: int, partitions: int, offset: int, buckets: int) -> Any:
    """The first slot of an id's first or second bucket."""
    # partition, both buckets, word and tag read different bits of the two hashes
    within = (((h & _LOW) if choice == 0 else (g >> _SHIFT)) * _U64(buckets)) >> _SHIFT
    return ((np.int64(_partition(h, partitions)) - offset) * buckets + np.int64(within)) * SLOTS


@jit
def _tag(g: Any) -> Any:
    return np.int64(g & _U64(0x7FFF)) - 0x8000  # negative: never `EMPTY` or `ERASED`


@jit
def _word(g: Any) -> Any:
    """The word of tags at which the search of a bucket starts."""
    return np.int64((g >> _U64(15)) & _U64(WORDS - 1))


@jit
def _access(meta: int, slot: int, how: int, now: int, given: int, step: int) -> None:
    """Records an access."""
    score = _number_at(meta, 2 * slot)
    if how == SET:
        score = now
    elif how == ADD:
        score += 1
    elif how == ADD_IN_EPOCH:
        # the count stops at 32 bits: it must not reach the epoch above it
        score = (now << 32) | min((score & 0xFFFFFFFF) + 1, 0xFFFFFFFF)
    # the first score of a batch replaces older ones; then the highest of the batch stays
    elif _number_at(meta, 2 * slot + 1) != step or given > score:
        score = given
    _put_number(meta, 2 * slot, score)
    _put_number(meta, 2 * slot + 1, step)


@jit
def find(ids: Any, indexes: Any, spans: Any, out: Any, scratch: Any) -> Any:
    """The slots ``out`` of ``ids``, both ``[N]``; -1 for absent ones.

    `CHUNK` ids are searched at a time, in rounds: fetch a word of tags of each; compare them and fetch the key of the
    first match; compare the keys. Ids that are not in that word go to the next round. No round waits for memory.

    Args:
        indexes: ``[I, 11]`` by the names `KEYS`...
        spans: ``[S, 4]`` by the names `INDEX`... `MISSES` is written.
        scratch: ``[SCRATCH]``.

    Returns:
        The position of an id of another shard, at which this function stops; else -1.
    """
    bad: Any = np.int64(-1)
    for span in range(len(spans)):
        index, first, end = spans[span, INDEX], spans[span, FIRST], spans[span, END]
        keys, tags, meta = indexes[index, KEYS], indexes[index, TAGS], indexes[index, META]
        partitions, offset, own = indexes[index, PARTITIONS], indexes[index, OFFSET], indexes[index, OWN]
        buckets, choices = indexes[index, BUCKETS], indexes[index, CHOICES]
        how, now, step = indexes[index, HOW], indexes[index, NOW], indexes[index, STEP]
        misses = np.int64(0)
        for start in range(first, end, CHUNK):
            # `scratch`: ids left, the word of each, its tag, its probe, the matches of its tag
            left: Any = min(CHUNK, end - start)
            for i in range(left):
                h = _mixed(ids[start + i])
                g = _other(h)
                at = _bucket(h, g, 0, partitions, offset, buckets) + _word(g) * WORD
                # unsigned: one comparison finds slots before the first and behind the last one here
                if np.uint64(at) >= np.uint64(own * buckets * SLOTS):
                    at, bad = np.int64(0), start + i if bad < 0 else bad
                fetch(tags + 2 * at, 2 * WORD)
                scratch[i], scratch[CHUNK + i], scratch[2 * CHUNK + i], scratch[3 * CHUNK + i] = i, at, _tag(g), 0
            if bad >= 0:
                return bad
            while left > 0:
                for j in range(left):
                    i = scratch[j]
                    at = scratch[CHUNK + i]
                    same = _equal(tags + 2 * at, scratch[2 * CHUNK + i])
                    scratch[4 * CHUNK + i] = same
                    if same != 0:
                        at += _lowest(same)
                        fetch(keys + 8 * at, 8)
                        if how != NOT:
                            fetch(meta + 16 * at, 16)
                many, left = left, 0
                for j in range(many):
                    i = scratch[j]
                    key, at, same = ids[start + i], scratch[CHUNK + i], scratch[4 * CHUNK + i]
                    slot = np.int64(-1)
                    while same != 0:
                        slot = at + _lowest(same)
                        if _number_at(keys, slot) == key:
                            break
                        slot = np.int64(-1)
                        # the tag was equal by chance: the next match
                        same &= same - 1
                    if slot >= 0:
                        if how != NOT:
                            _access(meta, slot, how, now, 0, step)
                    else:
                        probe = scratch[3 * CHUNK + i] + 1
                        if _equal(tags + 2 * at, EMPTY) != 0:
                            # a word with an empty slot ends the search of this bucket: the other one is next
                            probe = (probe + WORDS - 1) & -WORDS
                        if probe < WORDS * choices:
                            h = _mixed(key)
                            g = _other(h)
                            at = _bucket(h, g, probe // WORDS, partitions, offset, buckets)
                            at += ((_word(g) + probe) & (WORDS - 1)) * WORD
                            fetch(tags + 2 * at, 2 * WORD)
                            scratch[left], scratch[CHUNK + i], scratch[3 * CHUNK + i] = i, at, probe
                            left += 1
                            continue
                        misses += 1
                    out[start + i] = slot
        spans[span, MISSES] = misses
    return bad


@jit
def touch(slots: Any, first: int, end: int, how: int, now: int, given: Any, step: int, meta: int) -> None:
    """Records an access to each of ``slots`` in the range ``first`` to ``end``. ``meta``: the address of accesses."""
    many = len(slots)
    for i in range(many):
        if i + AHEAD < many and first <= slots[i + AHEAD] < end:
            fetch(meta + 16 * slots[i + AHEAD], 16)
        # a slot belongs to one thread: no two of them count the same access
        if first <= slots[i] < end:
            _access(meta, slots[i], how, now, given[i], step)


@jit
def _free(tags: int, bucket: int) -> Any:
    """How many slots of a bucket are free."""
    many = np.int64(0)
    for word in range(WORDS):
        at = tags + 2 * (bucket + word * WORD)
        many += _count(_equal(at, EMPTY) | _equal(at, ERASED))
    return many


@jit
def insert(
    new: Any,
    new_scores: Any,
    new_touched: Any,
    first: int,
    end: int,
    keys: Any,
    tags: Any,
    meta: Any,
    partitions: int,
    offset: int,
    buckets: int,
    choices: int,
    spare: int,
    pinned: int,
    out: Any,
    old_keys: Any,
    old_scores: Any,
) -> None:
    """Inserts the absent ids ``new`` of the partitions ``first`` to ``end`` that are here, in their order.

    An id goes to its first bucket while that has more than ``spare`` free slots, else to the emptier one. If both are
    full, the id replaces the one with the lowest (score, touched, key) of both. Slots touched at ``pinned`` or later
    are never replaced.

    Args:
        meta: ``[slots, 2]`` the score and the step of the last access, in one cache line.
        out: ``[new]`` the slot of each; -1 if all slots of its buckets are pinned; -2 - slot if it replaced
            ``old_keys`` with ``old_scores`` there.
    """
    tags_at = tags.ctypes.data
    for i in range(len(new)):
        h = _mixed(new[i])
        part = np.int64(_partition(h, partitions)) - offset
        # a partition belongs to one thread, which inserts in the order of ids: the result does not depend on threads
        if part < first or part >= end:
            continue
        g = _other(h)
        bucket = _bucket(h, g, 0, partitions, offset, buckets)
        free = _free(tags_at, bucket)
        other = _bucket(h, g, 1, partitions, offset, buckets) if choices > 1 else bucket
        # the first bucket as long as it has room to spare: most ids are then found in it
        if free <= spare and other != bucket:
            more = _free(tags_at, other)
            if more > free:
                bucket, other, free = other, bucket, more
        # the first free slot from the word at which a search of this id starts
        if free > 0:
            word = _word(g)
            at = bucket
            for step in range(WORDS):
                at = bucket + ((word + step) & (WORDS - 1)) * WORD
                found = _equal(tags_at + 2 * at, EMPTY) | _equal(tags_at + 2 * at, ERASED)
                if found != 0:
                    at += _lowest(found)
                    break
            out[i] = at
        else:
            at = np.int64(-1)
            for choice in range(1 if other == bucket else 2):
                start = bucket if choice == 0 else other
                for slot in range(start, start + SLOTS):
                    # an id of a batch that is under way
                    if meta[slot, 1] >= pinned:
                        continue
                    if at >= 0:
                        if meta[slot, 0] > meta[at, 0]:
                            continue
                        # ties are broken by step, then by key, so that the choice does not depend on the order of slots
                        if meta[slot, 0] == meta[at, 0]:
                            if meta[slot, 1] > meta[at, 1]:
                                continue
                            if meta[slot, 1] == meta[at, 1] and keys[slot] > keys[at]:
                                continue
                    at = slot
            if at < 0:
                out[i] = -1
                continue
            old_keys[i], old_scores[i] = keys[at], meta[at, 0]
            out[i] = -2 - at
        keys[at], meta[at, 0], meta[at, 1] = new[i], new_scores[i], new_touched[i]
        tags[at] = _tag(g)
