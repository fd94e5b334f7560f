"""Pooled rows: every route's lanes go their own way, one route's messages for all its tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recshard_lab.comm import Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.input_dist import LocalBatch, LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import Columns, OutputExchange, PendingOutput, Route
from recshard_lab.distributed.step.output_dist.direct import DirectRoute
from recshard_lab.distributed.step.output_dist.reduce_scatter import ReduceScatterRoute
from recshard_lab.distributed.step.output_dist.two_hop import TwoHopRoute

KINDS: dict[str, type[Route]] = {kind.name: kind for kind in (DirectRoute, ReduceScatterRoute, TwoHopRoute)}


class PooledOutput(OutputExchange):
    """Brings the rows of all exchanged kernels home and joins them with the replicas' own.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout = layout
        self.direct = DirectRoute(layout, env, codecs_for(DirectRoute.op, registry))
        others = [KINDS[name] for name in layout.routes if name != "direct"]
        self.routes: list[Route] = [self.direct, *(kind(layout, env, codecs_for(kind.op, registry)) for kind in others)]

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        total, left = sum(lookup_input.segments), list(exchanged)
        dtype = self.layout.rows_dtype
        begun = []
        for route in self.routes:  # a route's kernels lie side by side, in the order of the routes
            own: list[Tensor] = []
            while sum(rows.shape[1] for rows in own) < route.width:
                own.append(left.pop(0).to(dtype))
            rows = own[0] if len(own) == 1 else torch.cat(own or [lookup_input.ids.new_empty(total, 0, dtype=dtype)], 1)
            begun.append(route.begin(rows, lookup_input))
        return PendingOutput(lookup_input, (begun, list(replicated)))

    def finish(self, pending: PendingOutput) -> Tensor:
        """``[B, output width]``."""
        lookup_input, (begun, replicated) = pending.lookup_input, pending.state
        out = torch.empty(
            lookup_input.local_batch.batch_size,
            self.layout.output_width,
            dtype=self.layout.rows_dtype,
            device=lookup_input.ids.device,
        )
        self.direct.copy_local(replicated, out)
        for route, under_way in zip(self.routes, begun, strict=True):
            route.finish(under_way, out, lookup_input)
        self.direct.add_local(replicated, out)
        self._divide_means(out, lookup_input.local_batch)
        pending.buffer_bytes = sum(route.buffer_bytes for route in self.routes)
        return out

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        if self.layout.mean_blocks:
            grad, scale = grad * scale, 1.0
            self._divide_means(grad, lookup_input.local_batch)
        return PendingOutput(lookup_input, [route.begin_backward(grad, scale, lookup_input) for route in self.routes])

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """``[sum of B, width]`` of each kernel."""
        begun, lookup_input = pending.state, pending.lookup_input
        direct, copies = self.direct.finish_both(begun[0], lookup_input)
        others = [
            route.finish_backward(each, lookup_input) for route, each in zip(self.routes[1:], begun[1:], strict=True)
        ]
        pending.buffer_bytes = sum(route.buffer_bytes for route in self.routes)
        return Columns([direct, *others, *([] if copies is None else [copies])])

    def _divide_means(self, rows: Tensor, local_batch: LocalBatch) -> None:
        for index in self.layout.mean_blocks:
            block = self.layout.blocks[index]
            divisor = local_batch.lengths[index].clamp(min=1).to(rows.dtype).unsqueeze(1)
            rows[:, block.start : block.start + block.dim].div_(divisor)
