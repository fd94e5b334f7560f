"""What was sent: every collective of the library is recorded in the traces that are open when it runs.

>>> with trace() as t:
...     pass
>>> t.count()
0
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from recshard_lab.comm.groups import ShardingEnv


@dataclass(slots=True)
class CollectiveEvent:
    """One collective as this rank saw it.

    Attributes:
        op: ``all_to_all``, ``all_reduce``, ...
        label: what it was for, ``input_dist/ids`` for instance.
        bytes_to: bytes on the wire from this rank to each rank of the sharded world, itself included. A collective of
            a part of the ranks (of one node, say) has zeros for the others.
        start_s: ``time.perf_counter`` when it was issued.
        ms: from issue to completion, as seen by the thread that waited; 0 until it was waited for.
        inter_node_bytes: the part of `bytes_to` for ranks on other nodes.
        intra_node_bytes: the part for other ranks on this node; what stays on the rank is in neither.
    """

    op: str
    label: str
    bytes_to: tuple[int, ...]
    start_s: float
    ms: float = 0.0
    inter_node_bytes: int = 0
    intra_node_bytes: int = 0

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

    def inter_node_bytes(self, label: str | None = None) -> int:
        """Bytes sent to ranks on other nodes."""
        return sum(event.inter_node_bytes for event in self.select(label=label))

    def intra_node_bytes(self, label: str | None = None) -> int:
        """Bytes sent to the other ranks of this node."""
        return sum(event.intra_node_bytes for event in self.select(label=label))

    def bytes_to(self, world_size: int, label: str | None = None) -> list[int]:
        """Bytes sent to each rank: this rank's row of the traffic matrix."""
        totals = [0] * world_size
        for event in self.select(label=label):
            for rank, count in enumerate(event.bytes_to):
                totals[rank] += count
        return totals

    def bytes_by_label(self, world_size: int) -> dict[str, list[int]]:
        """Label -> bytes sent to each rank under it: this rank's row of the traffic matrix of one phase."""
        labels = dict.fromkeys(event.label for event in self.events)
        totals = {label: [0] * world_size for label in labels}
        for event in self.events:
            for rank, count in enumerate(event.bytes_to):
                totals[event.label][rank] += count
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


def record(op: str, label: str, bytes_to: Sequence[int], env: ShardingEnv | None = None) -> CollectiveEvent | None:
    """Notes a collective that is being issued; None when no trace is open. `env` tells which bytes cross nodes."""
    if not _open:
        return None
    event = CollectiveEvent(op, label, tuple(bytes_to), perf_counter())
    if env is not None:
        event.bytes_to = env.in_world(bytes_to)
        event.inter_node_bytes = env.across_nodes(bytes_to)
        event.intra_node_bytes = event.bytes_sent - event.inter_node_bytes - bytes_to[env.rank]
    for opened in _open:
        opened.events.append(event)
    return event
