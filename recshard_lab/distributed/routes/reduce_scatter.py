"""``reduce_scatter``: row stripes are added on the way home; gradients come back by an all-gather.

Every rank gives ``[W, B, D]``, D the columns of all tables of this route, zeros where it has none of them: right for
row-wise tables over all ranks, wasteful where few ranks hold a table. Ranks' batches are padded to the largest.
A table whose rows are not cut has nothing to add: its rows travel as under ``direct`` (`layout.effective_route`).
"""

from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, issue_all_gather, issue_reduce_scatter
from recshard_lab.distributed.input_dist import Routed
from recshard_lab.distributed.layout import Layout
from recshard_lab.distributed.routes.base import BACKWARD, FORWARD, Route, runs_of
from recshard_lab.distributed.routes.columns import ColumnJoin, Run


class ReduceScatterRoute(Route):
    """The network adds."""

    name = "reduce_scatter"

    def __init__(self, layout: Layout, env: ShardingEnv) -> None:
        super().__init__(layout, env)
        home_runs: list[Run] = []
        compact: dict[int, int] = {}  # block -> its first column among those of this route
        self.columns = 0
        for block in sorted({lane.block for lanes in self.lanes for lane in lanes}):
            made = layout.blocks[block]
            compact[block] = self.columns
            home_runs.append(Run(0, self.columns, made.start, made.dim))
            self.columns += made.dim
        self.home_join = ColumnJoin(home_runs)
        self.own_join = ColumnJoin(runs_of(self.lanes[env.rank], 0, compact))

    def begin(self, rows: Tensor, routed: Routed) -> Any:
        if not self.own_join.is_identity(self.columns):
            spread = rows.new_zeros(rows.shape[0], self.columns)
            self.own_join.join([rows], spread)
            rows = spread
        message = self._padded(rows, routed.segments)
        self.buffer_bytes = (message.numel() + message.numel() // self.env.world_size) * message.element_size()
        return issue_reduce_scatter(message.view(-1), self.env, FORWARD)

    def finish(self, begun: Any, out: Tensor, routed: Routed) -> None:
        summed = begun.wait().view(max(routed.segments), self.columns)
        self.home_join.join([summed[: out.shape[0]]], out)

    def begin_backward(self, grad: Tensor, scale: float, routed: Routed) -> Any:
        message = grad.new_zeros(max(routed.segments), self.columns)
        self.home_join.take_apart(grad, [message[: grad.shape[0]]], scale)
        self.buffer_bytes = message.numel() * (1 + self.env.world_size) * message.element_size()
        return issue_all_gather(message.view(-1), self.env, BACKWARD)

    def finish_backward(self, begun: Any, routed: Routed) -> Tensor:
        largest = max(routed.segments)
        padded = begun.wait().view(self.env.world_size, largest, self.columns)
        if min(routed.segments) < largest:
            rows = torch.cat([each[:batch] for each, batch in zip(padded, routed.segments, strict=True)])
        else:
            rows = padded.view(-1, self.columns)
        if self.own_join.is_identity(self.columns):
            return rows
        own = rows.new_empty(rows.shape[0], self.width)
        self.own_join.take_apart(rows, [own])
        return own

    def _padded(self, rows: Tensor, segments: list[int]) -> Tensor:
        """``[sum of B, D]`` -> ``[W, largest B, D]``."""
        largest = max(segments)
        if min(segments) == largest:
            return rows
        padded = rows.new_zeros(len(segments), largest, rows.shape[1])
        for target, part in zip(padded, rows.split(segments), strict=True):
            target[: part.shape[0]] = part
        return padded
