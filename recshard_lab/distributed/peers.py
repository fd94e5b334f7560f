"""Ranks whose batches are one batch, for losses that compare samples with those of other ranks.

Shape letters: b rows of this rank, B of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_reduce, all_to_all, issue_all_gather


class RankPeers:
    """Gathers rows of all ranks, and brings their gradients home.

    Args:
        env: the ranks; the default process group, or this process alone, when left out.

    >>> rows, first = RankPeers().gather(torch.ones(2, 3))
    >>> rows.shape, first
    (torch.Size([2, 3]), 0)
    """

    def __init__(self, env: ShardingEnv | None = None) -> None:
        self.env = env if env is not None else ShardingEnv.default()

    @property
    def world_size(self) -> int:
        """W."""
        return self.env.world_size

    def gather(self, own: Tensor) -> tuple[Tensor, int]:
        """``[b, ...]``, b of each rank's own -> ``[B, ...]``, and where this rank's rows begin."""
        if self.env.world_size == 1:
            return own, 0
        mine = torch.tensor([len(own)], device=own.device)
        sizes = issue_all_gather(mine, self.env, "peers/sizes").wait().tolist()
        return _Gather.apply(own, sizes, self.env), sum(sizes[: self.env.rank])

    def total(self, own: Tensor) -> Tensor:
        """The sum over ranks, without a gradient."""
        return all_reduce(own.detach().clone(), self.env, "peers/total")


class _Gather(torch.autograd.Function):
    """forward: rows of all ranks. backward: the gradients of this rank's rows, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int], env: ShardingEnv) -> Tensor:
        ctx.sizes, ctx.env = sizes, env
        width = own.shape[1:].numel()
        world = env.world_size
        arrived = all_to_all(
            own.reshape(-1).repeat(world), [own.numel()] * world, [n * width for n in sizes], env, "peers/rows"
        )
        return arrived.view(sum(sizes), *own.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, sizes, env = grads[0].contiguous(), ctx.sizes, ctx.env
        width = grad.shape[1:].numel()
        mine = sizes[env.rank]
        sends, receives = [n * width for n in sizes], [mine * width] * env.world_size
        arrived = all_to_all(grad.view(-1), sends, receives, env, "peers/gradients")
        return arrived.view(env.world_size, mine, *grad.shape[1:]).sum(0), None, None
