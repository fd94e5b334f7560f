"""The largest number of all ranks: a NaN of any rank reaches every rank, as in torch, although Gloo drops it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab.comm import ProcessGroupWire, ShardingEnv, all_reduce, trace
from tests.launched import launched

NAN, INF = float("nan"), float("inf")

ranks = launched([2, pytest.param(3, marks=pytest.mark.gate)])


def numbers_of(rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    """Element k has a NaN on rank k alone, the later ones are infinite on some ranks, the last has no NaN."""
    with_nan = [NAN if rank == k else float(rank - k) for k in range(world_size)]
    infinite = [INF if rank == 0 else -1.0, INF if rank == world_size - 1 else NAN, -INF, -INF if rank == 0 else -5.0]
    return torch.tensor([*with_nan, *infinite, -2.0 - rank], dtype=dtype)


def reduced(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    env = ShardingEnv.default()
    ours, over_group = (numbers_of(env.rank, env.world_size, dtype) for _ in range(2))
    with trace() as sent:
        assert all_reduce(ours, env, "test", maximum=True) is ours
    ProcessGroupWire(env.pg).all_reduce(over_group, maximum=True).wait()
    return ours, over_group, sent.count("all_reduce", "test")


def test_a_maximum_is_torchs_over_all_ranks_and_one_collective(ranks: Any) -> None:
    world_size = ranks.world_size
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        truth = torch.stack([numbers_of(rank, world_size, dtype) for rank in range(world_size)]).amax(0)
        assert truth.isnan().sum() == world_size + 1
        for ours, over_group, collectives in ranks.run(reduced, dtype):
            torch.testing.assert_close(ours, truth, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(over_group, truth, rtol=0, atol=0, equal_nan=True)
            assert collectives == 1
