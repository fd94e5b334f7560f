"""``direct``: one all-to-all of partial rows, added where they arrive; and the gradients of replicas."""

from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.input_dist import Routed
from recshard_lab.distributed.layout import Layout
from recshard_lab.distributed.routes.base import BACKWARD, FORWARD, Route, runs_of, widths_of
from recshard_lab.distributed.routes.columns import ColumnJoin, Run
from recshard_lab.distributed.routes.wire import Parcel, Wire


class DirectRoute(Route):
    """Every rank sends ``[B, D_k]`` to every home.

    Replicated lanes send nothing forward; backward, their gradient goes to *every* rank, behind the columns of the
    exchanged lanes, so that all replicas take the same step.
    """

    name = "direct"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        starts = {number: block.start for number, block in enumerate(layout.blocks)}
        self.widths = [widths_of(lanes) for lanes in self.lanes]
        self.copies = widths_of(layout.replicated_lanes)
        self.own_width = self.width + sum(self.copies)
        exchanged = [runs_of(lanes, rank, starts) for rank, lanes in enumerate(self.lanes)]
        replicated = runs_of(layout.replicated_lanes, 0, starts)
        self.forward_join = ColumnJoin([run for runs in exchanged for run in runs])
        self.local_join = ColumnJoin(replicated)
        self.backward_join = ColumnJoin(
            run
            for rank, runs in enumerate(exchanged)
            for run in [*runs, *(Run(rank, r.source + sum(self.widths[rank]), r.target, r.width) for r in replicated)]
        )
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)

    def begin(self, rows: Tensor, routed: Routed) -> Any:
        self.buffer_bytes = 0
        if not any(self.widths):  # every table is replicated: on all ranks alike
            return None
        own = self.widths[self.env.rank]
        sends = [[Parcel(segments, own)] for segments in routed.segments]
        receives = [Parcel(routed.home.batch_size, widths) for widths in self.widths]
        arriving = self.forward_wire.send(rows.reshape(-1), sends, [[parcel] for parcel in receives])
        self.buffer_bytes = arriving.buffer_bytes
        return arriving, receives

    def finish(self, begun: Any, out: Tensor, routed: Routed) -> None:
        if begun is None:
            return
        arriving, receives = begun
        parts = arriving.wait().split([parcel.size for parcel in receives])
        self.forward_join.join([part.view(p.rows, sum(p.widths)) for part, p in zip(parts, receives, strict=True)], out)

    def begin_backward(self, grad: Tensor, scale: float, routed: Routed) -> Any:
        self.buffer_bytes = 0
        if not any(self.widths) and not self.copies:
            return grad.new_empty(0)
        sends = [Parcel(grad.shape[0], widths + self.copies) for widths in self.widths]
        own = self.widths[self.env.rank] + self.copies
        receives = [[Parcel(segments, own)] for segments in routed.segments]
        message = grad.new_empty(sum(parcel.size for parcel in sends))
        parts = message.split([parcel.size for parcel in sends])
        shaped = [part.view(p.rows, sum(p.widths)) for part, p in zip(parts, sends, strict=True)]
        self.backward_join.take_apart(grad, shaped, scale)
        arriving = self.backward_wire.send(message, [[parcel] for parcel in sends], receives)
        self.buffer_bytes = arriving.buffer_bytes
        return arriving

    def finish_backward(self, begun: Any, routed: Routed) -> Tensor:
        """The gradient of the exchanged lanes, then that of the replicated ones: ``[sum of B, own_width]``."""
        received: Tensor = begun if isinstance(begun, Tensor) else begun.wait()
        return received.view(sum(routed.segments), self.own_width)

    def copy_local(self, replicated: list[Tensor], out: Tensor) -> None:
        """Replicas' rows of the local batch, which never left."""
        if replicated:
            self.local_join.join([torch.cat(replicated, 1) if len(replicated) > 1 else replicated[0]], out)
