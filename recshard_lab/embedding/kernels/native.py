"""The plain-torch kernel: runs everywhere torch does, for every dtype and optimizer.

Slots of one width and dtype share one flat weight ``[sum of rows, d]``, so that there is one
``embedding_bag`` a group, however many tables.

The backward is a lookup too. A pooled lookup multiplies the weight by a matrix (bags x rows), so the
gradient of the touched rows is the transposed matrix times the gradient of the bags: sort the ids, and
each run of equal ids is a "bag" whose members are the bags it occurred in.

    forward    bag  -> its rows         embedding_bag(rows, weight,       offsets of bags)
    backward   row  -> its bags         embedding_bag(bags, grad of bags, offsets of runs of equal rows)

The touched rows are stepped a few thousand at a time: a chunk's gradient stays in the cache between its
making and its use, and the gradient of all rows is never in memory at once.

Shape letters: G lanes of one group, B batch, n ids of one group, d columns, U touched rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.kernels import TORCH_DTYPES, LookupKernel, RowNorms, Slot, register_kernel
from recshard_lab.embedding.kernels.fresh_memory import zeros
from recshard_lab.embedding.kernels.lanes import LaneGroups, Spans
from recshard_lab.embedding.kernels.transposed import (
    CHUNK_BYTES,
    Looked,
    Touched,
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
    partial_squares,
    step,
)

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass
class _Group:
    """Slots of one width and dtype on one flat weight."""

    slots: list[int]  # their indices, in order
    lanes: list[int]  # the lanes that read them, in order
    lane_bases: list[int]  # first flat row of each of these lanes' slot
    bounds: Tensor  # [slots + 1] first flat row of each slot
    full_dims: Tensor  # [slots]
    weight: Tensor  # [sum of rows, d]
    state: dict[str, Tensor]
    grad: Tensor | None = None  # dense kernels: [sum of rows, d], the slots' .grad are its views

    @property
    def dim(self) -> int:
        return self.weight.shape[1]


@dataclass
class _Saved:
    looked: list[Looked]  # per group
    spans: Spans
    batch: int


@dataclass
class _Above:
    """What the touched rows of a group have from their tables."""

    full_dim: RowDims
    iteration: int | Tensor
    totals: list[Tensor] = field(default_factory=list)  # [U] or [U, k] for each round of row norms so far

    def of(self, chunk: slice) -> tuple[list[Tensor], RowDims, int | Tensor]:
        """The same for some of the rows."""
        dims, count = self.full_dim, self.iteration
        return (
            [own[chunk] for own in self.totals],
            dims if isinstance(dims, int) else dims[chunk],
            count if isinstance(count, int) else count[chunk],
        )


@register_kernel
class NativeKernel(LookupKernel):
    """`LookupKernel` in plain torch operations."""

    name = "native"

    @classmethod
    def refuses(
        cls,
        slots: Sequence[Slot],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        weighted: bool,
        exchanges_row_norms: bool,
        device: torch.device | str,
    ) -> str | None:
        for slot in slots:
            if slot.data_type not in TORCH_DTYPES:
                kinds = ", ".join(kind.value for kind in TORCH_DTYPES)
                return f"table {slot.table!r} is {slot.data_type.value}; trainable are {kinds}"
        if weighted and not pooled:
            return "per-sample weights have no meaning for sequence embeddings"
        return None

    def _allocate(self) -> None:
        members: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, slot in enumerate(self.slots):
            members.setdefault((slot.num_cols, TORCH_DTYPES[slot.data_type]), []).append(index)
        shapes = self.optimizer.state_shapes(2, 4) if self.optimizer is not None else {}
        self._counts = "iter" in shapes
        # with two moments an element six matrices are at hand, not two or three: Adam takes half the time in quarters
        heavy = list(shapes.values()).count((2, 4)) > 1
        self._chunk_bytes = CHUNK_BYTES // 4 if heavy else CHUNK_BYTES
        groups = [self._make_group(indices, dim, dtype) for (dim, dtype), indices in members.items()]
        self._weights: list[Tensor] = [torch.empty(0)] * len(self.slots)
        self._states: list[dict[str, Tensor]] = [{}] * len(self.slots)
        for group in groups:
            sizes = [self.slots[slot].num_rows for slot in group.slots]
            parts = {name: tensor.split(sizes) for name, tensor in group.state.items()}
            for position, weight in enumerate(group.weight.split(sizes)):
                self._weights[group.slots[position]] = weight.detach()
                own_state = {name: part[position] for name, part in parts.items()}
                if self._counts:
                    own_state["iter"] = torch.zeros(1, dtype=torch.int64, device=self.device)
                self._states[group.slots[position]] = own_state
        self._groups = [group for group in groups if group.lanes]  # one that no lane reads has nothing to do
        lane_dims = [self.slots[slot].num_cols for slot in self.lane_slots]
        self._lanes = LaneGroups(lane_dims, [group.lanes for group in self._groups])

    def _make_group(self, indices: list[int], dim: int, dtype: torch.dtype) -> _Group:
        slots = [self.slots[index] for index in indices]
        bounds = list(accumulate((slot.num_rows for slot in slots), initial=0))
        base = dict(zip(indices, bounds, strict=False))
        lanes = [lane for lane, slot in enumerate(self.lane_slots) if slot in base]
        shapes = self.optimizer.state_shapes(bounds[-1], dim) if self.optimizer else {}
        wide = accumulate_dtype(dtype)
        return _Group(
            slots=indices,
            lanes=lanes,
            lane_bases=[base[self.lane_slots[lane]] for lane in lanes],
            bounds=torch.tensor(bounds, device=self.device),
            full_dims=torch.tensor([slot.full_dim for slot in slots], device=self.device),
            weight=zeros((bounds[-1], dim), dtype, self.device),
            state={n: zeros(shape, wide, self.device) for n, shape in shapes.items() if n != "iter"},
        )

    def weights(self) -> list[Tensor]:
        return self._weights

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        return self._states

    def set_learning_rate(self, lr: float) -> None:
        if self.optimizer is not None:
            self.optimizer = replace(self.optimizer, learning_rate=lr)

    # ---- forward ----

    @torch.no_grad()
    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Any]:
        saved = self.remember(ids, offsets, weights)
        if self.pooled:
            return self._pool(saved), saved
        looked = zip(saved.looked, self._groups, strict=True)
        return self._lanes.join_flat([gather(own.rows, group.weight) for own, group in looked], saved.spans), saved

    @torch.no_grad()
    def remember(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> _Saved:
        if weights is not None and not self.pooled:
            raise ValueError("per-sample weights have no meaning for sequence embeddings: leave them out")
        spans, batch = self._lanes.spans(offsets, self.pooled)
        saved = _Saved([], spans, batch)
        for index in range(len(self._groups)):
            looked = Looked(
                rows=self._flat_rows(index, ids, spans),
                offsets=self._lanes.take_offsets(offsets, index, batch) if self.pooled else offsets,
                weights=None if weights is None else self._lanes.take(weights, index, spans),
            )
            saved.looked.append(looked)
        return saved

    def _pool(self, saved: _Saved) -> Tensor:
        """``[B, columns of all lanes]``, made some lanes at a time: those wait in the cache to be put in place."""
        wide = max((accumulate_dtype(group.weight.dtype) for group in self._groups), key=lambda dtype: dtype.itemsize)
        out = torch.empty(saved.batch, self._lanes.columns[-1], dtype=wide, device=self.device)
        for group, looked in zip(self._groups, saved.looked, strict=True):
            lanes, dim = len(group.lanes), group.dim
            size = max(1, CHUNK_BYTES // max(1, saved.batch * dim * wide.itemsize))
            size = min(size, lanes) if self.device.type == "cpu" else lanes
            for first in range(0, lanes, size):
                number = min(size, lanes - first)
                pooled = pool(looked, group.weight, first * saved.batch, (first + number) * saved.batch)
                pooled = pooled.view(number, saved.batch, dim)
                if self._lanes.whole:
                    out.view(saved.batch, lanes, dim)[:, first : first + number] = pooled.transpose(0, 1)
                    continue
                for lane, own in zip(group.lanes[first : first + number], pooled, strict=True):
                    out[:, self._lanes.columns[lane] : self._lanes.columns[lane + 1]] = own
        return out

    def _flat_rows(self, index: int, ids: Tensor, spans: Spans) -> Tensor:
        """``[n]`` flat rows of the ids of a group's lanes, int32 where that is wide enough."""
        group = self._groups[index]
        small = max(group.weight.shape[0], ids.numel()) <= _INT32_MAX
        dtype = torch.int32 if small else torch.int64
        if self._lanes.whole and len(group.slots) == 1:
            return ids.to(dtype).contiguous()
        lengths = [spans[lane][1] - spans[lane][0] for lane in group.lanes]
        rows = ids.new_empty(sum(lengths), dtype=dtype)
        for lane, base, part in zip(group.lanes, group.lane_bases, rows.split(lengths), strict=True):
            part.copy_(ids[slice(*spans[lane])])
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
            touched.append(transpose(looked, bag_grads, bags))
        if self.optimizer is None:
            for group, part in zip(self._groups, touched, strict=True):
                self._add_to_grads(group, part)
        else:
            self._step(self.optimizer, touched, row_norms)
        return self._lanes.join_flat(weight_grads, saved.spans) if weight_grads else None

    def _bags(self, saved: _Saved, index: int, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of each bag ``[bags, d]`` and each id's bag ``[n]`` (None: the n-th id is the n-th bag)."""
        group, looked = self._groups[index], saved.looked[index]
        wide = accumulate_dtype(group.weight.dtype)
        if not self.pooled:
            return self._lanes.take_flat_grad(grad, index, saved.spans).to(wide), None
        lanes = len(group.lanes)
        # sample-major, as the gradient lies in memory: bag (sample, lane) has number sample * lanes + lane
        bag_grads = self._lanes.take_pooled_grad(grad, index).to(wide).reshape(saved.batch * lanes, group.dim)
        number = torch.arange(saved.batch * lanes, dtype=looked.rows.dtype, device=grad.device)
        lane_major = number.view(saved.batch, lanes).t().reshape(-1)
        lengths = looked.offsets.diff()
        return bag_grads, lane_major.repeat_interleave(lengths, output_size=looked.rows.numel())

    def _step(self, optimizer: OptimizerSpec, touched: list[Touched], row_norms: RowNorms | None) -> None:
        if optimizer.row_wise:
            self._check_row_norms(row_norms)
        if optimizer.check_gradients:
            self._check_gradients(touched)
        aboves = [
            _Above(_full_dim(group, part), self._count_steps(group, part))
            for group, part in zip(self._groups, touched, strict=True)
        ]
        if row_norms is not None:
            for _ in range(optimizer.row_norm_rounds):
                self._complete_squares(optimizer, touched, aboves, row_norms)
        for group, part, above in zip(self._groups, touched, aboves, strict=True):
            for chunk, grad in part.chunks(self._chunk_bytes):
                totals, dims, iteration = above.of(chunk)
                known = None if row_norms is None else totals
                step(optimizer, group.weight, group.state, part.rows[chunk], grad, known, dims, iteration)

    def _check_row_norms(self, row_norms: RowNorms | None) -> None:
        for slot in self.slots:
            if row_norms is None and slot.num_cols != slot.full_dim:
                raise ValueError(
                    f"table {slot.table!r}: {slot.num_cols} of its {slot.full_dim} columns are here: a "
                    f"row-wise optimizer needs row_norms: pass what adds the squares of the other columns"
                )

    def _count_steps(self, group: _Group, part: Touched) -> int | Tensor:
        """One more step for each slot: their number, ``[U]`` where slots have taken different ones."""
        if not self._counts:
            return 0
        counts = torch.cat([self._states[slot]["iter"].add_(1) for slot in group.slots])
        if len(group.slots) == 1 or bool((counts == counts[0]).all()):
            return int(counts[0])
        return counts.repeat_interleave(torch.tensor(_per_slot(group, part), device=self.device))

    def _complete_squares(
        self, optimizer: OptimizerSpec, touched: list[Touched], aboves: list[_Above], row_norms: RowNorms
    ) -> None:
        """One round: our squares of whole rows ``[U]`` or ``[U, k]``, completed by the caller, join the totals.

        The gradient is made anew in each round and for the step: that is cheaper than keeping it.
        """
        rows = [torch.empty(0, dtype=torch.int64, device=self.device)] * len(self.slots)
        squares = [torch.empty(0, device=self.device)] * len(self.slots)
        for group, part, above in zip(self._groups, touched, aboves, strict=True):
            sums = [
                partial_squares(optimizer, group.weight, group.state, part.rows[chunk], grad, *above.of(chunk))
                for chunk, grad in part.chunks(self._chunk_bytes)
            ]
            whole = torch.cat(sums) if sums else part.bag_grads.new_empty(0)
            count = _per_slot(group, part)
            for position, own in enumerate(part.rows.split(count)):
                rows[group.slots[position]] = own - group.bounds[position]
            for position, own in enumerate(whole.split(count)):
                squares[group.slots[position]] = own
        completed = row_norms(rows, squares)
        for group, above in zip(self._groups, aboves, strict=True):
            above.totals.append(torch.cat([completed[slot] for slot in group.slots]))

    def _check_gradients(self, touched: list[Touched]) -> None:
        """Raises ValueError naming the first row whose gradient is not finite."""
        for group, part in zip(self._groups, touched, strict=True):
            for chunk, grad in part.chunks(self._chunk_bytes):
                bad = (~grad.isfinite()).any(1).nonzero()
                if bad.numel():
                    flat = int(part.rows[chunk][bad[0]])
                    position = int(torch.searchsorted(group.bounds, flat, right=True)) - 1
                    slot, row = self.slots[group.slots[position]], flat - int(group.bounds[position])
                    values = grad[bad[0, 0]]
                    raise ValueError(
                        f"the gradient of table {slot.table!r}, {slot.row_name(row)}, is not finite "
                        f"({int((~values.isfinite()).sum())} of {values.numel()} numbers; "
                        f"{bad.numel()} such rows at hand): no weight of this kernel was changed"
                    )

    def _add_to_grads(self, group: _Group, part: Touched) -> None:
        own = [self._weights[slot] for slot in group.slots]
        if group.grad is None:
            group.grad = torch.empty_like(group.weight)
        views = group.grad.split([weight.shape[0] for weight in own])
        for weight, view in zip(own, views, strict=True):
            if weight.grad is None:
                view.zero_()
            elif weight.grad.data_ptr() != view.data_ptr():
                view.copy_(weight.grad)
            weight.grad = view
        for chunk, grad in part.chunks():
            add_rows_(group.grad, part.rows[chunk], grad)


def _per_slot(group: _Group, part: Touched) -> list[int]:
    """How many of the touched rows lie in each slot."""
    return torch.searchsorted(part.rows, group.bounds).diff().tolist()


def _full_dim(group: _Group, part: Touched) -> RowDims:
    """Columns of the whole table: one number where all slots agree, else one a touched row."""
    if bool((group.full_dims == group.full_dims[0]).all()):
        return int(group.full_dims[0])
    counts = torch.tensor(_per_slot(group, part), device=part.rows.device)
    return group.full_dims.repeat_interleave(counts)
