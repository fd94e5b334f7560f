"""Planted clicks in Criteo's text format: tabs, empty fields for missing values, ids of 8 hex digits."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numba import njit
from numpy.typing import NDArray

from recshard_lab.data.clicks import MISSING, SyntheticClicks
from recshard_lab.data.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT
from recshard_lab.data.criteo.folder import naming_full_disk

_ROWS_AT_ONCE = 1 << 15
_MOST_LINE = 2 + INT_FEATURE_COUNT * 12 + CAT_FEATURE_COUNT * 9
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_NONE = np.iinfo(np.int64).min
_MAY_MISS = np.arange(CAT_FEATURE_COUNT) % 3 == 2
assert _NONE == MISSING


def raw_ids(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The 32-bit number that an id is logged as: another for each, 0 for 0 (MurmurHash3's finaliser, a bijection).

    >>> raw_ids(np.array([0, 1]))
    array([         0, 1364076727], dtype=uint32)
    """
    raw = ids.astype(np.uint32)
    raw = (raw ^ (raw >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    raw = (raw ^ (raw >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return raw ^ (raw >> np.uint32(16))


@njit(nogil=True, cache=True)
def format_lines(labels: Any, counts: Any, raw: Any, may_miss: Any, digits: Any, text: Any) -> int:
    """Writes lines into text and returns their bytes; an id of 0 is left out in columns where ids `may_miss`."""
    at = 0
    for row in range(len(labels)):
        text[at] = 48 + labels[row]
        at += 1
        for column in range(counts.shape[1]):
            text[at] = 9
            at += 1
            value = counts[row, column]
            if value == _NONE:
                continue
            if value < 0:
                text[at] = 45
                at += 1
                value = -value
            length, rest = 1, value // 10
            while rest > 0:
                length, rest = length + 1, rest // 10
            for place in range(at + length - 1, at - 1, -1):
                text[place] = 48 + value % 10
                value //= 10
            at += length
        for column in range(raw.shape[1]):
            text[at] = 9
            at += 1
            identifier = raw[row, column]
            if identifier == 0 and may_miss[column]:
                continue
            for place in range(8):
                text[at + place] = digits[(identifier >> np.uint32(28 - 4 * place)) & np.uint32(15)]
            at += 8
        text[at] = 10
        at += 1
    return at


def criteo_text(clicks: SyntheticClicks, begin: int = 0, end: int | None = None) -> Iterator[NDArray[np.uint8]]:
    """The lines of these samples, in blocks.

    Raises:
        ValueError: clicks with other than 13 counts and 26 categories.
    """
    if clicks.num_dense_features != INT_FEATURE_COUNT or len(clicks.features) != CAT_FEATURE_COUNT:
        raise ValueError(
            f"Criteo's text has {INT_FEATURE_COUNT} counts and {CAT_FEATURE_COUNT} categories, these clicks have "
            f"{clicks.num_dense_features} and {len(clicks.features)}"
        )
    end = len(clicks) if end is None else end
    for at in range(begin, end, _ROWS_AT_ONCE):
        samples = range(at, min(at + _ROWS_AT_ONCE, end))
        text = np.empty(len(samples) * _MOST_LINE, np.uint8)
        labels, counts, ids = clicks.logs(samples)
        size = format_lines(labels.astype(np.uint8), counts, raw_ids(ids), _MAY_MISS, _HEX, text)
        yield text[:size]


def write_criteo(
    clicks: SyntheticClicks,
    folder: str | os.PathLike[str],
    days: int = 1,
    *,
    compress: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Writes days of Criteo's text, ``day_0`` and so on; the samples are distributed in order.

    Args:
        clicks: with 13 counts and 26 categories.
        folder: made if it is not there.
        days: how many files.
        compress: write ``day_0.gz`` instead.
        on_progress: called with samples written and bytes of text written.

    Raises:
        ValueError: clicks of another shape, fewer than one day, a file that is there already.
        OSError: a full disk.
    """
    if not isinstance(days, int) or not 1 <= days <= max(1, len(clicks)):
        raise ValueError(f"days must be from 1 to the {len(clicks):,} samples, got {days!r}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = [target / f"day_{day}{'.gz' if compress else ''}" for day in range(days)]
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} is there already: give another folder")
    written = 0
    for day, path in enumerate(paths):
        part = path.with_name(f"{path.name}.part")
        begin, end = len(clicks) * day // days, len(clicks) * (day + 1) // days
        with naming_full_disk(part), _text_file(part, compress) as file:
            for at, text in zip(range(begin, end, _ROWS_AT_ONCE), criteo_text(clicks, begin, end), strict=True):
                file.write(text.data)
                written += len(text)
                if on_progress is not None:
                    on_progress(min(at + _ROWS_AT_ONCE, end), written)
        part.replace(path)
    return paths


def _text_file(path: Path, compress: bool) -> BinaryIO:
    return gzip.open(path, "wb", compresslevel=1) if compress else path.open("wb")  # type: ignore[return-value]
