"""Exchanges samples between ranks, for losses that compare the samples of all ranks.

Shape letters: b rows of this rank, B of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_reduce, all_to_all, issue_all_gather


class RankPeers:
    """Gathers the rows of all ranks; backward returns their gradients to the source ranks.

    Args:
        env: the ranks. Default: the default process group, or this process alone.

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

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """``[b, ...]``, where b may differ between ranks -> ``[B, ...]``, and the offset of this rank's rows."""
        if self.env.world_size == 1:
            return rows, 0
        size = torch.tensor([len(rows)], device=rows.device)
        sizes = issue_all_gather(size, self.env, "peers/sizes").wait().tolist()
        return _Gather.apply(rows, sizes, self.env), sum(sizes[: self.env.rank])

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, without a gradient."""
        return all_reduce(values.detach().clone(), self.env, "peers/total")


class _Gather(torch.autograd.Function):
    """forward: rows of all ranks. backward: the gradients of this rank's rows, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], env: ShardingEnv) -> Tensor:
        ctx.sizes, ctx.env = sizes, env
        width = rows.shape[1:].numel()
        world = env.world_size
        received = all_to_all(
            rows.reshape(-1).repeat(world), [rows.numel()] * world, [n * width for n in sizes], env, "peers/rows"
        )
        return received.view(sum(sizes), *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, sizes, env = grads[0].contiguous(), ctx.sizes, ctx.env
        width = grad.shape[1:].numel()
        size = sizes[env.rank]
        sends, receives = [n * width for n in sizes], [size * width] * env.world_size
        received = all_to_all(grad.view(-1), sends, receives, env, "peers/gradients")
        return received.view(env.world_size, size, *grad.shape[1:]).sum(0), None, None
