"""``direct``: one all-to-all of partial rows, added by the rank that receives them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import BACKWARD, FORWARD, OutputPath, runs_of, widths_of
from recshard_lab.distributed.step.output_dist.columns import ColumnMap
from recshard_lab.distributed.step.output_dist.replica_gradients import Replicas
from recshard_lab.distributed.step.output_dist.wire import Parcels, Wire
from recshard_lab.distributed.step.types import LookupInput


class DirectPath(OutputPath):
    """Rank k sends ``[B, D_k]`` to the rank of each local batch.

    Replicas send nothing forward. Backward, their gradients go to every rank, behind the columns of the exchanged
    shards (`Replicas`), so that all replicas take the same step.
    """

    name = "direct"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        self.widths = [widths_of(features) for features in self.features]
        self.area_widths = [sum(widths) for widths in self.widths]
        starts = [block.start for block in layout.blocks]
        self.runs = [run for rank, stored in enumerate(self.features) for run in runs_of(stored, rank, starts)]
        self.replicas = Replicas(layout, self.width)
        self.split = ColumnMap([run.reversed() for run in self.runs], [layout.output_width], self.area_widths)
        own, copies = self.widths[env.rank], [(width,) for width in self.replicas.widths]
        self.sent, self.received = Parcels([[own]] * env.world_size), Parcels([[widths] for widths in self.widths])
        self.sent_back = Parcels([[widths, *copies] for widths in self.widths])
        self.received_back = Parcels([[own, *copies]] * env.world_size)
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Any:
        self.buffer_bytes = 0
        if not any(self.area_widths):  # every table is replicated: on all ranks alike
            return rows.view(-1)
        sends = self.sent, np.array(lookup_input.segments)
        arriving = self.forward_wire.send(
            rows.reshape(-1), sends, (self.received, np.array(self.area_rows(lookup_input)))
        )
        self.buffer_bytes = arriving.buffer_bytes
        return arriving

    def finish(self, begun: Any, lookup_input: LookupInput) -> Tensor:
        return begun if isinstance(begun, Tensor) else begun.wait()

    def area_rows(self, lookup_input: LookupInput) -> list[int]:
        return [lookup_input.local_batch.batch_size] * self.env.world_size

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Any:
        self.buffer_bytes = 0
        if not any(self.area_widths) and not self.replicas.features:
            return grad.new_empty(0)
        batch = lookup_input.local_batch
        message = self.split(grad.view(-1), [0], [batch.batch_size] * self.env.world_size, scale)
        sends = np.tile([batch.batch_size, *self.replicas.sends(batch)], self.env.world_size)
        receives = np.column_stack([lookup_input.segments, lookup_input.copy_bags]).reshape(-1)
        if self.replicas.features:
            sizes = [batch.batch_size * width for width in self.area_widths]
            message = behind_each(message, sizes, self.replicas.of_rows(grad, scale, batch))  # freed before it travels
        arriving = self.backward_wire.send(message, (self.sent_back, sends), (self.received_back, receives))
        self.buffer_bytes = arriving.buffer_bytes
        return arriving

    def finish_backward(self, begun: Any, lookup_input: LookupInput) -> Tensor:
        return self.finish_both(begun, lookup_input)[0]

    def finish_both(self, begun: Any, lookup_input: LookupInput) -> tuple[Tensor, Tensor | None]:
        """The gradients of exchanged shards ``[sum of B, width]``; those of replicas ``[T, width]``, if any."""
        received = begun if isinstance(begun, Tensor) else begun.wait()
        shape = sum(lookup_input.segments), self.width
        if not self.replicas.features:
            return received.view(shape), None
        columns = np.array(lookup_input.segments) * self.width
        sizes = np.column_stack([columns, self.replicas.tails(lookup_input)]).reshape(-1)
        copies = self.replicas.join(received, np.cumsum(sizes)[::2], lookup_input)
        exchanged = torch.cat(received.split(sizes.tolist())[::2]) if self.width else received[:0]
        return exchanged.view(shape), copies


def behind_each(flat: Tensor, sizes: Sequence[int], tail: Tensor) -> Tensor:
    """Parts of ``flat`` of these sizes, each followed by ``tail``."""
    count = len(sizes)
    if len(set(sizes)) == 1:
        return torch.cat([flat.view(count, sizes[0]), tail.expand(count, -1)], 1).view(-1)
    return torch.cat([part for rows in flat.split(list(sizes)) for part in (rows, tail)])
