"""Criteo's text small enough to check, and what becomes of it by TorchRec's rules, in plain Python."""

import gzip
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data import CriteoClicks, SyntheticClicks
from recshard_lab.data.criteo.write_tsv import criteo_text

ROWS = [3, 20, 4000, *[7] * 23]


def text(samples: int = 300, seed: int = 0) -> bytes:
    """Lines of planted clicks, with fields missing."""
    clicks = SyntheticClicks(samples, rows=ROWS, seed=seed)
    return b"".join(piece.tobytes() for piece in criteo_text(clicks))


def line(label: str = "1", ints: Sequence[str] = ("5",) * 13, cats: Sequence[str] = ("0000000a",) * 26) -> bytes:
    return "\t".join([label, *ints, *cats]).encode()


def write(folder: Path, days: int = 2, samples: int = 300, zipped: bool = False) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    for day in range(days):
        path = folder / f"day_{day}{'.gz' if zipped else ''}"
        content = text(samples + 7 * day, seed=day)
        path.write_bytes(gzip.compress(content) if zipped else content)
        paths.append(path)
    return paths


def parsed(content: bytes) -> tuple[list[int], list[list[float]], list[list[int]]]:
    """Labels, dense features and raw ids of whole lines."""
    labels, dense, ids = [], [], []
    for own in content.decode().splitlines():
        label, *fields = own.split("\t")
        labels.append(int(label))
        dense.append([math.log(1 + max(0, int(field or "0"))) for field in fields[:13]])
        ids.append([int(field or "0", 16) for field in fields[13:]])
    return labels, dense, ids


def numbered(days: Sequence[Sequence[Sequence[int]]], threshold: int) -> NDArray[np.int64]:
    """Raw ids of all days to TorchRec's contiguous ones: frequent ids from 2 as they appear, the others 1."""
    raw = [row for day in days for row in day]
    out = np.empty((len(raw), 26), np.int64)
    for column in range(26):
        counts, numbers = Counter(row[column] for row in raw), {}
        for at, row in enumerate(raw):
            if counts[row[column]] >= threshold:
                out[at, column] = numbers.setdefault(row[column], 2 + len(numbers))
            else:
                out[at, column] = 1
    return out


def read(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Labels, dense features and ids as a loader gives them."""
    data = CriteoClicks.open(folder, check="sums")
    batch = data.batch(range(len(data)))
    ids = batch.sparse_features.values().view(26, -1).t().numpy()
    return batch.labels.numpy(), batch.dense_features.numpy(), ids
