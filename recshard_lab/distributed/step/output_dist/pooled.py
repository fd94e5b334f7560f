"""Pooled rows: every route's lanes go their own way, one route's messages for all its tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recshard_lab.comm import Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.input_dist import LocalBatch, LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import Route
from recshard_lab.distributed.step.output_dist.direct import DirectRoute
from recshard_lab.distributed.step.output_dist.reduce_scatter import ReduceScatterRoute
from recshard_lab.distributed.step.output_dist.two_hop import TwoHopRoute

KINDS: dict[str, type[Route]] = {kind.name: kind for kind in (DirectRoute, ReduceScatterRoute, TwoHopRoute)}


class Columns:
    """Gradients ``[n, width]`` side by side, read from the left; flat ones end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.shape[-1]]
        self._position, self._example = 0, tensors[0]

    def take(self, width: int) -> Tensor:
        """The next ``width`` columns, contiguous. One taking never spans two tensors."""
        if width == 0:
            return self._example.narrow(-1, 0, 0)
        first = self._tensors[0]
        start, self._position = self._position, self._position + width
        taken = first.narrow(-1, start, width).contiguous()
        if self._position == first.shape[-1]:
            self._tensors, self._position = self._tensors[1:], 0
        return taken


class PooledRoute:
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

    @property
    def buffer_bytes(self) -> int:
        """What the messages of the last pass needed."""
        return sum(route.buffer_bytes for route in self.routes)

    def forward(self, exchanged: list[Tensor], replicated: list[Tensor], lookup_input: LookupInput) -> Tensor:
        """Kernel outputs -> ``[B, output width]`` on this rank."""
        total, left = sum(lookup_input.segments), list(exchanged)
        dtype = self.layout.rows_dtype
        begun = []
        for route in self.routes:  # a route's kernels lie side by side, in the order of the routes
            own: list[Tensor] = []
            while sum(rows.shape[1] for rows in own) < route.width:
                own.append(left.pop(0).to(dtype))
            rows = own[0] if len(own) == 1 else torch.cat(own or [lookup_input.ids.new_empty(total, 0, dtype=dtype)], 1)
            begun.append(route.begin(rows, lookup_input))
        out = torch.empty(
            lookup_input.local_batch.batch_size, self.layout.output_width, dtype=dtype, device=lookup_input.ids.device
        )
        self.direct.copy_local(replicated, out)
        for route, under_way in zip(self.routes, begun, strict=True):
            route.finish(under_way, out, lookup_input)
        self.direct.add_local(replicated, out)
        self._divide_means(out, lookup_input.local_batch)
        return out

    def backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Columns:
        """``[B, output width]``, to be multiplied by ``scale`` -> for each group, then each replicated group, its
        ``[sum of B, width]`` from every rank."""
        if self.layout.mean_blocks:
            grad, scale = grad * scale, 1.0
            self._divide_means(grad, lookup_input.local_batch)
        begun = [route.begin_backward(grad, scale, lookup_input) for route in self.routes]
        direct, copies = self.direct.finish_both(begun[0], lookup_input)
        others = [
            route.finish_backward(each, lookup_input) for route, each in zip(self.routes[1:], begun[1:], strict=True)
        ]
        return Columns([direct, *others, *([] if copies is None else [copies])])

    def _divide_means(self, rows: Tensor, local_batch: LocalBatch) -> None:
        for index in self.layout.mean_blocks:
            block = self.layout.blocks[index]
            divisor = local_batch.lengths[index].clamp(min=1).to(rows.dtype).unsqueeze(1)
            rows[:, block.start : block.start + block.dim].div_(divisor)
