"""Tables of ids by open addressing: counting them, and looking their new numbers up. Compiled, without the GIL.

A slot is one number of 64 bits: the id in the upper half, its count or its new number in the lower one; 0 is an empty
slot, for counts and new numbers begin at 1. A table of 2**bits slots; capacity is kept below 0.6 of them.

The hash of an id selects its part p of P (a power of two). A table that does not fit into memory is built part by part,
and each part reads the same ids again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 2048


@njit(nogil=True, cache=True, inline="always")
def _slot(identifier: np.uint32, bits: int) -> np.int64:
    return np.int64((np.uint64(identifier) * _FACTOR) >> np.uint64(64 - bits))


@njit(nogil=True, cache=True, inline="always")
def _part(identifier: np.uint32, parts: int) -> np.int64:
    """Uses other bits than `_slot`, so that the ids of a part spread over its table."""
    mixed = np.uint32(np.uint32(identifier ^ (identifier >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    return np.int64((mixed ^ (mixed >> np.uint32(13))) & np.uint32(parts - 1))


@njit(nogil=True, cache=True)
def count_ids(
    ids: Any, begin: int, first: int, slots: Any, firsts: Any, bits: int, part: int, parts: int, used: int, most: int
) -> tuple[int, int]:
    """Counts ids [n] of the part from `begin` on, until `most` are in the table: (how far it came, ids in the table).

    `firsts` remembers where each id was seen first; `first` is the place of ids[0]. Counts stop at 2**32 - 1.
    """
    mask = (1 << bits) - 1
    for at in range(begin, len(ids)):
        identifier = ids[at]
        if parts > 1 and _part(identifier, parts) != part:
            continue
        place = _slot(identifier, bits)
        while True:
            found = slots[place]
            if found == 0:
                if used == most:
                    return at, used
                slots[place] = (np.uint64(identifier) << _HALF) | np.uint64(1)
                firsts[place] = first + at
                used += 1
                break
            if np.uint32(found >> _HALF) == identifier:
                if found & _LOW != _LOW:
                    slots[place] = found + np.uint64(1)
                break
            place = (place + 1) & mask
    return len(ids), used


@njit(nogil=True, cache=True)
def rehash(old: Any, old_firsts: Any, slots: Any, firsts: Any, bits: int, part: int, parts: int) -> int:
    """Moves the part's ids into an empty table. Returns their number."""
    mask = (1 << bits) - 1
    used = 0
    for at in range(len(old)):
        found = old[at]
        identifier = np.uint32(found >> _HALF)
        if found == 0 or (parts > 1 and _part(identifier, parts) != part):
            continue
        place = _slot(identifier, bits)
        while slots[place] != 0:
            place = (place + 1) & mask
        slots[place], firsts[place] = found, old_firsts[at]
        used += 1
    return used


@njit(nogil=True, cache=True)
def count_frequent(slots: Any, threshold: int) -> int:
    """Number of ids that were counted `threshold` times or more."""
    frequent = 0
    for at in range(len(slots)):
        if slots[at] != 0 and np.int64(slots[at] & _LOW) >= threshold:
            frequent += 1
    return frequent


@njit(nogil=True, cache=True)
def take_frequent(slots: Any, firsts: Any, threshold: int, ids: Any, counts: Any, seen: Any) -> None:
    """Copies the frequent ids, their counts and their first positions."""
    row = 0
    for at in range(len(slots)):
        if slots[at] != 0 and np.int64(slots[at] & _LOW) >= threshold:
            ids[row], counts[row] = np.uint32(slots[at] >> _HALF), np.uint32(slots[at] & _LOW)
            seen[row] = firsts[at]
            row += 1


@njit(nogil=True, cache=True)
def insert_ids(ids: Any, number: int, slots: Any, bits: int, part: int, parts: int, room: int) -> int:
    """Gives ids [n] of the part the numbers from `number` on, but no more than `room` of them; returns the room left,
    -1 if there was too little."""
    mask = (1 << bits) - 1
    for at in range(len(ids)):
        if parts > 1 and _part(ids[at], parts) != part:
            continue
        if room == 0:
            return -1
        room -= 1
        place = _slot(ids[at], bits)
        while slots[place] != 0:
            place = (place + 1) & mask
        slots[place] = (np.uint64(ids[at]) << _HALF) | np.uint64(number + at)
    return room


@njit(nogil=True, cache=True)
def number_part(ids: Any, slots: Any, bits: int, part: int, parts: int, other: int, out: Any) -> None:
    """Writes the part's new numbers of ids [n] into out [n], `other` for unknown ids. The rest stays."""
    mask = (1 << bits) - 1
    for at in range(len(ids)):
        identifier = ids[at]
        if parts > 1 and _part(identifier, parts) != part:
            continue
        place = _slot(identifier, bits)
        while slots[place] != 0 and np.uint32(slots[place] >> _HALF) != identifier:
            place = (place + 1) & mask
        out[at] = other if slots[place] == 0 else np.int32(slots[place] & _LOW)


@njit(nogil=True, cache=True)
def number_block(ids: Any, slots: Any, starts: Any, bits: Any, other: int, out: Any) -> None:
    """New numbers of a block, by sample: ids [F, n] -> out int32 [n, F].

    The table of column f begins at slots[starts[f]] and has 2**bits[f] slots; with bits -1 the ids are numbers already.
    """
    columns, rows = ids.shape
    for begin in range(0, rows, _ROWS_AT_ONCE):  # a piece of the output stays in the cache meanwhile
        end = min(rows, begin + _ROWS_AT_ONCE)
        for column in range(columns):
            own = bits[column]
            if own < 0:
                for row in range(begin, end):
                    out[row, column] = ids[column, row]
                continue
            start, mask = starts[column], (1 << own) - 1
            for row in range(begin, end):
                identifier = ids[column, row]
                place = _slot(identifier, own)
                found = slots[start + place]
                while found != 0 and np.uint32(found >> _HALF) != identifier:
                    place = (place + 1) & mask
                    found = slots[start + place]
                out[row, column] = other if found == 0 else np.int32(found & _LOW)
