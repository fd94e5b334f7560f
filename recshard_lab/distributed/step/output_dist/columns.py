"""Joining the columns of several senders: side by side where they are columns, added where they are row stripes.

::

    sender 0  [b, 12]   t0: 8 columns, t1: columns 0-4           output  [b, 16]
    sender 1  [b, 12]   t0: 8 columns, t1: columns 4-8           t0 = both added, t1 = one beside the other
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Columns ``[source, source + width)`` of what ``sender`` sends belong to ``[target, target + width)``."""

    sender: int
    source: int
    target: int
    width: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """Columns of the output that have the same senders; (sender, source) of each."""

    target: int
    width: int
    sources: tuple[tuple[int, int], ...]


class ColumnJoin:
    """Joins ``[b, D_k]`` of every sender k into ``[b, D]``, and takes a gradient apart the same way.

    Runs that lie side by side on both ends are moved as one: row-wise on W ranks is one addition of W tensors, however
    many tables.

    >>> join = ColumnJoin([Run(0, 0, 0, 2), Run(1, 0, 0, 2), Run(1, 2, 2, 1)])
    >>> out = torch.empty(1, 3)
    >>> join.join([torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]])], out)
    >>> out
    tensor([[11., 22., 30.]])
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = _merge_runs(runs)
        self._segments = _segments(self.runs)

    def is_identity(self, width: int) -> bool:
        """Whether one sender's ``width`` columns are the output as they are."""
        return self.runs == [Run(0, 0, 0, width)]

    def join(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes the columns that have a sender; the others are left as they are."""
        for segment in self._segments:
            target = _columns(out, segment.target, segment.width)
            found = [_columns(parts[sender], source, segment.width) for sender, source in segment.sources]
            if len(found) == 1:
                target.copy_(found[0])
                continue
            torch.add(found[0], found[1], out=target)
            for more in found[2:]:
                target.add_(more)

    def add(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """As `join`, on top of what the columns hold."""
        for run in self.runs:
            _columns(out, run.target, run.width).add_(_columns(parts[run.sender], run.source, run.width))

    def take_apart(self, grad: Tensor, parts: Sequence[Tensor], scale: float = 1.0) -> None:
        """Writes to each part its columns of ``grad``, times ``scale``."""
        for run in self.runs:
            source = _columns(grad, run.target, run.width)
            target = _columns(parts[run.sender], run.source, run.width)
            if scale == 1.0:
                target.copy_(source)
            else:
                torch.mul(source, scale, out=target)


def _columns(rows: Tensor, start: int, width: int) -> Tensor:
    return rows if start == 0 and width == rows.shape[1] else rows.narrow(1, start, width)


def _merge_runs(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.sender == run.sender
            and last.source + last.width == run.source
            and last.target + last.width == run.target
        ):
            merged[-1] = Run(last.sender, last.source, last.target, last.width + run.width)
        else:
            merged.append(run)
    return merged


def _segments(runs: Sequence[Run]) -> list[_Segment]:
    """Cuts runs where any of them begins or ends, so that the pieces are equal or apart; then joins neighbours."""
    cuts = sorted({run.target for run in runs} | {run.target + run.width for run in runs})
    place = {cut: number for number, cut in enumerate(cuts)}
    sources: list[list[tuple[int, int]]] = [[] for _ in cuts]
    for run in runs:
        for number in range(place[run.target], place[run.target + run.width]):
            sources[number].append((run.sender, run.source + cuts[number] - run.target))
    merged: list[_Segment] = []
    for number, found in enumerate(sources):
        if not found:
            continue
        width = cuts[number + 1] - cuts[number]
        last = merged[-1] if merged else None
        if last is not None and last.target + last.width == cuts[number]:
            moved = tuple((sender, source + last.width) for sender, source in last.sources)
            if moved == tuple(found):
                merged[-1] = _Segment(last.target, last.width + width, last.sources)
                continue
        merged.append(_Segment(cuts[number], width, tuple(found)))
    return merged
