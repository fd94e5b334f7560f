"""The plain-torch kernel: runs everywhere torch does, for every dtype and optimizer.

Slots of one width and dtype share one flat weight ``[sum of rows, d]``, so that there is one
``embedding_bag`` a group, however many tables.

The backward is a lookup too. A pooled lookup multiplies the weight by a 0/1 matrix (bags x rows), so the
gradient of the touched rows is the transposed matrix times the gradient of the bags: sort the ids, and
each run of equal ids is a "bag" whose members are the bags it occurred in.

    forward    bag  -> its rows         embedding_bag(rows, weight,       offsets of bags)
    backward   row  -> its bags         embedding_bag(bags, grad of bags, offsets of runs of equal rows)

Shape letters: G lanes of one group, B batch, N ids, d columns, U touched rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recshard_lab.embedding.kernels import TORCH_DTYPES, LookupKernel, RowNorms, Slot, register_kernel
from recshard_lab.embedding.optimizers import OptimizerSpec, add_rows_, decay_, row_squares, step


@dataclass
class _Group:
    """Slots of one width and dtype on one flat weight."""

    slots: list[int]  # their indices, in order
    lanes: list[int]  # the lanes that read them, in order
    lane_bases: list[int]  # first flat row of each lane's slot
    bounds: Tensor  # [slots + 1] first flat row of each slot
    full_dims: Tensor  # [slots]
    weight: Tensor  # [sum of rows, d]
    state: dict[str, Tensor]
    grad: Tensor | None = None  # dense kernels: [sum of rows, d], the slots' .grad are its views

    @property
    def dim(self) -> int:
        return self.weight.shape[1]


@dataclass
class _Touched:
    """The coalesced gradient of one group."""

    rows: Tensor  # [U] flat rows, ascending, distinct
    grad: Tensor  # [U, d]


@dataclass
class _Saved:
    """What backward needs of one forward, per group."""

    rows: list[Tensor]  # [n] flat row of each id
    offsets: list[Tensor]  # [G * B + 1]
    weights: list[Tensor | None]  # [n] per-sample weights
    spans: list[tuple[int, int]]  # where each lane's ids begin and end
    batch: int


@register_kernel
class NativeKernel(LookupKernel):
    """`LookupKernel` in plain torch operations."""

    name = "native"
    preference = 0

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

    def __init__(
        self,
        slots: Sequence[Slot],
        lane_slots: Sequence[int],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__(slots, lane_slots, optimizer, pooled=pooled, device=device)
        members: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, slot in enumerate(self.slots):
            members.setdefault((slot.num_cols, TORCH_DTYPES[slot.data_type]), []).append(index)
        self._groups = [self._make_group(indices, dim, dtype) for (dim, dtype), indices in members.items()]
        self._lane_dims = [self.slots[slot].num_cols for slot in self.lane_slots]
        self._lane_columns = list(accumulate(self._lane_dims, initial=0))
        self._weights: list[Tensor] = [torch.empty(0)] * len(self.slots)
        self._states: list[dict[str, Tensor]] = [{}] * len(self.slots)
        for group in self._groups:
            sizes = [self.slots[slot].num_rows for slot in group.slots]
            parts = {name: tensor.split(sizes) for name, tensor in group.state.items()}
            for position, (index, weight) in enumerate(
                zip(group.slots, group.weight.split(sizes), strict=True)
            ):
                self._weights[index] = weight.detach()
                self._states[index] = {name: part[position] for name, part in parts.items()}

    def _make_group(self, indices: list[int], dim: int, dtype: torch.dtype) -> _Group:
        slots = [self.slots[index] for index in indices]
        bounds = list(accumulate((slot.num_rows for slot in slots), initial=0))
        base = dict(zip(indices, bounds, strict=False))
        lanes = [lane for lane, slot in enumerate(self.lane_slots) if slot in base]
        shapes = self.optimizer.state_shapes(bounds[-1], dim) if self.optimizer else {}
        wide = _accumulate_dtype(dtype)
        return _Group(
            slots=indices,
            lanes=lanes,
            lane_bases=[base[self.lane_slots[lane]] for lane in lanes],
            bounds=torch.tensor(bounds, device=self.device),
            full_dims=torch.tensor([slot.full_dim for slot in slots], device=self.device),
            weight=torch.zeros(bounds[-1], dim, dtype=dtype, device=self.device),
            state={n: torch.zeros(shape, dtype=wide, device=self.device) for n, shape in shapes.items()},
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
        if weights is not None and not self.pooled:
            raise ValueError("per-sample weights have no meaning for sequence embeddings: leave them out")
        lanes = len(self.lane_slots)
        batch = (offsets.numel() - 1) // lanes if self.pooled else 1
        starts = offsets[::batch].tolist() if batch else [0] * (lanes + 1)
        spans = list(pairwise(starts))
        saved = _Saved([], [], [], spans, batch)
        outputs = []
        for group in self._groups:
            rows = self._flat_rows(group, ids, spans)
            bag_weights = None if weights is None else _of_lanes(weights, group.lanes, spans, lanes)
            bag_offsets = _offsets_of_lanes(offsets, group.lanes, lanes, batch) if self.pooled else offsets
            saved.rows.append(rows)
            saved.weights.append(bag_weights)
            saved.offsets.append(bag_offsets)
            if self.pooled:
                outputs.append(_pool(rows, group.weight, bag_offsets, bag_weights))
            else:
                outputs.append(group.weight.index_select(0, rows).to(_accumulate_dtype(group.weight.dtype)))
        out = self._join_pooled(outputs, batch) if self.pooled else self._join_sequences(outputs, spans)
        return out, saved

    def _flat_rows(self, group: _Group, ids: Tensor, spans: list[tuple[int, int]]) -> Tensor:
        """``[n]`` flat rows of the ids of a group's lanes."""
        if len(group.slots) == 1 and len(group.lanes) == len(self.lane_slots):
            return ids
        lengths = [spans[lane][1] - spans[lane][0] for lane in group.lanes]
        small = ids.dtype == torch.int32 and group.weight.shape[0] <= torch.iinfo(torch.int32).max
        rows = ids.new_empty(sum(lengths), dtype=torch.int32 if small else torch.int64)
        for lane, base, part in zip(group.lanes, group.lane_bases, rows.split(lengths), strict=True):
            torch.add(ids[slice(*spans[lane])], base, out=part)
        return rows

    def _join_pooled(self, outputs: list[Tensor], batch: int) -> Tensor:
        """Per group ``[G * B, d]``, lane-major -> ``[B, columns of all lanes]``."""
        if len(outputs) == 1:
            pooled = outputs[0]
            return pooled.view(len(self.lane_slots), batch, -1).transpose(0, 1).reshape(batch, -1)
        wide = max((output.dtype for output in outputs), key=lambda dtype: dtype.itemsize)
        joined = outputs[0].new_empty(batch, self._lane_columns[-1], dtype=wide)
        for group, pooled in zip(self._groups, outputs, strict=True):
            for position, lane in enumerate(group.lanes):
                start = self._lane_columns[lane]
                joined[:, start : start + group.dim] = pooled[position * batch : (position + 1) * batch]
        return joined

    def _join_sequences(self, outputs: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
        """Per group ``[n, d]`` -> flat, in the order of the lanes."""
        if len(outputs) == 1:
            return outputs[0].reshape(-1)
        parts: list[Tensor] = [torch.empty(0)] * len(self.lane_slots)
        for group, rows in zip(self._groups, outputs, strict=True):
            lengths = [spans[lane][1] - spans[lane][0] for lane in group.lanes]
            for lane, part in zip(group.lanes, rows.split(lengths), strict=True):
                parts[lane] = part.reshape(-1)
        return torch.cat(parts)

    # ---- backward ----

    @torch.no_grad()
    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        weight_grads = []
        touched = []
        for index, group in enumerate(self._groups):
            rows, weights = saved.rows[index], saved.weights[index]
            bag_grads, bags = self._bags(saved, index, grad)
            if weights is not None:
                weight_grads.append(_weight_grad(bag_grads, group.weight, rows, bags, saved.offsets[index]))
            touched.append(_coalesce(rows, bag_grads, bags, weights))
        self._apply(touched, row_norms)
        return self._join_weight_grads(weight_grads, saved) if weight_grads else None

    def _bags(self, saved: _Saved, index: int, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of each bag ``[bags, d]`` and each id's bag ``[n]`` (None: a bag an id, in order)."""
        group, batch, wide = (
            self._groups[index],
            saved.batch,
            _accumulate_dtype(self._groups[index].weight.dtype),
        )
        if not self.pooled:
            if len(self._groups) == 1:
                return grad.to(wide).reshape(-1, group.dim), None
            sizes = [
                (end - start) * dim for (start, end), dim in zip(saved.spans, self._lane_dims, strict=True)
            ]
            parts = grad.split(sizes)
            own = [parts[lane].view(-1, group.dim) for lane in group.lanes]
            return torch.cat(own).to(wide) if own else grad.new_empty(0, group.dim, dtype=wide), None
        if len(self._groups) > 1:
            columns = [slice(self._lane_columns[lane], self._lane_columns[lane + 1]) for lane in group.lanes]
            grad = torch.cat([grad[:, own] for own in columns], dim=1)
        lanes = len(group.lanes)
        bag_grads = grad.to(wide).reshape(
            batch * lanes, group.dim
        )  # sample-major: bag (b, lane) is b * lanes + lane
        kind = saved.rows[index].dtype
        number = (
            torch.arange(batch * lanes, dtype=kind, device=grad.device).view(batch, lanes).t().reshape(-1)
        )
        return bag_grads, number.repeat_interleave(
            saved.offsets[index].diff(), output_size=saved.rows[index].numel()
        )

    def _apply(self, touched: list[_Touched], row_norms: RowNorms | None) -> None:
        if self.optimizer is None:
            for group, part in zip(self._groups, touched, strict=True):
                self._add_to_grads(group, part)
            return
        optimizer = self.optimizer
        squares: list[Tensor | None] = [None] * len(touched)
        if optimizer.row_wise:
            for group, part in zip(self._groups, touched, strict=True):
                decay_(optimizer, group.weight, part.rows, part.grad)
            optimizer = replace(optimizer, weight_decay=0.0)
            squares = self._row_norms(touched, row_norms)
        for group, part, own in zip(self._groups, touched, squares, strict=True):
            full_dim = self._full_dim(group, part) if optimizer.row_wise else group.dim
            step(optimizer, group.weight, group.state, part.rows, part.grad, own, full_dim)

    def _row_norms(self, touched: list[_Touched], row_norms: RowNorms | None) -> list[Tensor | None]:
        """Per group the whole rows' squares, completed by the caller where columns lie elsewhere."""
        if row_norms is None:
            for slot in self.slots:
                if slot.num_cols != slot.full_dim:
                    raise ValueError(
                        f"table {slot.table!r}: {slot.num_cols} of its {slot.full_dim} columns are here: a "
                        f"row-wise optimizer needs row_norms: pass what adds the squares of the other columns"
                    )
            return [None] * len(touched)
        rows: list[Tensor] = [torch.empty(0)] * len(self.slots)
        squares = list(rows)
        counts = []
        for group, part in zip(self._groups, touched, strict=True):
            count = _per_slot(group, part)
            counts.append(count)
            for position, (index, own, own_squares) in enumerate(
                zip(
                    group.slots,
                    part.rows.split(count),
                    row_squares(part.grad).float().split(count),
                    strict=True,
                )
            ):
                rows[index] = (own - group.bounds[position]).long()
                squares[index] = own_squares
        totals = row_norms(rows, squares)
        return [torch.cat([totals[slot] for slot in group.slots]) for group in self._groups]

    def _full_dim(self, group: _Group, part: _Touched) -> int | Tensor:
        dims = {self.slots[slot].full_dim for slot in group.slots}
        if len(dims) == 1:
            return dims.pop()
        count = torch.tensor(_per_slot(group, part), device=self.device)
        return group.full_dims.repeat_interleave(count)

    def _add_to_grads(self, group: _Group, part: _Touched) -> None:
        own = [self._weights[slot] for slot in group.slots]
        if group.grad is None:
            group.grad = torch.zeros_like(group.weight)
        views = group.grad.split([weight.shape[0] for weight in own])
        for weight, view in zip(own, views, strict=True):
            if weight.grad is None:
                view.zero_()
            elif weight.grad.data_ptr() != view.data_ptr():
                view.copy_(weight.grad)
            weight.grad = view
        add_rows_(group.grad, part.rows, part.grad)

    def _join_weight_grads(self, grads: list[Tensor], saved: _Saved) -> Tensor:
        if len(grads) == 1:
            return grads[0]
        parts: list[Tensor] = [torch.empty(0)] * len(self.lane_slots)
        for group, part in zip(self._groups, grads, strict=True):
            lengths = [saved.spans[lane][1] - saved.spans[lane][0] for lane in group.lanes]
            for lane, own in zip(group.lanes, part.split(lengths), strict=True):
                parts[lane] = own
        return torch.cat(parts)


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_lanes(values: Tensor, lanes: list[int], spans: list[tuple[int, int]], num_lanes: int) -> Tensor:
    if len(lanes) == num_lanes:
        return values
    return torch.cat([values[slice(*spans[lane])] for lane in lanes]) if lanes else values[:0]


def _offsets_of_lanes(offsets: Tensor, lanes: list[int], num_lanes: int, batch: int) -> Tensor:
    if len(lanes) == num_lanes:
        return offsets
    lengths = offsets.diff().view(num_lanes, batch)[lanes].reshape(-1)
    return functional.pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))


def _pool(rows: Tensor, weight: Tensor, offsets: Tensor, bag_weights: Tensor | None) -> Tensor:
    """Sums ``[bags, d]``; half-precision rows are widened before they are added."""
    wide = _accumulate_dtype(weight.dtype)
    if weight.dtype != wide:
        weight = weight.index_select(0, rows).to(wide)
        rows = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device)
    if bag_weights is not None:
        bag_weights = bag_weights.to(wide)
    return functional.embedding_bag(
        rows,
        weight,
        offsets.to(rows.dtype),
        mode="sum",
        per_sample_weights=bag_weights,
        include_last_offset=True,
    )


def _coalesce(rows: Tensor, bag_grads: Tensor, bags: Tensor | None, weights: Tensor | None) -> _Touched:
    """The gradient of each distinct row: the transposed lookup of the module's docstring."""
    if rows.numel() == 0:
        return _Touched(rows.long(), bag_grads.new_empty(0, bag_grads.shape[1]))
    rows_sorted, order = rows.sort()
    unique, counts = torch.unique_consecutive(rows_sorted, return_counts=True)
    starts = functional.pad(counts.cumsum(0), (1, 0))
    members = order if bags is None else bags[order]
    own_weights = None if weights is None else weights[order].to(bag_grads.dtype)
    grad = functional.embedding_bag(
        members,
        bag_grads,
        starts.to(members.dtype),
        mode="sum",
        per_sample_weights=own_weights,
        include_last_offset=True,
    )
    return _Touched(unique.long(), grad)


def _weight_grad(
    bag_grads: Tensor, weight: Tensor, rows: Tensor, bags: Tensor | None, offsets: Tensor
) -> Tensor:
    """``[n]``: the inner product of each id's row with its bag's gradient."""
    assert bags is not None
    return torch.linalg.vecdot(
        weight.index_select(0, rows).to(bag_grads.dtype), bag_grads.index_select(0, bags)
    )


def _per_slot(group: _Group, part: _Touched) -> list[int]:
    """How many of the touched rows lie in each slot."""
    return torch.searchsorted(part.rows, group.bounds).diff().tolist()
