"""What was sent: every open trace records the library's collectives.

>>> with trace() as t:
...     pass
>>> t.count()
0
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from recshard_lab.comm.env import ShardingEnv, times_note


@dataclass(slots=True)
class CollectiveEvent:
    """One collective on this rank.

    Attributes:
        op: ``all_to_all``, ``all_reduce``, ...
        label: its purpose, such as ``input_dist/ids``.
        bytes_to: bytes from this rank to each rank of the sharded world, including itself. A collective of some ranks,
            such as those of one node, has 0 for the others.
        start_s: ``time.perf_counter`` at issue.
        ms: time from issue to completion in the waiting thread, on a GPU in the waiting stream; 0 until the wait. Of
            a GPU it is known when the trace is closed.
        inter_node_bytes: bytes to ranks on other nodes.
        intra_node_bytes: bytes to other ranks on this node. Bytes that stay on the rank are in neither.
    """

    op: str
    label: str
    bytes_to: tuple[int, ...]
    start_s: float
    ms: float = 0.0
    inter_node_bytes: int = 0
    intra_node_bytes: int = 0
    device_span: "DeviceSpan | None" = None

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all ranks of the group, including this one."""
        return sum(self.bytes_to)


class DeviceSpan:
    """Time on the current stream of a GPU, from here to `end`. The host does not wait.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._start.record(self._stream)
        self.ended = False

    def end(self) -> None:
        """Marks the end, on the stream that is current now."""
        self._end.record(torch.cuda.current_stream(self._stream.device))
        self.ended = True

    def ms(self) -> float:
        """The time between them. Waits for the GPU."""
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


@dataclass(slots=True)
class Trace:
    """The collectives issued during a trace, in order.

    Attributes:
        events: the collectives.
        times_note: what to print beside their times (`times_note`).
    """

    events: list[CollectiveEvent] = field(default_factory=list)
    times_note: str = field(default_factory=times_note)

    def select(self, op: str | None = None, label: str | None = None) -> list[CollectiveEvent]:
        """Events of this ``op`` whose label starts with ``label``."""
        return [
            event
            for event in self.events
            if (op is None or event.op == op) and (label is None or event.label.startswith(label))
        ]

    def count(self, op: str | None = None, label: str | None = None) -> int:
        """Number of collectives with this ``op`` and a label that starts with ``label``."""
        return len(self.select(op, label))

    def bytes_sent(self, label: str | None = None) -> int:
        """Bytes sent, including those to this rank itself."""
        return sum(event.bytes_sent for event in self.select(label=label))

    def inter_node_bytes(self, label: str | None = None) -> int:
        """Bytes sent to ranks on other nodes."""
        return sum(event.inter_node_bytes for event in self.select(label=label))

    def intra_node_bytes(self, label: str | None = None) -> int:
        """Bytes sent to other ranks of this node."""
        return sum(event.intra_node_bytes for event in self.select(label=label))

    def bytes_to(self, world_size: int, label: str | None = None) -> list[int]:
        """Bytes sent to each rank: this rank's row of the traffic matrix."""
        return _totals(self.select(label=label), world_size)

    def bytes_by_label(self, world_size: int) -> dict[str, list[int]]:
        """Label -> bytes sent to each rank: this rank's row of the traffic matrix of one phase."""
        labels = dict.fromkeys(event.label for event in self.events)
        return {label: _totals([e for e in self.events if e.label == label], world_size) for label in labels}


def _totals(events: Sequence[CollectiveEvent], world_size: int) -> list[int]:
    return [sum(event.bytes_to[rank] for event in events) for rank in range(world_size)]


open_traces: list[Trace] = []


@contextmanager
def trace() -> Iterator[Trace]:
    """Records every collective that the library issues on this rank inside the block."""
    opened = Trace()
    open_traces.append(opened)
    try:
        yield opened
    finally:
        open_traces[:] = [other for other in open_traces if other is not opened]
        for event in opened.events:
            if event.device_span is not None and event.device_span.ended:
                event.ms, event.device_span = event.device_span.ms(), None


def record(op: str, label: str, sends: Sequence[int], size: int, env: ShardingEnv) -> CollectiveEvent | None:
    """Adds a collective to the open traces; None without one.

    Args:
        op: of torch.
        label: of the message.
        sends: elements for each rank.
        size: bytes of an element.
        env: the ranks. Determines which bytes cross nodes.
    """
    if not open_traces:
        return None
    bytes_to = [number * size for number in sends]
    event = CollectiveEvent(op, label, env.in_world(bytes_to), perf_counter())
    event.inter_node_bytes = env.across_nodes(bytes_to)
    event.intra_node_bytes = event.bytes_sent - event.inter_node_bytes - bytes_to[env.rank]
    for opened in open_traces:
        opened.events.append(event)
    return event
