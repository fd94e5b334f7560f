"""Work on several threads, for loops that release the GIL: torch's number of threads, no more."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

_SMALL = 1 << 20  # numbers read and written (about 0.3 ms): below, waking a thread costs what it gains


def threads_for(load: int) -> int:
    """How many threads a piece of work of so many numbers is worth.

    >>> threads_for(10)
    1
    """
    return torch.get_num_threads() if load >= _SMALL else 1


def run_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs tasks side by side, one of them here; returns when all are done, raises what one of them raised."""
    if not tasks:
        return
    waiting = [_pool(len(tasks) - 1).submit(task) for task in tasks[1:]]
    try:
        tasks[0]()
    finally:
        for future in waiting:
            future.exception()  # waits: nobody may write to memory that the caller takes for finished
    for future in waiting:
        future.result()


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="recshard-lookup")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a forked process


def share_out(loads: Sequence[int], shares: int) -> tuple[list[list[int]], bool]:
    """Positions of loads in up to ``shares`` shares of like sums (largest first), each ascending; and whether no
    share is more than a fifth above the mean.

    >>> share_out([5, 1, 4, 0], 2)
    ([[0], [1, 2]], True)
    >>> share_out([9, 1], 2)
    ([[0], [1]], False)
    """
    sums = [0] * shares
    chosen: list[list[int]] = [[] for _ in range(shares)]
    for position in sorted(range(len(loads)), key=lambda p: -loads[p]):
        if loads[position]:
            least = sums.index(min(sums))
            sums[least] += loads[position]
            chosen[least].append(position)
    return [sorted(own) for own in chosen if own], max(sums) * shares <= 1.2 * sum(sums)


def cut_evenly(loads: Sequence[int], shares: int, pieces: int | None = None) -> list[tuple[int, int]]:
    """Cuts a row of loads into ``shares`` ranges of like work, counted in pieces, ``pieces`` to a load (None: as many
    as the load says).

    >>> cut_evenly([10, 30], 2, pieces=6)
    [(0, 8), (8, 12)]
    """
    edges, done, total = [0], 0, sum(loads)
    position = 0
    for load in loads:
        size = load if pieces is None else pieces
        while len(edges) < shares and load and (done + load) * shares >= total * len(edges):
            edges.append(position + (total * len(edges) - done * shares) * size // (load * shares))
        done += load
        position += size
    edges += [position] * (shares + 1 - len(edges))
    return list(pairwise(edges))
