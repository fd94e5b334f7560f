"""The torch kernel: every device that torch runs on, every number format and optimizer.

Shards of one width and dtype share one flat weight ``[sum of rows, d]``. One ``embedding_bag`` therefore serves a
group, however many tables it has.

The backward is a lookup too. A pooled lookup multiplies the weight by a matrix (bags x rows). The gradient of the
touched rows is the transposed matrix times the gradient of the bags: sort the ids, and each run of equal ids is a "bag"
whose members are the bags it occurred in.

    forward    bag  -> its rows         embedding_bag(rows, weight,       offsets of bags)
    backward   row  -> its bags         embedding_bag(bags, grad of bags, offsets of runs of equal rows)

On CPU the touched rows are stepped a few thousand at a time, so that their gradient stays in the cache. On a device all
are stepped at once, and neither pass waits for the device (`transposed.TransposedLookup`).

Shape letters: G shard features of one group, B batch, n ids of one group, d columns, U touched rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.kernels.base import (
    TORCH_DTYPES,
    KernelInput,
    KernelSpec,
    LookupKernel,
    RowNorms,
    register_kernel,
    zeros,
)
from recshard_lab.embedding.kernels.transposed import (
    CHUNK_BYTES,
    FeatureGroups,
    Looked,
    Spans,
    TransposedLookup,
    gather,
    pool,
    transpose,
    weight_grad,
)
from recshard_lab.embedding.optimizers import (
    OptimizerSpec,
    RowDims,
    accumulate_dtype,
    add_rows_,
    step,
)

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass
class _Group:
    """Shards of one width and dtype on one flat weight."""

    shards: list[int]  # their indices, in order
    rows: list[int]  # of each shard
    features: list[int]  # the shard features that read them, in order
    feature_shards: list[int]  # the position in `shards` of each of these features' shard
    feature_bases: list[int]  # that shard's first flat row
    bounds: Tensor  # [shards + 1] first flat row of each shard; last, the spare row
    full_dim: RowDims  # [shards] where shards differ
    weight: Tensor  # [sum of rows, d]; off the CPU one spare row more, so in state and grad
    state: dict[str, Tensor]
    iterations: Tensor  # [shards] steps taken
    grad: Tensor | None = None  # dense kernels: [sum of rows, d], the shards' .grad are its views

    @property
    def dim(self) -> int:
        return self.weight.shape[1]


@dataclass
class _Saved:
    looked: list[Looked]  # per group
    spans: Spans
    batch: int


@register_kernel
class NativeKernel(LookupKernel):
    """`LookupKernel` in torch operators."""

    name = "native"

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        for shard in spec.shards:
            if shard.data_type not in TORCH_DTYPES:
                kinds = ", ".join(kind.value for kind in TORCH_DTYPES)
                return f"table {shard.table!r} is {shard.data_type.value}; it trains {kinds}"
        return None

    def _allocate(self) -> None:
        members: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, shard in enumerate(self.shards):
            members.setdefault((shard.num_cols, TORCH_DTYPES[shard.data_type]), []).append(index)
        shapes = self.optimizer.state_shapes(2, 4) if self.optimizer is not None else {}
        self._counts = "iter" in shapes
        # two moments per element are six matrices in the cache instead of two or three: Adam takes half the time
        heavy = list(shapes.values()).count((2, 4)) > 1
        self._chunk_bytes = CHUNK_BYTES // 4 if heavy else CHUNK_BYTES
        groups = [self._make_group(indices, dim, dtype) for (dim, dtype), indices in members.items()]
        self._weights = [torch.empty(0, device=self.device)] * len(self.shards)
        self._states = [{}] * len(self.shards)
        for group in groups:
            used = sum(group.rows)
            parts = {name: tensor[:used].split(group.rows) for name, tensor in group.state.items()}
            if self._counts:
                parts["iter"] = group.iterations.split(1)
            for position, weight in enumerate(group.weight[:used].split(group.rows)):
                self._weights[group.shards[position]] = weight.detach()
                self._states[group.shards[position]] = {name: part[position] for name, part in parts.items()}
        self._groups = [group for group in groups if group.features]  # the others have nothing to look up
        feature_dims = [self.shards[shard].num_cols for shard in self.features]
        self._features = FeatureGroups(feature_dims, [group.features for group in self._groups], self.device)

    def _make_group(self, indices: list[int], dim: int, dtype: torch.dtype) -> _Group:
        shards = [self.shards[index] for index in indices]
        bounds = list(accumulate((shard.num_rows for shard in shards), initial=0))
        features = [feature for feature, shard in enumerate(self.features) if shard in indices]
        feature_shards = [indices.index(self.features[feature]) for feature in features]
        full_dims = [shard.full_dim for shard in shards]
        # off the CPU a spare row, which padding of touched rows steps
        rows = bounds[-1] + (self.device.type != "cpu")
        shapes = self.optimizer.state_shapes(rows, dim) if self.optimizer else {}
        wide = accumulate_dtype(dtype)
        return _Group(
            shards=indices,
            rows=[shard.num_rows for shard in shards],
            features=features,
            feature_shards=feature_shards,
            feature_bases=[bounds[shard] for shard in feature_shards],
            bounds=torch.tensor(bounds, device=self.device),
            full_dim=full_dims[0] if len(set(full_dims)) == 1 else torch.tensor(full_dims, device=self.device),
            weight=zeros((rows, dim), dtype, self.device),
            state={n: zeros(shape, wide, self.device) for n, shape in shapes.items() if n != "iter"},
            iterations=torch.zeros(len(shards), dtype=torch.int64, device=self.device),
        )

    # ---- forward ----

    @torch.no_grad()
    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        saved = self.remember(batch)
        if self.pooled:
            return self._pool(saved), saved
        rows = [gather(looked.rows, group.weight) for looked, group in zip(saved.looked, self._groups, strict=True)]
        return self._features.join_flat(rows, saved.spans), saved

    @torch.no_grad()
    def remember(self, batch: KernelInput, train: bool = True) -> _Saved:
        ids, offsets, weights, *_ = batch
        self.check_weights(weights)
        spans, samples = self._features.spans(offsets, self.pooled, batch.counts)
        saved = _Saved([], spans, samples)
        for index, group in enumerate(self._groups):
            # off the CPU the host does not know how many rows are touched: at most one for each id
            most = [0] * len(group.shards)
            for feature, shard in zip(group.features, group.feature_shards, strict=True):
                most[shard] += spans[feature][1] - spans[feature][0]
            looked = Looked(
                rows=self._flat_rows(index, ids, spans),
                offsets=self._features.take_offsets(offsets, index, samples) if self.pooled else offsets,
                weights=None if weights is None else self._features.take(weights, index, spans),
                most_rows=[min(pair) for pair in zip(most, group.rows, strict=True)],
            )
            saved.looked.append(looked)
        return saved

    def _pool(self, saved: _Saved) -> Tensor:
        """``[B, columns of all shard features]``. On CPU some features at a time, which stay in the cache."""
        wide = max((accumulate_dtype(group.weight.dtype) for group in self._groups), key=lambda dtype: dtype.itemsize)
        out = torch.empty(saved.batch, self._features.columns[-1], dtype=wide, device=self.device)
        for group, looked in zip(self._groups, saved.looked, strict=True):
            features, dim = len(group.features), group.dim
            # features whose sums fit the cache; on a device one operator for all
            size = max(1, CHUNK_BYTES // max(1, saved.batch * dim * wide.itemsize))
            size = min(size, features) if self.device.type == "cpu" else features
            for first in range(0, features, size):
                number = min(size, features - first)
                pooled = pool(looked, group.weight, first * saved.batch, (first + number) * saved.batch)
                pooled = pooled.view(number, saved.batch, dim)
                if self._features.whole:
                    out.view(saved.batch, features, dim)[:, first : first + number] = pooled.transpose(0, 1)
                    continue
                for feature, own in zip(group.features[first : first + number], pooled, strict=True):
                    out[:, self._features.columns[feature] : self._features.columns[feature + 1]] = own
        return out

    def _flat_rows(self, index: int, ids: Tensor, spans: Spans) -> Tensor:
        """``[n]`` flat rows of the ids of a group's shard features, int32 if they fit."""
        group = self._groups[index]
        small = max(group.weight.shape[0], ids.numel()) <= _INT32_MAX
        dtype = torch.int32 if small else torch.int64
        # one shard: ids are flat rows
        if self._features.whole and len(group.shards) == 1:
            return ids.to(dtype).contiguous()
        lengths = [spans[feature][1] - spans[feature][0] for feature in group.features]
        rows = ids.new_empty(sum(lengths), dtype=dtype)
        for feature, base, part in zip(group.features, group.feature_bases, rows.split(lengths), strict=True):
            part.copy_(ids[slice(*spans[feature])])
            part += base
        return rows

    # ---- backward ----

    @torch.no_grad()
    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        weight_grads = []
        touched = []
        for index, looked in enumerate(saved.looked):
            bag_grads, bags = self._bags(saved, index, grad)
            if looked.weights is not None:
                own = weight_grad(self._groups[index].weight, looked.rows, bag_grads, bags)
                weight_grads.append(own.to(looked.weights.dtype))
            touched.append(transpose(looked, bag_grads, bags, self._groups[index].bounds))
        if self.optimizer is None:
            for group, part in zip(self._groups, touched, strict=True):
                self._add_to_grads(group, part)
        else:
            self._step(self.optimizer, touched, row_norms)
        return self._features.join_flat(weight_grads, saved.spans) if weight_grads else None

    def _bags(self, saved: _Saved, index: int, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of each bag ``[bags, d]`` and each id's bag ``[n]`` (None: the n-th id is the n-th bag)."""
        group, looked = self._groups[index], saved.looked[index]
        wide = accumulate_dtype(group.weight.dtype)
        if not self.pooled:
            return self._features.take_flat_grad(grad, index, saved.spans).to(wide), None
        features = len(group.features)
        # sample-major, as the gradient lies in memory: bag (sample, feature) has number sample * features + feature
        bag_grads = self._features.take_pooled_grad(grad, index).to(wide).reshape(saved.batch * features, group.dim)
        number = torch.arange(saved.batch * features, dtype=looked.rows.dtype, device=grad.device)
        feature_major = number.view(saved.batch, features).t().reshape(-1)
        lengths = looked.offsets.diff()
        return bag_grads, feature_major.repeat_interleave(lengths, output_size=looked.rows.numel())

    def _step(self, optimizer: OptimizerSpec, touched: list[TransposedLookup], row_norms: RowNorms | None) -> None:
        if optimizer.row_wise:
            self.check_row_norms(row_norms)
        if optimizer.check_gradients:
            self._check_gradients(touched)
        for group, part in zip(self._groups, touched, strict=True):
            part.full_dim, part.iteration = _by_row(group.full_dim, group, part), self._count_steps(group, part)
        if row_norms is not None:
            try:
                for _ in range(optimizer.row_norm_rounds):
                    self._complete_squares(optimizer, touched, row_norms)
            except BaseException:  # another rank failed
                # no weight has been stepped: the step does not count
                for group in self._groups if self._counts else ():
                    group.iterations -= 1
                raise
        for group, part in zip(self._groups, touched, strict=True):
            for chunk, grad in part.chunks(self._chunk_bytes):
                totals, dims, iteration = part.above(chunk)
                known = None if row_norms is None else totals
                step(optimizer, group.weight, group.state, part.rows[chunk], grad, known, dims, iteration)

    def _count_steps(self, group: _Group, part: TransposedLookup) -> int | Tensor:
        """Counts a step of each shard and returns their number: ``[U]`` where shards differ, and off the CPU."""
        if not self._counts:
            return 0
        group.iterations += 1
        if self.device.type == "cpu" and len(set(group.iterations.tolist())) == 1:
            return int(group.iterations[0])
        return _by_row(group.iterations, group, part)

    def _complete_squares(self, optimizer: OptimizerSpec, touched: list[TransposedLookup], row_norms: RowNorms) -> None:
        """One round: the caller completes the squares ``[U]`` or ``[U, k]`` of this kernel's columns.

        Each round and the step recompute the gradient, which is cheaper than to keep it.
        """
        rows = [torch.empty(0, dtype=torch.int64, device=self.device)] * len(self.shards)
        squares = [torch.empty(0, device=self.device)] * len(self.shards)
        for group, part in zip(self._groups, touched, strict=True):
            sums = [
                step(optimizer, group.weight, group.state, part.rows[chunk], grad, *part.above(chunk))
                for chunk, grad in part.chunks(self._chunk_bytes)
            ]
            whole = torch.cat(sums) if sums else part.bag_grads.new_empty(0)
            for position, own in enumerate(part.rows.split(part.shard_sizes)):
                # from flat rows to rows of the shard
                rows[group.shards[position]] = own - group.bounds[position]
            for position, own in enumerate(whole.split(part.shard_sizes)):
                squares[group.shards[position]] = own
        completed = row_norms(rows, squares)
        for group, part in zip(self._groups, touched, strict=True):
            part.totals.append(torch.cat([completed[shard] for shard in group.shards]))

    def _check_gradients(self, touched: list[TransposedLookup]) -> None:
        """Raises ValueError naming the first row whose gradient is not finite."""
        for group, part in zip(self._groups, touched, strict=True):
            for chunk, grad in part.chunks(self._chunk_bytes):
                bad = (~grad.isfinite()).any(1).nonzero()
                if bad.numel():
                    flat = int(part.rows[chunk][bad[0]])
                    position = int(torch.searchsorted(group.bounds, flat, right=True)) - 1
                    shard, row = self.shards[group.shards[position]], flat - int(group.bounds[position])
                    values = grad[bad[0, 0]]
                    raise ValueError(
                        f"the gradient of table {shard.table!r}, {shard.row_name(row)}, is not finite "
                        f"({int((~values.isfinite()).sum())} of {values.numel()} numbers; "
                        f"{bad.numel()} such rows at hand): no weight of this kernel was changed"
                    )

    def _add_to_grads(self, group: _Group, part: TransposedLookup) -> None:
        if group.grad is None:
            group.grad = torch.empty_like(group.weight)
        views = group.grad[: sum(group.rows)].split(group.rows)
        for weight, view in zip([self._weights[shard] for shard in group.shards], views, strict=True):
            # `zero_grad` may have removed the view, or the caller replaced it
            if weight.grad is None:
                view.zero_()
            elif weight.grad.data_ptr() != view.data_ptr():
                view.copy_(weight.grad)
            weight.grad = view
        for chunk, grad in part.chunks():
            add_rows_(group.grad, part.rows[chunk], grad)


def _by_row(numbers: RowDims, group: _Group, part: TransposedLookup) -> RowDims:
    """One number where all shards agree; of ``numbers [S]``, that of each row's shard ``[U]``."""
    return numbers if isinstance(numbers, int) else numbers.index_select(0, part.shards(group.bounds))
