"""Host milliseconds of the input exchange on one rank of 128: pack the ids of a batch, unpack what arrives.

26 row-wise tables, one thread. At batch 512 most of the time is spent copying 1.7 million bag lengths; at batch 1 what
remains is the work of the host, which a GPU does not take over. One process is rank 0 of a mirrored world
(``benchmarks.ledger.mirror``). Packing lasts from the batch to the sent message, unpacking from the received message to
the ids of each table. The time that collectives take to copy is subtracted. The tensors are on the GPU if there is one.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from benchmarks import Figure, torch_threads
from benchmarks.apparatus.step_case import SGD, StepCase
from benchmarks.apparatus.step_ours import batch_of, sharded
from benchmarks.ledger.mirror import MirrorGroup, mirrored_world

ROUNDS, QUICK_ROUNDS, WARM_UP = 40, 10, 3
CASES = [
    StepCase("row_wise", SGD, "uniform", 26, batch=batch, pooling=pooling, ranks=128, local_ranks=8, route=route)
    for route in ("direct", "distinct_rows")
    for batch, pooling in ((1, 1), (512, 1), (512, 10))
]
TARGETS = {
    f"{half}, W=128, batch {batch}, pooling 1{route}": most
    for route in ("", ", distinct_rows")
    for batch in (1, 512)
    for half, most in (("pack", 3.0), ("unpack", 0.6))
}


def figures(*, quick: bool = False) -> list[Figure]:
    """Packing and unpacking, for each output path and pooling factor. ``quick``: 10 rounds, not 40."""
    return [figure for case in CASES for figure in measure(case, QUICK_ROUNDS if quick else ROUNDS)]


def measure(case: StepCase, rounds: int) -> list[Figure]:
    """Medians over rounds, of rank 0."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    taken: dict[str, list[tuple[float, float]]] = {"pack": [], "unpack": []}
    with torch_threads(1), mirrored_world(case.ranks, case.local_ranks):
        collection, features = sharded(case, device).collections[""], batch_of(case, device)
        for _ in range(WARM_UP + rounds):
            clocks = [_clocks()]
            pending = collection.send(features)
            clocks.append(_clocks())
            pending.wait()
            clocks.append(_clocks())
            for times, start, end in zip(taken.values(), clocks, clocks[1:], strict=False):
                times.append((end[0] - start[0], end[1] - start[1]))
    return [
        Figure(
            label(case, name),
            1e3 * median(wall for wall, _ in times[WARM_UP:]),
            "ms",
            beside={"CPU": 1e3 * median(cpu for _, cpu in times[WARM_UP:])},
        )
        for name, times in taken.items()
    ]


def label(case: StepCase, half: str) -> str:
    """The figure of a case.

    >>> label(CASES[-1], "pack")
    'pack, W=128, batch 512, pooling 10, distinct_rows'
    """
    route = "" if case.route == "direct" else f", {case.route}"
    return f"{half}, W={case.ranks}, batch {case.batch}, pooling {case.pooling}{route}"


def _clocks() -> tuple[float, float]:
    """Seconds by the clock and of this thread, less those of collectives, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - MirrorGroup.wall_s, time.thread_time() - MirrorGroup.cpu_s
