"""Runs loops that release the GIL on up to torch's number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch

_SMALL = 1 << 20  # numbers read and written (about 0.3 ms): below, starting a thread costs as much as it saves


def threads_for(load: int) -> int:
    """The number of threads for work that reads and writes ``load`` numbers.

    >>> threads_for(10)
    1
    """
    return torch.get_num_threads() if load >= _SMALL else 1


def run_all(run: Callable[..., object], shares: Sequence[tuple[Any, ...]]) -> None:
    """Calls ``run(*share)`` for all shares in parallel, for the first on this thread. Returns when all are done, and
    raises an error of any."""
    if len(shares) == 1:
        run(*shares[0])
    if len(shares) < 2:
        return
    waiting = [_pool(len(shares) - 1).submit(run, *share) for share in shares[1:]]
    try:
        run(*shares[0])
    finally:
        for future in waiting:
            future.exception()  # waits: no task may write after this function returns
    for future in waiting:
        future.result()


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="recshard-lookup")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads


def share_out(loads: Sequence[int], shares: int) -> tuple[list[list[int]], bool]:
    """Divides positions of loads into up to ``shares`` ascending lists of similar sums (largest load first). Also
    returns whether the largest sum is at most 1.2x the mean.

    >>> share_out([5, 1, 4, 0], 2)
    ([[0], [1, 2]], True)
    >>> share_out([9, 1], 2)
    ([[0], [1]], False)
    """
    sums = [0] * shares
    chosen: list[list[int]] = [[] for _ in range(shares)]
    # largest first: each load goes to the share with the least so far
    for position in sorted(range(len(loads)), key=lambda p: -loads[p]):
        if loads[position]:
            least = sums.index(min(sums))
            sums[least] += loads[position]
            chosen[least].append(position)
    return [sorted(own) for own in chosen if own], max(sums) * shares <= 1.2 * sum(sums)


def cut_evenly(loads: Sequence[int], shares: int, pieces: int | None = None) -> list[tuple[int, int]]:
    """Splits a sequence of loads into ``shares`` ranges of similar work. Ranges count units: ``pieces`` per load, or if
    None as many as the load.

    >>> cut_evenly([10, 30], 2, pieces=6)
    [(0, 8), (8, 12)]
    """
    edges, done, total = [0], 0, sum(loads)
    position = 0
    for load in loads:
        size = load if pieces is None else pieces
        # an edge inside this load
        while len(edges) < shares and load and (done + load) * shares >= total * len(edges):
            edges.append(position + (total * len(edges) - done * shares) * size // (load * shares))
        done += load
        position += size
    edges += [position] * (shares + 1 - len(edges))
    return list(pairwise(edges))
