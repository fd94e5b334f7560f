"""``reduce_scatter``: the network adds the partial rows of row shards; an all-gather returns their gradients.

Every rank sends ``[W, B, D]``, D the columns of all tables of this path, with zeros for tables that it does not store.
This suits row-wise tables over all ranks, and wastes bytes where few ranks store a table. Batches are padded to the
largest. Forward adds encoded values: FP16 and BF16 round each partial sum, up to W times, and INT8 raises.
A table whose rows are not split has nothing to add, so it takes the path ``direct`` (`layout.effective_route`).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.comm import CommOp, QuantizedCommCodecs, ShardingEnv, issue_reduce_scatter
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import OutputPath, runs_of
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Ints, Memo, Run, expand, to_device
from recshard_lab.distributed.step.output_dist.wire import BACKWARD, FORWARD, Arriving, Parcels, gather_rows
from recshard_lab.distributed.step.types import LookupInput
from recshard_lab.sharding import PlanError


class ReduceScatterPath(OutputPath):
    """Adds on the network."""

    name = "reduce_scatter"
    op = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        self._check_codec()
        self.runs = []
        compact: dict[int, tuple[int, int]] = {}  # block -> its first column among those of this path
        self.columns = 0
        for index in sorted({feature.block for features in self.features for feature in features}):
            block = layout.blocks[index]
            compact[index] = 0, self.columns
            self.runs.append(Run(0, self.columns, block.start, block.dim))
            self.columns += block.dim
        self.area_widths = [self.columns]
        parcel = tuple(layout.blocks[index].dim for index in compact)
        self.summed = Parcels([[parcel]], codecs.forward)
        self.own, self.every = (Parcels([[parcel]] * ranks, codecs.backward) for ranks in (1, env.world_size))
        stored = runs_of(self.features[env.rank], 0, compact)
        self.spread = ColumnMap(stored, [self.width], [self.columns])
        self.collect = ColumnMap([run.reversed() for run in stored], [self.columns], [self.width])
        self.split = ColumnMap([run.reversed() for run in self.runs], [layout.output_width], [self.columns])
        self._memo = Memo[Tensor]()

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        codec, segments = self.codecs.forward, lookup_input.segments
        summands = self.spread(rows.reshape(-1), [sum(segments)], [sum(segments)]).view(-1, self.columns)
        if min(segments) < max(segments):
            padded = summands.new_zeros(len(segments) * max(segments), self.columns)
            summands = padded.index_copy_(0, self._places(segments, rows.device), summands)
        message = codec.encode(summands, parts=self.env.world_size)
        held = (message.numel() + message.numel() // self.env.world_size) * message.element_size()
        pending = issue_reduce_scatter(message.view(-1), self.env, f"{FORWARD}/{self.name}")
        return Arriving(pending, self.summed, self.area_rows(lookup_input), rows.dtype, held)

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.array([max(lookup_input.segments)])

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        samples, largest = grad.shape[0], max(lookup_input.segments)
        message = self.split(grad.view(-1), [samples], [samples], scale)
        if samples < largest:
            message = pad(message, (0, (largest - samples) * self.columns))
        return gather_rows(message, self.own, self.every, largest, self.env, f"{BACKWARD}/{self.name}")

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        segments, rows = lookup_input.segments, begun.wait().view(-1, self.columns)
        if min(segments) < max(segments):
            rows = rows.index_select(0, self._places(segments, rows.device))
        return (self.collect(rows.view(-1), [rows.shape[0]], [sum(segments)]).view(sum(segments), self.width),)

    def _places(self, segments: list[int], device: torch.device) -> Tensor:
        key = tuple(segments), device
        return self._memo.get(key, lambda: _places(*key))

    def _check_codec(self) -> None:
        codec = self.codecs.forward
        if not codec.adds_on_wire:
            raise PlanError(
                f"route 'reduce_scatter' adds rows on the way, and rows coded as {codec.comm_type} cannot be added. "
                f"Fix: forward_precision=CommType.FP16, or route 'direct' or 'two_hop'"
            )


def _places(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the rows of each batch stand among batches that are padded to the largest."""
    ones = np.ones(len(segments), dtype=np.int64)
    return to_device(expand(np.arange(len(segments)) * max(segments), ones, ones, np.array(segments)), device)
