"""How long collectives and dense arithmetic take on launched ranks: milliseconds by size.

Shape letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.sharding import Topology

SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20)  # bytes that a rank sends to each other
WARM_UP, REPEATS = 2, 9
DENSE_WIDTH, DENSE_BATCH = 512, 512


@dataclass(frozen=True)
class TimedCollective:
    """One collective of one size.

    Attributes:
        op: its name.
        nbytes: that a rank sends to each other rank (all_reduce: of the tensor, through W).
        ms: of the slowest rank: the mean of the faster half of the repeats.
    """

    op: str
    nbytes: int
    ms: float


def time_collectives(ranks: Any, sizes: Sequence[int] = SIZES) -> list[TimedCollective]:
    """Times all_to_all, reduce_scatter and all_reduce of each size on launched ranks; nothing on one rank."""
    from recshard_lab.calibration.steps import faster_half

    if ranks.world_size == 1:
        return []
    told = ranks.run(collectives_on_rank, list(sizes))
    return [
        TimedCollective(op, nbytes, faster_half(np.array([rank[number][2] for rank in told]).max(axis=0)))
        for number, (op, nbytes, _) in enumerate(told[0])
    ]


def collectives_on_rank(sizes: Sequence[int]) -> list[tuple[str, int, list[float]]]:
    """What one rank runs: (op, bytes, ms of each repeat). Collective."""
    import torch
    import torch.distributed as dist

    from recshard_lab.comm.collectives import all_reduce, all_to_all, issue_reduce_scatter
    from recshard_lab.comm.groups import ShardingEnv

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    found = []
    for nbytes in sizes:
        each = nbytes // 4
        values, splits = torch.zeros(each * env.world_size), [each] * env.world_size
        ways: dict[str, Callable[[], object]] = {
            "all_to_all": partial(all_to_all, values, splits, splits, env, "calibrate"),
            "reduce_scatter": lambda: issue_reduce_scatter(values, env, "calibrate").wait(),  # noqa: B023, run in here
            "all_reduce": partial(all_reduce, values, env, "calibrate"),
        }
        for op, run in ways.items():
            taken = []
            for _ in range(WARM_UP + REPEATS):
                dist.barrier()
                begun = perf_counter()
                run()
                taken.append(1000 * (perf_counter() - begun))
            found.append((op, nbytes, taken[WARM_UP:]))
    return found


def dense_flops_per_ms(ranks: Any) -> float:
    """Arithmetic of one rank's linear layers, forward and backward, while all ranks are at it."""
    return float(np.median(ranks.run(dense_on_rank)))


def dense_on_rank() -> float:
    """Operations per ms of one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    layers = nn.Sequential(nn.Linear(DENSE_WIDTH, DENSE_WIDTH), nn.ReLU(), nn.Linear(DENSE_WIDTH, DENSE_WIDTH))
    values, taken = torch.ones(DENSE_BATCH, DENSE_WIDTH, requires_grad=True), []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        begun = perf_counter()
        layers(values).sum().backward()
        taken.append(1000 * (perf_counter() - begun))
    operations = 6.0 * DENSE_BATCH * sum(p.numel() for p in layers.parameters())
    return operations / float(np.median(taken[WARM_UP:]))


def figures_of(timed: Sequence[TimedCollective], topology: Topology) -> dict[str, float]:
    """The figures of a `Topology` that say what was timed: ``ms = latency + bytes / rate``, least relative squares.

    Args:
        timed: of all sizes.
        topology: of as many ranks, all on one host.
    """
    from scipy.optimize import nnls

    others = topology.world_size - 1
    if not others:
        return {}
    ways: dict[str, list[TimedCollective]] = {}
    for one in timed:
        ways.setdefault(one.op, []).append(one)
    direct = ways["all_to_all"]
    costs = np.array([[1.0, one.nbytes] for one in direct]) / np.array([[one.ms] for one in direct])
    scale = costs.max(axis=0)
    latency, per_byte = nnls(costs / scale, np.ones(len(direct)))[0] / scale
    pairs = zip(ways["reduce_scatter"], direct, strict=True)
    large = [np.log(summed.ms / sent.ms) for summed, sent in pairs if sent.nbytes >= SIZES[2]]
    found = {"peer_ms": latency / others / topology.slowdown}
    if large:
        found["reduce_scatter_cost"] = float(np.exp(np.mean(large)))
    if per_byte:
        found["intra_host_bw"] = others * topology.slowdown / per_byte
    return {name: float(value) for name, value in found.items() if value > 0}


def as_dicts(timed: Sequence[TimedCollective]) -> list[dict[str, Any]]:
    """For a profile."""
    return [asdict(one) for one in timed]
