"""When the stages of a pipeline ran, and how much of one overlapped with another.

A pipeline records every stage of every batch as a `StageEvent`; ``lab.views.timeline`` draws them. While torch.profiler
runs, each stage is also a range named ``## stage batch ##`` in its trace. `events_from_chrome_trace` reads such ranges
from an exported file, also those of other pipelines with the same names.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from recshard_lab.comm import Trace, times_note

COMPUTE_STAGES = ("forward", "backward", "optimizer")
"""The stages of a step itself. Other stages are hidden while these run."""

KEPT = 8192  # events of a pipeline

_RANGE = re.compile(r"## (?P<stage>[\w ./-]+?) (?P<batch>\d+) ##")


@dataclass(slots=True, frozen=True)
class StageEvent:
    """One stage of one batch on one rank.

    Attributes:
        rank: the rank.
        stage: ``load``, ``copy``, ``input_dist``, ``prefetch``, ``lookup``, ``wait``, ``forward``, ``backward``,
            ``optimizer``.
        batch: the batch's number, from 0.
        start_s, end_s: ``time.perf_counter``, which ranks of one machine share.
        times_note: a note to print beside the times, `comm.times_note` of the rank.
    """

    rank: int
    stage: str
    batch: int
    start_s: float
    end_s: float
    times_note: str = ""

    @property
    def ms(self) -> float:
        """Its duration."""
        return 1e3 * (self.end_s - self.start_s)


class StageLog:
    """The last events of a pipeline. Any thread may add some.

    Args:
        rank: the rank.

    >>> log = StageLog(rank=1)
    >>> with log.stage("copy", 7):
    ...     pass
    >>> [(event.rank, event.stage, event.batch) for event in log.events]
    [(1, 'copy', 7)]
    """

    def __init__(self, rank: int = 0, kept: int = KEPT) -> None:
        self.rank, self._times_note = rank, times_note()
        self._events: deque[StageEvent] = deque(maxlen=kept)

    @property
    def events(self) -> list[StageEvent]:
        """The events, by end time."""
        return list(self._events)

    def clear(self) -> None:
        """Removes all events."""
        self._events.clear()

    @contextmanager
    def stage(self, name: str, batch: int) -> Iterator[None]:
        """Records the block as a stage, also if it raises."""
        begun = perf_counter()
        profiled = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        try:
            with torch.profiler.record_function(f"## {name} {batch} ##") if profiled else nullcontext():
                yield
        finally:
            self.note(name, batch, begun)

    def note(self, name: str, batch: int, begun: float) -> None:
        """Records a stage that ends now."""
        self._events.append(StageEvent(self.rank, name, batch, begun, perf_counter(), self._times_note))


def events_from_chrome_trace(trace: str | Path | dict[str, Any], rank: int | None = None) -> list[StageEvent]:
    """The stages in a file that ``torch.profiler.profile.export_chrome_trace`` wrote.

    Args:
        trace: the file, or its content.
        rank: the rank of the trace. Default: the rank in the file, otherwise 0.

    Raises:
        ValueError: not a Chrome trace, or a trace without stages.

    >>> ranges = [{"ph": "X", "cat": "user_annotation", "name": "## forward 3 ##", "ts": 10.0, "dur": 5.0}]
    >>> [event] = events_from_chrome_trace({"traceEvents": ranges})
    >>> event.stage, event.batch, round(event.ms, 6)
    ('forward', 3, 0.005)
    """
    if not isinstance(trace, dict):
        try:
            trace = json.loads(Path(trace).read_text())
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{str(trace)!r:.80} has no Chrome trace of torch.profiler: {error}") from error
    found = []
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("a Chrome trace is an object with a list 'traceEvents', as export_chrome_trace writes it")
    if rank is None:
        rank = int((trace.get("distributedInfo") or {}).get("rank", 0))
    for entry in trace["traceEvents"]:
        matched = _RANGE.fullmatch(str(entry.get("name", ""))) if isinstance(entry, dict) else None
        if matched and entry.get("ph") == "X" and entry.get("cat") != "gpu_user_annotation":
            start = float(entry["ts"]) / 1e6
            stage, batch = matched["stage"].strip(), int(matched["batch"])
            found.append(StageEvent(rank, stage, batch, start, start + float(entry.get("dur", 0.0)) / 1e6))
    if not found:
        raise ValueError(
            "no stage in this trace: pipelines name theirs '## forward 3 ##', and torch.profiler sees other threads' "
            "only with experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
        )
    return sorted(found, key=lambda event: event.start_s)


def events_from_collectives(trace: Trace, rank: int) -> list[StageEvent]:
    """The exchanges of a `comm.trace` as stages, named by their labels and numbered in order.

    Exchanges without a recorded wait, such as DDP's all-reduce, have no duration and are omitted.

    >>> from recshard_lab.comm import CollectiveEvent
    >>> sent = Trace([CollectiveEvent("all_to_all", "input_dist/ids", (8,), 1.0, ms=2.0)])
    >>> [(event.stage, event.batch, round(event.ms, 6)) for event in events_from_collectives(sent, rank=0)]
    [('input_dist/ids', 0, 2.0)]
    """
    counts: dict[str, int] = {}
    found = []
    for event in trace.events:
        number = counts.get(event.label, 0)
        counts[event.label] = number + 1
        if event.ms:
            found.append(
                StageEvent(rank, event.label, number, event.start_s, event.start_s + event.ms / 1e3, trace.times_note)
            )
    return found


def hidden_share(
    events: Iterable[StageEvent], stage: str = "input_dist", behind: Sequence[str] = COMPUTE_STAGES
) -> float:
    """The share of a stage's time in which the same rank was in one of the stages ``behind``; NaN without such a stage.

    >>> dist = StageEvent(0, "input_dist", 1, 0.0, 4.0)
    >>> hidden_share([dist, StageEvent(0, "forward", 0, 1.0, 2.0), StageEvent(0, "backward", 0, 2.0, 4.5)])
    0.75
    """
    by_rank: dict[int, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    for event in events:
        spans, over = by_rank.setdefault(event.rank, ([], []))
        if event.stage == stage:
            spans.append((event.start_s, event.end_s))
        if event.stage in behind:
            over.append((event.start_s, event.end_s))
    total = hidden = 0.0
    for spans, over in by_rank.values():
        cover, at = merged(over), 0
        for start, end in merged(spans):
            total += end - start
            while at < len(cover) and cover[at][1] <= start:
                at += 1
            reached = at
            while reached < len(cover) and cover[reached][0] < end:
                hidden += min(end, cover[reached][1]) - max(start, cover[reached][0])
                reached += 1
    return hidden / total if total else float("nan")


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans without overlaps, in order.

    >>> merged([(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
    [(0.0, 1.5), (2.0, 3.0)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def stage_ms(events: Iterable[StageEvent], stage: str) -> float:
    """Mean milliseconds per batch and rank in a stage; 0 without such a stage."""
    batches: dict[tuple[int, int], float] = {}
    for event in events:
        if event.stage == stage:
            key = event.rank, event.batch
            batches[key] = batches.get(key, 0.0) + event.ms
    return sum(batches.values()) / len(batches) if batches else 0.0
