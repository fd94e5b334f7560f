"""``reduce_scatter``: row stripes are added on the way home; gradients come back by an all-gather.

Every rank gives ``[W, B, D]``, D the columns of all tables of this route, zeros where it has none of them: right for
row-wise tables over all ranks, wasteful where few ranks hold a table. Ranks' batches are padded to the largest.
Forward, coded values are added: FP16 and BF16 round each partial sum, up to W times, and INT8 is refused by name.
A table whose rows are not cut has nothing to add: its rows travel as under ``direct`` (`layout.effective_route`).
"""

from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import CommOp, QuantizedCommCodecs, ShardingEnv, issue_reduce_scatter
from recshard_lab.distributed.step.input_dist import LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import BACKWARD, FORWARD, Route, runs_of
from recshard_lab.distributed.step.output_dist.columns import ColumnJoin, Run
from recshard_lab.distributed.step.output_dist.wire import Parcel, Wire
from recshard_lab.sharding import PlanError


class ReduceScatterRoute(Route):
    """The network adds."""

    name = "reduce_scatter"
    op = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        home_runs: list[Run] = []
        compact: dict[int, int] = {}  # block -> its first column among those of this route
        self.columns = 0
        for block in sorted({lane.block for lanes in self.lanes for lane in lanes}):
            made = layout.blocks[block]
            compact[block] = self.columns
            home_runs.append(Run(0, self.columns, made.start, made.dim))
            self.columns += made.dim
        self.home_join = ColumnJoin(home_runs)
        self.widths = tuple(layout.blocks[block].dim for block in compact)
        self._check_codec()
        self.backward_wire = Wire(env, f"{BACKWARD}/{self.name}", codecs.backward)
        self.own_join = ColumnJoin(runs_of(self.lanes[env.rank], 0, compact))

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Any:
        if not self.own_join.is_identity(self.columns):
            spread = rows.new_zeros(rows.shape[0], self.columns)
            self.own_join.join([rows], spread)
            rows = spread
        codec, dtype = self.codecs.forward, rows.dtype
        padded = self._padded(rows, lookup_input.segments)
        message = codec.encode(padded.view(-1, self.columns), parts=self.env.world_size)
        self.buffer_bytes = (message.numel() + message.numel() // self.env.world_size) * message.element_size()
        return issue_reduce_scatter(message.view(-1), self.env, f"{FORWARD}/{self.name}"), dtype

    def finish(self, begun: Any, out: Tensor, lookup_input: LookupInput) -> None:
        pending, dtype = begun
        received = pending.wait().view(max(lookup_input.segments), self.columns)
        summed = self.codecs.forward.decode(received, self.columns, dtype)
        self.home_join.join([summed[: out.shape[0]]], out)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Any:
        message = grad.new_zeros(max(lookup_input.segments), self.columns)
        self.home_join.take_apart(grad, [message[: grad.shape[0]]], scale)
        arriving = self.backward_wire.gather(message.view(-1), Parcel(message.shape[0], self.widths))
        self.buffer_bytes = arriving.buffer_bytes
        return arriving

    def finish_backward(self, begun: Any, lookup_input: LookupInput) -> Tensor:
        largest = max(lookup_input.segments)
        padded = begun.wait().view(self.env.world_size, largest, self.columns)
        if min(lookup_input.segments) < largest:
            rows = torch.cat([each[:batch] for each, batch in zip(padded, lookup_input.segments, strict=True)])
        else:
            rows = padded.view(-1, self.columns)
        if self.own_join.is_identity(self.columns):
            return rows
        own = rows.new_empty(rows.shape[0], self.width)
        self.own_join.take_apart(rows, [own])
        return own

    def _check_codec(self) -> None:
        codec = self.codecs.forward
        if not codec.adds_on_wire:
            raise PlanError(
                f"route 'reduce_scatter' adds rows on the way, and rows coded as {codec.comm_type} cannot be added. "
                f"Fix: forward_precision=CommType.FP16, or route 'direct' or 'two_hop'"
            )

    def _padded(self, rows: Tensor, segments: list[int]) -> Tensor:
        """``[sum of B, D]`` -> ``[W, largest B, D]``."""
        largest = max(segments)
        if min(segments) == largest:
            return rows
        padded = rows.new_zeros(len(segments), largest, rows.shape[1])
        for target, part in zip(padded, rows.split(segments), strict=True):
            target[: part.shape[0]] = part
        return padded
