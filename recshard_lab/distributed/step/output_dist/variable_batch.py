"""Pooled rows of a variable batch, in which every feature has its own number of bags (VBE).

Only real bags travel. A kernel takes equally many bags of every shard feature, so empty bags follow up to the longest
one's; these stay on the rank::

    owner    feature 0   [ source 0: 3 bags | source 1: 2 bags | -      ]       rows [T, columns of all]
             feature 1   [ source 0: 4 bags | source 1: 2 bags          ]
    source   block       [S_b, D_b] each, flat, one after the other; `to_samples` returns [B, sum of D]

Shape letters: B samples, S_b bags of block b, T bags of the longest shard feature, D_b columns of block b.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from math import gcd

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import CommOp, Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import (
    BACKWARD,
    FORWARD,
    Columns,
    OutputExchange,
    PendingOutput,
    widths_of,
)
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Ints, Run, starts_of
from recshard_lab.distributed.step.output_dist.direct import behind_each
from recshard_lab.distributed.step.output_dist.means import Means
from recshard_lab.distributed.step.output_dist.replica_gradients import Replicas
from recshard_lab.distributed.step.output_dist.stacks import SourceStack
from recshard_lab.distributed.step.output_dist.wire import Parcels, Wire
from recshard_lab.distributed.step.types import LocalBatch, LookupInput


class VariableOutput(OutputExchange):
    """Sends the pooled rows of real bags to the ranks of their samples, and their gradients back.

    It serves the shard features of all output paths, with equal results.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout, self.env, self.means = layout, env, Means(layout)
        codecs = codecs_for(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, registry)
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)
        self.features = layout.exchanged_features
        self.widths, self.dims = widths_of(self.features[env.rank]), [block.dim for block in layout.blocks]
        self.width, self.columns = sum(self.widths), np.cumsum([0, *self.widths])[:-1]
        copies = widths_of(layout.replicated_features)
        # kernel rows -> an area for each source rank and shard feature here
        own_widths = [*self.widths] * env.world_size
        runs = [Run(area, 0, 0, width, area) for area, width in enumerate(own_widths)]
        self.pack = ColumnMap(runs, [self.width] * len(runs), own_widths, self.columns, keep=1)
        self.stack = SourceStack(self.widths, steps=copies)
        self.replicas = Replicas(layout, gcd(*self.widths))
        # an area for each rank and shard feature there, then for each replicated one -> blocks
        every = [feature for features in self.features for feature in features]
        joined = [*every, *layout.replicated_features]
        runs = [
            Run(n, 0, feature.shard.cols[0], feature.shard.num_cols, feature.block) for n, feature in enumerate(joined)
        ]
        kernels = [list(same) for _, same in groupby(layout.replicated_features, key=lambda feature: feature.group)]
        self.kernel_of_copy = np.repeat(np.arange(len(kernels)), [len(features) for features in kernels])
        strides = [sum(widths_of(kernels[number])) for number in self.kernel_of_copy]
        columns = [column for features in kernels for column in accumulate(widths_of(features)[:-1], initial=0)]
        self.copy_columns = np.array(columns, dtype=np.int64)
        self.blocks_of_arrivals = np.array([feature.block for feature in every], dtype=np.int64)
        self.join = ColumnMap(runs, [*widths_of(every), *strides], self.dims, [*copies], keep=1)
        self.split = ColumnMap([run.reversed() for run in runs[: len(every)]], self.dims, widths_of(every), keep=1)
        # messages: rows of the shard features here, of those on each rank; back, replicas' gradients behind each
        there, here = [(width,) for width in self.widths], [[(w,) for w in widths_of(own)] for own in self.features]
        tails = [(width,) for width in copies]
        self.there, self.here = Parcels([there] * env.world_size), Parcels(here)
        self.there_back, self.here_back = (
            Parcels([[*there, *tails]] * env.world_size),
            Parcels([[*own, *tails] for own in here]),
        )
        self.ends = np.cumsum([len(own) for own in here])[:-1]

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        empty = torch.empty(0, dtype=self.layout.rows_dtype, device=lookup_input.ids.device)
        copies = [rows.to(empty.dtype) for rows in replicated]
        if not any(self.features):
            return PendingOutput(lookup_input, (None, copies, empty))
        message = empty
        if exchanged:
            rows = torch.cat(list(exchanged), 1) if len(exchanged) > 1 else exchanged[0]
            bags = _exchanged_bags(lookup_input)
            starts = (np.cumsum(bags, 0) - bags) * self.width + self.columns
            message = self.pack(rows.to(empty.dtype).reshape(-1), starts.reshape(-1), bags.reshape(-1))
        receives = self.here, self._here(lookup_input.local_batch)
        arriving = self.forward_wire.send(message, (self.there, _exchanged_bags(lookup_input).reshape(-1)), receives)
        return PendingOutput(lookup_input, (arriving, copies, empty), arriving.buffer_bytes)

    def finish(self, pending: PendingOutput) -> Tensor:
        """The pooled rows of the local batch's bags, flat, block after block."""
        local_batch = pending.lookup_input.local_batch
        arriving, copies, flat = pending.state
        flat = flat if arriving is None else arriving.wait()
        begins = np.cumsum([flat.numel(), *(rows.numel() for rows in copies)])
        rows = self._bags(local_batch)
        arrived = starts_of(self._here(local_batch), self.here.columns)
        starts = np.concatenate([arrived, begins[self.kernel_of_copy] + self.copy_columns])
        parts = [part for part in (flat, *(rows.reshape(-1) for rows in copies)) if part.numel()] or [flat]
        out = self.join(parts[0] if len(parts) == 1 else torch.cat(parts), starts, rows)
        return self.means.divide(out, local_batch)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        local_batch = lookup_input.local_batch
        grad, rows = self.means.divide(grad.contiguous(), local_batch), self._bags(local_batch)
        starts = starts_of(rows, self.dims)
        sends, copies = self._here(local_batch), self.replicas.sends(local_batch)
        message = self.split(grad, starts, sends, scale)
        if copies:
            tail = self.replicas.of_blocks(grad, starts, scale, local_batch)
            message = behind_each(message, self.here.sizes(sends), tail)
            sends = np.concatenate([part for own in np.split(sends, self.ends) for part in (own, copies)])
        receives = np.hstack([_exchanged_bags(lookup_input), lookup_input.copy_bags]).reshape(-1)
        arriving = self.backward_wire.send(message, (self.here_back, sends), (self.there_back, receives))
        return PendingOutput(lookup_input, arriving, arriving.buffer_bytes)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """``[T, width]`` of each kernel, zeros in the empty bags."""
        lookup_input, received = pending.lookup_input, pending.state.wait()
        bags = _exchanged_bags(lookup_input)
        sizes = np.column_stack([self.stack.sizes(bags), self.replicas.tails(lookup_input)]).reshape(-1)
        starts = np.cumsum(sizes) - sizes
        rows = self.stack(received, starts[::2], bags)
        return Columns([rows, self.replicas.join(received, starts[1::2], lookup_input)])

    def to_samples(self, flat: Tensor, local_batch: LocalBatch) -> Tensor:
        """``[B, sum of D]``: every sample's bag of every block. Differentiable."""
        assert local_batch.inverse is not None
        parts = flat.split([n * dim for n, dim in zip(self._bags(local_batch), self.dims, strict=True)])
        blocks = zip(parts, self.dims, local_batch.inverse, strict=True)
        return torch.cat([part.view(-1, dim).index_select(0, inverse) for part, dim, inverse in blocks], 1)

    def _bags(self, local_batch: LocalBatch) -> list[int]:
        """Bags of each block."""
        return [lengths.numel() for lengths in local_batch.lengths]

    def _here(self, local_batch: LocalBatch) -> Ints:
        """Rows of each rank's shard features for the local batch."""
        return np.array(self._bags(local_batch))[self.blocks_of_arrivals]


def _exchanged_bags(lookup_input: LookupInput) -> Ints:
    assert lookup_input.bags is not None
    return lookup_input.bags
