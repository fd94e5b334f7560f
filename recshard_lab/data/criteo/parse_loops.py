"""Compiled loops that parse Criteo's lines from bytes to numbers, without the GIL.

Measured on two cores, lines of 246 bytes, hex included: this one on one thread 930 MB/s; polars' reader 240 MB/s and
pyarrow's 120 MB/s on both. Neither names the line that is wrong.

Shape letters: n lines, I = 13 counts, F = 26 categories.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = 9, 10, 13, 45, 48
_COUNTS, _CATEGORIES = 13, 26
_MOST = 2**31 - 1
_MOST_DIGITS = 10
KEPT_BAD = 16
"""Number of malformed lines of a chunk that are reported; all are counted."""


def _hex_values() -> NDArray[np.uint8]:
    values = np.full(256, 255, np.uint8)
    for digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
        values[np.frombuffer(digits, np.uint8)] = np.arange(16)
    return values


_HEX = _hex_values()
LOGS: NDArray[np.float32] = np.log1p(np.arange(1 << 16, dtype=np.float64)).astype(np.float32)
"""``log(1 + count)`` of the counts that are not rare."""


@njit(nogil=True, cache=True)
def count_lines(text: Any, size: int) -> int:
    """Line ends among the first `size` bytes."""
    lines = 0
    for at in range(size):
        lines += text[at] == _NEWLINE
    return lines


@njit(nogil=True, cache=True)
def parse_lines(
    text: Any, size: int, modulo: int, by_row: bool, logs: Any, labels: Any, dense: Any, ids: Any, bad: Any
) -> tuple[int, int]:
    """Reads complete lines. Returns the numbers of valid and of malformed lines.

    `text` uint8, the first `size` bytes end with a newline; labels int32 [n]; dense float32 [n, I]; ids uint32, [n, F]
    when `by_row`, else [F, n]; ids are taken modulo `modulo` where it is not 0. bad int64 [KEPT_BAD, 2]: number within
    the chunk and first byte of the first malformed lines. Good lines follow each other; no loop passes a newline.
    """
    at = row = line = wrong = 0
    while at < size:
        start = at
        good = text[at] == _ZERO or text[at] == _ZERO + 1
        if good:
            labels[row] = text[at] - _ZERO
            at += 1
            good = text[at] == _TAB
        column = 0
        while good and column < _COUNTS:
            at += 1
            negative = text[at] == _MINUS
            at += negative
            begin, value = at, np.int64(0)
            while _ZERO <= text[at] <= _ZERO + 9:
                value = value * 10 + (np.int64(text[at]) - _ZERO)
                at += 1
                if at - begin > _MOST_DIGITS:
                    break
            good = text[at] == _TAB and value <= _MOST and at - begin <= _MOST_DIGITS and not (negative and at == begin)
            if negative or value == 0:
                dense[row, column] = np.float32(0.0)
            elif value < len(logs):
                dense[row, column] = logs[value]
            else:
                dense[row, column] = np.float32(np.log1p(np.float64(value)))
            column += 1
        column = 0
        while good and column < _CATEGORIES:
            at += 1
            begin, identifier = at, np.uint32(0)
            digit = _HEX[text[at]]
            while digit < 16 and at - begin <= 8:
                identifier = (identifier << np.uint32(4)) | np.uint32(digit)
                at += 1
                digit = _HEX[text[at]]
            if column == _CATEGORIES - 1:
                ends = at
                at += text[at] == _RETURN
                good = text[at] == _NEWLINE and ends - begin <= 8
            else:
                good = text[at] == _TAB and at - begin <= 8
            if modulo != 0:
                identifier = np.uint32(np.int64(identifier) % modulo)
            if by_row:
                ids[row, column] = identifier
            else:
                ids[column, row] = identifier
            column += 1
        if good:
            row += 1
        else:
            if wrong < len(bad):
                bad[wrong, 0], bad[wrong, 1] = line, start
            wrong += 1
            while text[at] != _NEWLINE:
                at += 1
        at += 1
        line += 1
    return row, wrong
