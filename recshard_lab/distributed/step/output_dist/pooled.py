"""Pooled rows: tables that take one output path share its messages, and one kernel joins what arrived on all paths."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from recshard_lab.comm import Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.base import (
    Columns,
    OutputExchange,
    OutputPath,
    PendingOutput,
    runs_of,
    widths_of,
)
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Run, starts_of
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
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout = layout
        self.direct = DirectPath(layout, env, codecs_for(DirectPath.op, registry))
        others = [PATHS[name] for name in layout.routes if name != "direct"]
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
            runs += [Run(len(widths) + run.sender, run.source, run.target, run.width) for run in path.runs]
            widths += path.area_widths
        self.join = ColumnMap(runs, widths, [layout.output_width])
        starts, kernels = [block.start for block in layout.blocks], list[list[ShardFeature]]()
        replicated = [feature for feature in layout.rank_features[env.rank] if feature.replicated]
        for _, group in groupby(replicated, key=lambda feature: feature.group):  # groups may differ between ranks
            kernels.append(list(group))
        runs = [run for number, features in enumerate(kernels) for run in runs_of(features, number, starts)]
        widths = [sum(widths_of(features)) for features in kernels]
        blocks = [feature.block for feature in layout.replicated_features]
        #: whether replicas can be added in place: each chunk once, so that the order of additions is fixed
        self.adds_chunks = any(self.join.source_widths) and len(set(blocks)) == len(blocks)
        self.copy = ColumnMap(runs, widths, [layout.output_width])
        self.split = ColumnMap([run.reversed() for run in runs], [layout.output_width], widths)

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        dtype, left = self.layout.rows_dtype, list(exchanged)
        begun = []
        for path, kernels in zip(self.paths, self.kernels, strict=True):
            rows = [left.pop(0).to(dtype) for _ in range(kernels)]
            if not rows:
                rows = [torch.empty(sum(lookup_input.segments), 0, dtype=dtype, device=lookup_input.ids.device)]
            begun.append(path.begin(rows[0] if len(rows) == 1 else torch.cat(rows, path.joins), lookup_input))
        return PendingOutput(lookup_input, (begun, [rows.to(dtype) for rows in replicated]))

    def finish(self, pending: PendingOutput) -> Tensor:
        """``[B, output width]``."""
        lookup_input, (begun, replicated) = pending.lookup_input, pending.state
        samples, width = lookup_input.local_batch.batch_size, self.layout.output_width
        parts: list[Tensor] = []
        rows: list[int] = []
        for path, under_way in zip(self.paths, begun, strict=True):
            parts.append(path.finish(under_way, lookup_input))
            rows += path.area_rows(lookup_input)
        copies = _end_to_end([part.reshape(-1) for part in replicated], parts[0])
        out = self.join(_end_to_end(parts, parts[0]), starts_of(rows, self.join.source_widths), [samples])
        if copies.numel() and self.adds_chunks:
            places = self.split.indices([0], [samples] * len(replicated), copies).chunks
            out.view(-1, self.split.chunk).index_add_(0, places, copies.view(-1, self.split.chunk))
        elif copies.numel():
            copied = self.copy(copies, starts_of([samples] * len(replicated), self.copy.source_widths), [samples])
            out = out + copied if any(self.join.source_widths) else copied
        out = out.view(samples, width)
        pending.buffer_bytes = sum(path.buffer_bytes for path in self.paths)
        return self.means.divide(out, lookup_input.local_batch)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        grad = self.means.divide(grad.contiguous(), lookup_input.local_batch)
        return PendingOutput(lookup_input, [path.begin_backward(grad, scale, lookup_input) for path in self.paths])

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """``[sum of B, width]`` of each kernel."""
        begun, lookup_input = pending.state, pending.lookup_input
        direct, copies = self.direct.finish_both(begun[0], lookup_input)
        others = [
            path.finish_backward(under_way, lookup_input)
            for path, under_way in zip(self.paths[1:], begun[1:], strict=True)
        ]
        pending.buffer_bytes = sum(path.buffer_bytes for path in self.paths)
        return Columns([direct, *others, *([] if copies is None else [copies])])


def _end_to_end(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    """Flat tensors as one; no copy of a single one."""
    parts = [part for part in parts if part.numel()] or [empty[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
