"""First step: the lines of each day become labels, dense features and ids. One pass, on all threads.

Labels int32 ``[n, 1]`` and dense float32 ``[n, 13]`` are final, and so are hashed ids, int32 ``[n, 26]``; ids that are
to be numbered go into a file of blocks (`blocks.py`) for the next two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.ahead import ahead
from recshard_lab.data.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT
from recshard_lab.data.criteo.blocks import head_of
from recshard_lab.data.criteo.folder import Day, FileWriter, Manifest
from recshard_lab.data.criteo.parse_loops import KEPT_BAD, LOGS, count_lines, parse_lines
from recshard_lab.data.criteo.text import Chunk, chunks, complaint
from recshard_lab.data.criteo.work import Settings, Work, in_order


@dataclass(frozen=True)
class _Parsed:
    """The numbers of a chunk."""

    labels: NDArray[np.int32]
    dense: NDArray[np.float32]
    ids: NDArray[Any]
    lines: int
    bad_lines: int
    bad: list[tuple[int, str]]  # line in the chunk, what is wrong; of the first
    size: int
    position: int


def parse(chunk: Chunk, settings: Settings) -> _Parsed:
    """Reads a chunk's lines."""
    lines = count_lines(chunk.text, chunk.size)
    by_row = settings.one_step
    labels, dense = np.empty(lines, np.int32), np.empty((lines, INT_FEATURE_COUNT), np.float32)
    ids = np.empty((lines, CAT_FEATURE_COUNT) if by_row else (CAT_FEATURE_COUNT, lines), np.uint32)
    bad = np.empty((KEPT_BAD, 2), np.int64)
    rows, wrong = parse_lines(chunk.text, chunk.size, settings.modulo, by_row, LOGS, labels, dense, ids, bad)
    told = [(int(line), complaint(_line_at(chunk, int(at)))) for line, at in bad[:wrong]]
    kept = ids[:rows].view(np.int32) if by_row else np.ascontiguousarray(ids[:, :rows])
    return _Parsed(labels[:rows], dense[:rows], kept, lines, wrong, told, chunk.size, chunk.position)


def _line_at(chunk: Chunk, begin: int) -> bytes:
    text = chunk.text[begin : chunk.size]
    return text[: int(np.argmax(text == ord("\n")))].tobytes()


def parse_days(work: Work, manifest: Manifest) -> None:
    """Parses the days that are not yet parsed according to the manifest.

    Raises:
        ValueError: a malformed line, by file and number, unless they are to be skipped; a file without a good line.
        OSError: a full disk.
    """
    total = sum(day.source_bytes for day in manifest.days)
    for number, day in enumerate(manifest.days):
        if day.rows < 0:
            _parse_day(work, day, sum(other.source_bytes for other in manifest.days[:number]), total)
            manifest.save(work.folder)


def _parse_day(work: Work, day: Day, before: int, total: int) -> None:
    source = Path(day.source)
    writers = {
        "labels": FileWriter(work.folder / f"{day.name}_labels.npy", (np.int32, 1)),
        "dense": FileWriter(work.folder / f"{day.name}_dense.npy", (np.float32, INT_FEATURE_COUNT)),
    }
    if work.settings.one_step:
        writers["sparse"] = FileWriter(work.folder / f"{day.name}_sparse.npy", (np.int32, CAT_FEATURE_COUNT))
    else:
        writers["ids"] = FileWriter(work.folder / f"{day.name}_ids.blocks")
    rows = lines = clicks = text_bytes = bad_lines = 0
    bad: list[str] = []
    try:
        for parsed in in_order(work, lambda chunk: parse(chunk, work.settings), ahead(chunks(source), 2)):
            problems = [f"line {lines + line + 1:,}: {what}" for line, what in parsed.bad]
            if problems and not work.settings.skip_bad:
                raise ValueError(f"{source}, {problems[0]}. Fix: correct the line, or pass --skip-bad")
            bad = (bad + problems)[:KEPT_BAD]
            writers["labels"].write(parsed.labels)
            writers["dense"].write(parsed.dense)
            if work.settings.one_step:
                writers["sparse"].write(parsed.ids)
            elif parsed.ids.size:
                writers["ids"].write(head_of(parsed.ids))
                writers["ids"].write(parsed.ids)
            rows, lines = rows + len(parsed.labels), lines + parsed.lines
            clicks, bad_lines = clicks + int(parsed.labels.sum()), bad_lines + parsed.bad_lines
            text_bytes += parsed.size
            work.tell("parse", f"{source.name}, {rows:,} samples", before + parsed.position, total)
        if not rows:
            first = f": {bad[0]}" if bad else " at all"
            raise ValueError(f"{source} has no good line{first}")
        files = {kind: writer.finish() for kind, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    day.rows, day.clicks, day.text_bytes = rows, clicks, text_bytes
    day.bad_lines, day.bad, day.files = bad_lines, bad, files
