"""Pooled rows: tables that take one output path share its messages, and one kernel joins what arrived on all paths.

Of a variable batch only real bags travel. A kernel takes equally many bags of every shard feature, so empty bags follow
up to the longest one's; these stay on the rank (`Stacked`).

Shape letters: B samples, T rows of a kernel.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.base import (
    Columns,
    OutputExchange,
    OutputPath,
    PendingOutput,
    Target,
    runs_of,
    widths_of,
)
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Run
from recshard_lab.distributed.step.output_dist.direct import DirectPath
from recshard_lab.distributed.step.output_dist.distinct_rows import DistinctRowsPath
from recshard_lab.distributed.step.output_dist.means import Means
from recshard_lab.distributed.step.output_dist.reduce_scatter import ReduceScatterPath
from recshard_lab.distributed.step.output_dist.two_hop import TwoHopPath
from recshard_lab.distributed.step.types import LookupInput

PATHS: dict[str, type[OutputPath]] = {
    path.name: path for path in (DirectPath, ReduceScatterPath, TwoHopPath, DistinctRowsPath)
}


class PooledOutput(OutputExchange):
    """Sends the rows of exchanged kernels by each table's output path, and joins them with the replicas' rows.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
        variable: whether every feature of a batch has its own number of bags (VBE). Then all tables take the path
            "direct", with equal results, and the output is flat, block after block.
    """

    def __init__(
        self, layout: Layout, env: ShardingEnv, registry: Registry | None = None, variable: bool = False
    ) -> None:
        self.layout, self.target = layout, Target(layout, variable)
        self.direct = DirectPath(layout, env, codecs_for(DirectPath.op, registry), self.target)
        others = [] if variable else [PATHS[name] for name in layout.routes if name != "direct"]
        self.paths: list[OutputPath] = [
            self.direct,
            *(path(layout, env, codecs_for(path.op, registry)) for path in others),
        ]
        #: of each path, the number of this rank's kernels, which stand side by side in the order of the paths
        self.kernels = [len(list(groupby(path.features[env.rank], lambda own: own.group))) for path in self.paths]
        self.means = Means(layout)
        runs: list[Run] = []
        widths: list[int] = []
        for path in self.paths:
            runs += [replace(run, sender=len(widths) + run.sender) for run in path.runs]
            widths += path.area_widths
        keep, kernels = 1 if variable else 8, list[list[ShardFeature]]()
        self.join = ColumnMap(runs, widths, self.target.widths, keep=keep)
        self.exchanges = any(widths)
        replicated = [feature for feature in layout.rank_features[env.rank] if feature.replicated]
        for _, group in groupby(replicated, key=lambda feature: feature.group):  # groups may differ between ranks
            kernels.append(list(group))
        runs = [run for number, features in enumerate(kernels) for run in runs_of(features, number, self.target.places)]
        widths = [sum(widths_of(features)) for features in kernels]
        blocks = [feature.block for feature in layout.replicated_features]
        #: whether replicas can be added in place: each chunk once, so that the order of additions is fixed
        self.adds_chunks = len(set(blocks)) == len(blocks) and not variable
        self.copy = ColumnMap(runs, widths, self.target.widths, keep=keep)
        self.split = ColumnMap([run.reversed() for run in runs], self.target.widths, widths)

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        dtype, left = self.layout.rows_dtype, list(exchanged)
        begun = []
        for path, kernels in zip(self.paths, self.kernels, strict=True):
            rows = [left.pop(0).to(dtype) for _ in range(kernels)]
            if not rows:
                rows = [torch.empty(sum(lookup_input.segments), 0, dtype=dtype, device=lookup_input.ids.device)]
            begun.append(path.begin(rows[0] if len(rows) == 1 else torch.cat(rows, -1), lookup_input))
        return PendingOutput(lookup_input, (begun, [rows.to(dtype) for rows in replicated]))

    def finish(self, pending: PendingOutput) -> Tensor:
        """``[B, output width]``; the rows of a variable batch's bags, flat, block after block."""
        lookup_input, (begun, replicated) = pending.lookup_input, pending.state
        local_batch = lookup_input.local_batch
        samples = self.target.rows(local_batch)
        parts = [path.finish(own, lookup_input) for path, own in zip(self.paths, begun, strict=True)]
        copies = _end_to_end([part.reshape(-1) for part in replicated], parts[0])
        out = None
        if self.exchanges or not copies.numel():
            rows = [path.area_rows(lookup_input) for path in self.paths]
            out = self.join(_end_to_end(parts, parts[0]), rows[0] if len(rows) == 1 else np.concatenate(rows), samples)
        if copies.numel() and out is not None and self.adds_chunks:
            places = self.split.indices(samples, samples * len(replicated), copies).chunks
            out.view(-1, self.split.chunk).index_add_(0, places, copies.view(-1, self.split.chunk))
        elif copies.numel():
            copied = self.copy(copies, [part.shape[0] for part in replicated], samples)
            out = copied if out is None else out + copied
        assert out is not None
        pending.buffer_bytes = sum(own.buffer_bytes for own in begun)
        out = out if self.target.variable else out.view(*samples, *self.target.widths)
        return self.means.divide(out, local_batch)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        grad = self.means.divide(grad.contiguous(), lookup_input.local_batch)
        return PendingOutput(lookup_input, [path.begin_backward(grad, scale, lookup_input) for path in self.paths])

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """``[T, width]`` of each kernel; in a variable batch, zeros in empty bags."""
        pairs = zip(self.paths, pending.state, strict=True)
        found = [path.finish_backward(begun, pending.lookup_input) for path, begun in pairs]
        pending.buffer_bytes = sum(begun.buffer_bytes for begun in pending.state)
        return Columns([own[0] for own in found] + [copies for own in found for copies in own[1:]])


def _end_to_end(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    """Flat tensors as one; no copy of a single one."""
    parts = [part for part in parts if part.numel()] or [empty.new_empty(0)]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
