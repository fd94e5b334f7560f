"""Times collectives by size and group.

``sizes`` of a timed collective: the bytes that a rank sends to each other rank of the group (all_reduce: of the tensor,
divided by the ranks), and the ranks of the group.

On GPUs the collectives of one size follow each other on the stream, as in nccl-tests (``doc/PERFORMANCE.md`` of
NVIDIA/nccl-tests), between two events. Groups of 2, 4, ... ranks separate a collective's latency from the cost of a
message to each peer. Gloo on CPUs is timed with all ranks, after a barrier, by the wall clock.

Shape letters: W ranks, g ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from recshard_lab.calibration.clock import Clock, TimedOperator, faster_half

SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20)  # bytes, on a CPU
GPU_SIZES: tuple[int, ...] = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)
ISSUES = 32
Times = tuple[str, tuple[int, ...], list[float]]


def time_collectives(ranks: Any, *, short: bool = False) -> list[TimedOperator]:
    """Times all_to_all, reduce_scatter and all_reduce of each size on launched ranks. Returns [] on one rank.

    Args:
        ranks: launched ranks.
        short: only the smallest and the largest size, of all ranks, for `drift`.
    """
    return [] if ranks.world_size == 1 else joined(ranks.run(collectives_on_rank, short))


def joined(by_rank: Sequence[Sequence[Times]]) -> list[TimedOperator]:
    """Of the times of each rank, those of the slowest rank in each repeat."""
    return [
        TimedOperator(op, sizes, faster_half(np.array([rank[number][2] for rank in by_rank]).max(axis=0)))
        for number, (op, sizes, _) in enumerate(by_rank[0])
    ]


def collectives_on_rank(short: bool = False) -> list[Times]:
    """Runs on each rank: op, sizes, ms of each repeat. Collective."""
    from recshard_lab.comm import ShardingEnv, compute_device

    return times_on(Clock(compute_device(ShardingEnv.default())), short=short)


def times_on(clock: Clock, *, short: bool = False) -> list[Times]:
    """`collectives_on_rank`, with a clock."""
    import torch
    import torch.distributed as dist

    from recshard_lab.comm.collectives import all_reduce, all_to_all, issue_reduce_scatter
    from recshard_lab.comm.env import ShardingEnv

    on_gpu, whole = clock.device.type != "cpu", ShardingEnv.default()
    found: list[Times] = []
    sizes = GPU_SIZES if on_gpu else SIZES
    for env in _groups(whole) if on_gpu and not short else [whole]:
        for nbytes in sizes[:: len(sizes) - 1] if short else sizes:
            each = nbytes // 4
            values, splits = torch.zeros(each * env.world_size, device=clock.device), [each] * env.world_size
            ways: dict[str, Callable[[], object]] = {
                "all_to_all": partial(all_to_all, values, splits, splits, env, "calibrate"),
                "reduce_scatter": lambda: issue_reduce_scatter(values, env, "calibrate").wait(),  # noqa: B023, run here
                "all_reduce": partial(all_reduce, values, env, "calibrate"),
            }
            found += [
                (op, (nbytes, env.world_size), clock.times(op, (nbytes, env.world_size), run, before=dist.barrier))
                for op, run in ways.items()
            ]
    if on_gpu:
        few = torch.zeros(whole.world_size, device=clock.device)
        ones = [1] * whole.world_size
        issue = partial(all_to_all, few, ones, ones, whole, "calibrate")
        found.append(("issue", (ISSUES,), clock.host_times("issue", (ISSUES,), issue, ISSUES)))
    return found


def _groups(whole: Any) -> list[Any]:
    """Groups of 2, 4, ... consecutive ranks that fill the world, then all ranks. Collective."""
    from recshard_lab.comm.env import ShardingEnv, group_among

    found, size = [], 2
    while size < whole.world_size:
        if whole.world_size % size == 0:
            subsets = [range(first, first + size) for first in range(0, whole.world_size, size)]
            found.append(ShardingEnv.from_process_group(group_among(whole.process_group, subsets)))
        size *= 2
    return [*found, whole]
