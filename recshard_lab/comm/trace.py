"""What was sent: every collective of the library is recorded in the traces that are open when it runs.

>>> with trace() as t:
...     pass
>>> t.count()
0
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class CollectiveEvent:
    """One collective as this rank saw it.

    Attributes:
        op: ``all_to_all``, ``all_reduce``, ...
        label: what it was for, ``input_dist/ids`` for instance.
        bytes_to: bytes that this rank sent to each rank of the group, itself included.
        start_s: ``time.perf_counter`` when it was issued.
        ms: from issue to completion, as seen by the thread that waited; 0 until it was waited for.
    """

    op: str
    label: str
    bytes_to: tuple[int, ...]
    start_s: float
    ms: float = 0.0

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all ranks of the group, this one included."""
        return sum(self.bytes_to)


@dataclass(slots=True)
class Trace:
    """The collectives issued while it was open, in order."""

    events: list[CollectiveEvent] = field(default_factory=list)

    def select(self, op: str | None = None, label: str | None = None) -> list[CollectiveEvent]:
        """Events of this ``op`` whose label starts with ``label``."""
        return [
            event
            for event in self.events
            if (op is None or event.op == op) and (label is None or event.label.startswith(label))
        ]

    def count(self, op: str | None = None, label: str | None = None) -> int:
        """How many collectives of this ``op`` and ``label``."""
        return len(self.select(op, label))

    def bytes_sent(self, label: str | None = None) -> int:
        """Bytes sent, this rank's own share included."""
        return sum(event.bytes_sent for event in self.select(label=label))

    def bytes_to(self, world_size: int, label: str | None = None) -> list[int]:
        """Bytes sent to each rank: this rank's row of the traffic matrix."""
        totals = [0] * world_size
        for event in self.select(label=label):
            for rank, count in enumerate(event.bytes_to):
                totals[rank] += count
        return totals


_open: list[Trace] = []


@contextmanager
def trace() -> Iterator[Trace]:
    """Records every collective that the library issues on this rank inside the block."""
    opened = Trace()
    _open.append(opened)
    try:
        yield opened
    finally:
        _open[:] = [other for other in _open if other is not opened]


def record(op: str, label: str, bytes_to: tuple[int, ...]) -> CollectiveEvent | None:
    """Notes a collective that is being issued; None when no trace is open."""
    if not _open:
        return None
    event = CollectiveEvent(op, label, bytes_to, perf_counter())
    for opened in _open:
        opened.events.append(event)
    return event
