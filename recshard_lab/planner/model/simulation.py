"""Simulates training steps on a GPU: what runs at the same time, and what waits for what.

Every operation runs on one stream, after the operations issued to that stream before it and after those whose results
it needs. The prediction is the mean time between two batches, after the first `WARM_UP`::

    host           the main thread: packs, launches kernels, issues collectives
    thread         a second thread that launches the input side, with ``threads=True`` of the pipelines
    compute        kernels of the step
    input          kernels that pack and unpack ids
    network        collectives, in the order of their launch, which is how NCCL runs those of one device
    copy           copies of batches to the device

The host launches the kernels of a phase one after the other. They start when it starts, and end no earlier than it has
launched all of them. So the host runs ahead of a busy device, and a busy host delays the device. The host stops once a
step: it reads, from the device, how many ids go to each rank.

Order within the step of batch k, as `train.pipelines` and `distributed.step` issue it::

    none          pack k, ids k | lookup | rows | dense forward, backward | gradients | update
    sparse_dist   pack k + 1 | lookup, rows, dense forward of k | ids k + 1 | dense backward, gradients, update of k
    prefetch      pack k + 2 | the same
    threads       the second thread packs and sends ids

Backward averages the dense gradient in buckets, each while the next one is computed. The next lookup waits for the
optimizer, which waits for the last bucket.

Compute and input kernels delay each other only through their total: no step is shorter than all of its kernels. While
one thread holds CPython's lock, the other waits: the main thread loses a share of the second thread's launches.

Shape letters: P phases.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from recshard_lab.planner.workload import Array

AHEAD = {"none": 0, "sparse_dist": 1, "prefetch": 2}  # batches that are packed before their step
WARM_UP, MEASURED = 6, 6  # batches; 6 is a multiple of 1, 2 and 3, the batches that wait for each other
QUEUED = 2  # assumed: steps that the host runs ahead at most; CUDA queues about a thousand launches
LOCK_SHARE = 0.5  # assumed: torch releases CPython's lock inside its operators, not in the Python around them
FORWARD_SHARE = 1 / 3  # of dense work: 2 of 6 operations a parameter
PACK_SHARE = 0.5  # assumed: the share of input_dist's host and device work before its sizes are known
INPUT, LOOKUP, ROWS, DENSE, GRADIENTS, UPDATE = range(6)


@dataclass(frozen=True)
class StepParts:
    """Milliseconds of one step, by phase of `cost.PHASES` and by who spends them.

    Attributes:
        host: ``[P, ...]`` packing and launches, without `sync_ms`.
        device: ``[P, ...]`` kernels.
        network: ``[P, ...]`` collectives, without `sizes_ms`; in the dense phase the average of its gradient.
        sizes_ms: latency of the message of sizes, which has its own connection.
        sync_ms: the host's read of those sizes from the device.
        copy_ms: the copy of a batch to the device.
        buckets: messages that carry the dense gradient.
        lock_share: of a launch, in which its thread holds CPython's lock.
    """

    host: Array
    device: Array
    network: Array
    sizes_ms: float = 0.0
    sync_ms: float = 0.0
    copy_ms: float = 0.0
    buckets: int = 1
    lock_share: float = LOCK_SHARE

    def needs(self, threads: bool = False) -> dict[str, Array]:
        """``[...]`` ms for which a step needs each resource; the step is at least as long as the largest.

        The chain leads from a lookup to the next one: rows, dense compute, gradients, update.

        >>> parts = StepParts(np.ones(6), 2 * np.ones(6), 3 * np.ones(6))
        >>> {name: float(ms) for name, ms in parts.needs().items()}
        {'chain': 22.0, 'network': 18.0, 'device': 12.0, 'host': 6.0, 'copy': 0.0}
        """
        network, host, zero = self.network.sum(axis=0), self.host.sum(axis=0), 0 * self.host[INPUT]
        found = {
            "chain": self.device[LOOKUP:].sum(axis=0) + network - self.network[INPUT] - self.network[DENSE],
            "network": network,
            "device": self.device.sum(axis=0),
        }
        if threads:
            found["host"] = host - (1 - self.lock_share) * self.host[INPUT]
            found["thread"] = self.host[INPUT] + self.sync_ms
        else:
            found["host"] = host + self.sync_ms
        return {**found, "copy": zero + self.copy_ms}


def steady_ms(parts: StepParts, pipeline: str, threads: bool = False) -> Array:
    """``[...]`` ms between two batches.

    Args:
        parts: of one step.
        pipeline: one of `AHEAD`.
        threads: whether a second thread launches the input side; not with pipeline "none".

    >>> parts = StepParts(np.zeros(6), np.array([0, 2, 0, 3, 0, 4]), np.array([3, 0, 1, 0, 1, 0]))
    >>> float(steady_ms(parts, "none")), float(steady_ms(parts, "sparse_dist"))
    (14.0, 11.0)
    """
    ahead = AHEAD[pipeline]
    threads = threads and ahead > 0
    streams = _Streams(parts, threads)
    for batch in range(ahead):  # what is under way before the first step
        streams.pack(batch)
        if not batch:
            streams.send(batch)
    for batch in range(WARM_UP + MEASURED):
        streams.step(batch, ahead)
    steady = (streams.done[-1] - streams.done[-1 - MEASURED]) / MEASURED
    return _latest(steady, *parts.needs(threads).values())


def _latest(*times: Array) -> Array:
    return reduce(np.maximum, times)


class _Streams:
    """When each stream has done what was issued to it."""

    def __init__(self, parts: StepParts, threads: bool) -> None:
        self.parts, self.input_thread = parts, "thread" if threads else "host"
        self.zero = 0.0 * parts.host[INPUT]
        self.free = dict.fromkeys(("host", "thread", "compute", "input", "network", "copy"), self.zero)
        self.sizes: dict[int, Array] = {}
        self.ids: dict[int, Array] = {}
        self.done: list[Array] = []

    def run(self, stream: str, ms: Array | float, *after: Array) -> Array:
        """When an operation ends."""
        self.free[stream] = _latest(self.free[stream], *after) + ms
        return self.free[stream]

    def launch(self, ms: Array | float, *after: Array, thread: str = "host") -> tuple[Array, Array]:
        """When a host operation starts and ends."""
        start = _latest(self.free[thread], *after)
        self.free[thread] = start + ms
        return start, self.free[thread]

    def kernels(self, stream: str, ms: Array | float, launch: tuple[Array, Array], *after: Array) -> Array:
        """When the kernels end that a host operation launches."""
        ran = self.run(stream, ms, launch[0], *after)
        return _latest(ran, launch[1])

    def launch_input(self, share: float, *after: Array) -> tuple[Array, Array]:
        """Launches a share of the input side; the lock then keeps the main thread waiting for a part of that time."""
        ms = share * self.parts.host[INPUT]
        if self.input_thread != "host":
            self.free["host"] = self.free["host"] + self.parts.lock_share * ms
        return self.launch(ms, *after, thread=self.input_thread)

    def pack(self, batch: int, *after: Array) -> None:
        """Copies a batch, packs its ids, reads their sizes and sends those."""
        parts, begun = self.parts, self.free["host"]
        copied = self.run("copy", parts.copy_ms, begun, *after)
        launch = self.launch_input(PACK_SHARE, begun, copied)
        packed = self.kernels("input", PACK_SHARE * parts.device[INPUT], launch)
        self.sizes[batch] = self.run(self.input_thread, parts.sync_ms, packed) + parts.sizes_ms

    def send(self, batch: int) -> None:
        """Sends the ids of a batch, once every rank knows their sizes."""
        parts = self.parts
        launch = self.launch_input(1 - PACK_SHARE, self.sizes[batch])
        arrived = self.run("network", parts.network[INPUT], launch[0])
        self.ids[batch] = self.kernels("input", (1 - PACK_SHARE) * parts.device[INPUT], launch, arrived)

    def step(self, batch: int, ahead: int) -> None:
        """One call of a pipeline's ``progress``."""
        parts = self.parts
        before = self.done[-1] if self.done else self.zero
        if len(self.done) >= QUEUED:
            self.launch(0.0, self.done[-QUEUED])
        self.pack(batch + ahead, *([] if ahead else [before]))
        if not ahead:
            self.send(batch)
        looked_up = self.kernels(
            "compute", parts.device[LOOKUP], self.launch(parts.host[LOOKUP]), self.ids[batch], before
        )
        launch = self.launch(parts.host[ROWS])
        rows = self.run("network", parts.network[ROWS], launch[0], looked_up)
        self.kernels("compute", parts.device[ROWS], launch, rows)
        host, device = parts.host[DENSE], parts.device[DENSE]
        self.kernels("compute", FORWARD_SHARE * device, self.launch(FORWARD_SHARE * host))
        if ahead:
            self.send(batch + 1)
        share = (1 - FORWARD_SHARE) / parts.buckets
        for bucket in range(parts.buckets):
            backward = self.launch(share * host)
            computed = self.kernels("compute", share * device, backward)
            if bucket + 1 < parts.buckets:
                self.run("network", parts.network[DENSE] / parts.buckets, computed)
        launch = self.launch(parts.host[GRADIENTS])
        summed = self.kernels("compute", parts.device[GRADIENTS], launch)
        arrived = self.run("network", parts.network[GRADIENTS], launch[0], summed)
        launch = self.launch(parts.host[UPDATE])
        arrived = self.run("network", parts.network[UPDATE], launch[0], arrived)
        averaged = self.run("network", parts.network[DENSE] / parts.buckets, computed)
        updated = self.kernels("compute", parts.device[UPDATE], launch, arrived)
        self.done.append(_latest(updated, averaged))
