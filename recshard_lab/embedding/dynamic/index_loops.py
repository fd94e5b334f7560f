"""The loops of `ScoredIndex` on CPU. numba compiles them (`kernels/numba/compiled.py`).

A bucket has 128 slots. Each slot has a tag of one byte: `EMPTY`, `ERASED`, or 7 bits of the id's hash with the high bit
set. One vector instruction compares 32 tags, so that a lookup reads one cache line of tags and one of keys. A search
starts at the word of 32 tags that the hash names. It ends at the id, or after a word with an empty slot.

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
EMPTY, ERASED, FULL = 0, 1, 128
AHEAD = 12  # ids between two stages of a lookup; 24 or 6 are slower
RING = 32  # at least twice `AHEAD`

_U64 = np.uint64
_LOW, _SHIFT = _U64(0xFFFFFFFF), _U64(32)
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


@intrinsic
def _equal(_context: Any, address: Any, tag: Any) -> Any:
    """Bit i is set where the i-th of `WORD` bytes equals ``tag``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        shape = ir.VectorType(_I8, WORD)
        tags = builder.load(builder.inttoptr(values[0], shape.as_pointer()), align=1)
        nothing = ir.Constant(shape, ir.Undefined)
        one = builder.insert_element(nothing, builder.trunc(values[1], _I8), _I32(0))
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


@intrinsic
def _key_at(_context: Any, keys: Any, slot: Any) -> Any:
    """The key of a slot, by the address of the keys."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.add(values[0], builder.mul(values[1], _I64(8)))
        return builder.load(builder.inttoptr(at, _I64.as_pointer()), align=8)

    return types.int64(types.int64, types.int64), generate


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
    return ((h >> _SHIFT) * _U64(partitions)) >> _SHIFT


@jit
def _bucket(h: Any, g: Any, choice: int, partitions: int, offset: int, buckets: int) -> Any:
    """The first slot of an id's first or second bucket."""
    within = (((h & _LOW) if choice == 0 else (g >> _SHIFT)) * _U64(buckets)) >> _SHIFT
    return ((np.int64(_partition(h, partitions)) - offset) * buckets + np.int64(within)) * SLOTS


@jit
def _tag(g: Any) -> Any:
    return np.int64((g & _U64(127)) | _U64(FULL))


@jit
def _word(g: Any) -> Any:
    """The word of tags at which the search of a bucket starts."""
    return np.int64((g >> _U64(7)) & _U64(SLOTS // WORD - 1))


@jit
def _slot_of(key: int, keys: int, tags: int, partitions: int, offset: int, buckets: int, choices: int) -> int:
    """The slot of an id, or -1."""
    h = _mixed(key)
    g = _other(h)
    tag, word = _tag(g), _word(g)
    for choice in range(choices):
        bucket = _bucket(h, g, choice, partitions, offset, buckets)
        for step in range(SLOTS // WORD):
            at = bucket + ((word + step) & (SLOTS // WORD - 1)) * WORD
            found = _equal(tags + at, tag)
            while found != 0:
                slot = at + _lowest(found)
                if _key_at(keys, slot) == key:
                    return slot
                found &= found - 1
            if _equal(tags + at, EMPTY) != 0:
                break
    return -1


@jit
def find(
    ids: Any,
    first: int,
    end: int,
    keys: Any,
    tags: Any,
    partitions: int,
    offset: int,
    buckets: int,
    choices: int,
    out: Any,
    ring: Any,
) -> None:
    """The slots of the ids ``first`` to ``end``, -1 for absent ones. ``ring`` is scratch ``[3 * RING]``.

    Three stages, `AHEAD` ids apart, so that no stage waits for memory: fetch the tags; compare them and fetch the key
    of the first match; compare the key.
    """
    tags_at, keys_at, mask = tags.ctypes.data, keys.ctypes.data, RING - 1
    for i in range(first, end + 2 * AHEAD):
        if i < end:
            h = _mixed(ids[i])
            g = _other(h)
            at = _bucket(h, g, 0, partitions, offset, buckets) + _word(g) * WORD
            fetch(tags_at + at, WORD)
            ring[i & mask], ring[RING + (i & mask)] = at, _tag(g)
        j = i - AHEAD
        if first <= j < end:
            at = ring[j & mask]
            found = _equal(tags_at + at, ring[RING + (j & mask)])
            slot = np.int64(-1)
            if found != 0:
                slot = at + _lowest(found)
                fetch(keys_at + 8 * slot, 8)
            ring[2 * RING + (j & mask)] = slot
        j -= AHEAD
        if j >= first:
            slot = ring[2 * RING + (j & mask)]
            if slot < 0 or _key_at(keys_at, slot) != ids[j]:
                slot = _slot_of(ids[j], keys_at, tags_at, partitions, offset, buckets, choices)
            out[j] = slot


SET, ADD, ADD_IN_EPOCH, HIGHEST = range(4)
"""How an access changes a score: to ``now``; by 1; by 1 in the low 32 bits, with ``now`` in the high ones; to the
highest of ``given``."""


@jit
def touch(slots: Any, first: int, end: int, how: int, now: int, given: Any, step: int, meta: Any) -> None:
    """Records an access to each of ``slots`` in the range ``first`` to ``end``. ``meta``: see `insert`."""
    meta_at = meta.ctypes.data
    many = len(slots)
    for i in range(many):
        if i + AHEAD < many and first <= slots[i + AHEAD] < end:
            fetch(meta_at + 16 * slots[i + AHEAD], 16)
        slot = slots[i]
        if slot < first or slot >= end:
            continue
        if how == SET:
            meta[slot, 0] = now
        elif how == ADD:
            meta[slot, 0] += 1
        elif how == ADD_IN_EPOCH:
            meta[slot, 0] = (now << 32) | min((meta[slot, 0] & 0xFFFFFFFF) + 1, 0xFFFFFFFF)
        elif meta[slot, 1] != step or given[i] > meta[slot, 0]:
            meta[slot, 0] = given[i]
        meta[slot, 1] = step


@jit
def _free(tags: int, bucket: int) -> Any:
    """How many slots of a bucket are free."""
    many = np.int64(0)
    for word in range(SLOTS // WORD):
        at = tags + bucket + word * WORD
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
        if part < first or part >= end:
            continue
        g = _other(h)
        bucket = _bucket(h, g, 0, partitions, offset, buckets)
        free = _free(tags_at, bucket)
        other = _bucket(h, g, 1, partitions, offset, buckets) if choices > 1 else bucket
        if free <= spare and other != bucket:
            more = _free(tags_at, other)
            if more > free:
                bucket, other, free = other, bucket, more
        if free > 0:
            word = _word(g)
            at = bucket
            for step in range(SLOTS // WORD):
                at = bucket + ((word + step) & (SLOTS // WORD - 1)) * WORD
                found = _equal(tags_at + at, EMPTY) | _equal(tags_at + at, ERASED)
                if found != 0:
                    at += _lowest(found)
                    break
            out[i] = at
        else:
            at = np.int64(-1)
            for choice in range(1 if other == bucket else 2):
                start = bucket if choice == 0 else other
                for slot in range(start, start + SLOTS):
                    if meta[slot, 1] >= pinned:
                        continue
                    if at >= 0:
                        if meta[slot, 0] > meta[at, 0]:
                            continue
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
        tags[at] = np.uint8(_tag(g))
