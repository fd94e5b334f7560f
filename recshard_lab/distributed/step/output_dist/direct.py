"""``direct``: one all-to-all of partial rows, added where they arrive; and the gradients of replicas."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.input_dist import LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import BACKWARD, FORWARD, Route, runs_of, widths_of
from recshard_lab.distributed.step.output_dist.columns import ColumnJoin
from recshard_lab.distributed.step.output_dist.replica_gradients import Replicas
from recshard_lab.distributed.step.output_dist.wire import Parcel, Wire, size_of


class DirectRoute(Route):
    """Every rank sends ``[B, D_k]`` to every home.

    Replicated lanes send nothing forward; backward, their gradient goes to *every* rank, behind the columns of the
    exchanged lanes (`Replicas`), so that all replicas take the same step.
    """

    name = "direct"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        starts = {number: block.start for number, block in enumerate(layout.blocks)}
        self.widths = [widths_of(lanes) for lanes in self.lanes]
        self.replicas = Replicas(layout)
        exchanged = [runs_of(lanes, rank, starts) for rank, lanes in enumerate(self.lanes)]
        self.join = ColumnJoin([run for runs in exchanged for run in runs])
        local = runs_of(layout.replicated_features, 0, starts)
        added = [lane.block in layout.partly_replicated for lane in layout.replicated_features]
        self.local_join = ColumnJoin([run for run, also in zip(local, added, strict=True) if not also])
        self.local_add = ColumnJoin([run for run, also in zip(local, added, strict=True) if also])
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Any:
        self.buffer_bytes = 0
        if not any(self.widths):  # every table is replicated: on all ranks alike
            return None
        own = self.widths[self.env.rank]
        sends = [[Parcel(segments, own)] for segments in lookup_input.segments]
        receives = [Parcel(lookup_input.local_batch.batch_size, widths) for widths in self.widths]
        arriving = self.forward_wire.send(rows.reshape(-1), sends, [[parcel] for parcel in receives])
        self.buffer_bytes = arriving.buffer_bytes
        return arriving, receives

    def finish(self, begun: Any, out: Tensor, lookup_input: LookupInput) -> None:
        if begun is None:
            return
        arriving, receives = begun
        parts = arriving.wait().split([parcel.size for parcel in receives])
        self.join.join([part.view(p.rows, sum(p.widths)) for part, p in zip(parts, receives, strict=True)], out)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Any:
        self.buffer_bytes = 0
        if not any(self.widths) and not self.replicas.lanes:
            return grad.new_empty(0)
        copies = self.replicas.sends(lookup_input.local_batch)
        sends = [[Parcel(grad.shape[0], widths), *copies] for widths in self.widths]
        receives = [
            [Parcel(segments, self.widths[self.env.rank]), *theirs]
            for segments, theirs in zip(lookup_input.segments, self.replicas.receives(lookup_input), strict=True)
        ]
        message = grad.new_empty(sum(map(size_of, sends)))
        columns, tails = _parts(message, sends)
        batch = grad.shape[0]
        shaped = [part.view(batch, sum(widths)) for part, widths in zip(columns, self.widths, strict=True)]
        self.join.take_apart(grad, shaped, scale)
        if copies:
            blocks = [self.layout.blocks[lane.block] for lane in self.replicas.lanes]
            own = [grad[:, block.start : block.start + block.dim] for block in blocks]
            self.replicas.write(own, scale, lookup_input.local_batch, tails[0])
            for tail in tails[1:]:
                tail.copy_(tails[0])
        arriving = self.backward_wire.send(message, sends, receives)
        self.buffer_bytes = arriving.buffer_bytes
        return arriving, receives

    def finish_backward(self, begun: Any, lookup_input: LookupInput) -> Tensor:
        return self.finish_both(begun, lookup_input)[0]

    def finish_both(self, begun: Any, lookup_input: LookupInput) -> tuple[Tensor, Tensor | None]:
        """The gradient of the exchanged lanes ``[sum of B, width]``, and that of the replicated ones, if there are."""
        total = sum(lookup_input.segments)
        if isinstance(begun, Tensor):
            return begun.view(total, 0), None
        received = begun[0].wait()
        if not self.replicas.lanes:
            return received.view(total, self.width), None
        columns, tails = _parts(received, begun[1])
        exchanged = torch.cat(columns) if self.width else received[:0]
        return exchanged.view(total, self.width), self.replicas.join(tails, lookup_input)

    def copy_local(self, replicated: list[Tensor], out: Tensor) -> None:
        """Replicas' rows of the local batch, which never left, where nothing else comes home."""
        if self.local_join.runs:
            self.local_join.join([_side_by_side(replicated)], out)

    def add_local(self, replicated: list[Tensor], out: Tensor) -> None:
        """The same on top of what came home for the rows that are no replicas."""
        if self.local_add.runs:
            self.local_add.add([_side_by_side(replicated)], out)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _parts(flat: Tensor, loads: Sequence[Sequence[Parcel]]) -> tuple[list[Tensor], list[Tensor]]:
    """Of each load, the first parcel and all the others, flat."""
    sizes = [size for first, *rest in loads for size in (first.size, size_of(rest))]
    parts = flat.split(sizes)
    return list(parts[::2]), list(parts[1::2])
