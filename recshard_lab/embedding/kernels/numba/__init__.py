"""The numba kernel: loops over rows, compiled for this machine's processor, on all of torch's threads.

Backward sorts the ids, so that each touched row is stepped once, with its summed gradient (`coalesce.py`). SGD id by id
would take a third less time on uniform ids. It would round each small step of a frequent row to the row's precision,
and lose steps below it.

The loops work on addresses. Both passes therefore check offsets and ids of the batch first. No loop reads or writes
memory outside of the tables, the batch and the output.

The loops release the GIL. torch's number of threads share the bags of a lookup and the shards of a step. The results do
not depend on the number of threads.

The first kernel compiles the loops or loads them from disk (`compiled.py`).

Shape letters: F shard features, B batch, N ids, d columns of a shard, U touched rows.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.base import (
    NO_WEIGHTS,
    KernelInput,
    KernelSpec,
    LookupKernel,
    RowNorms,
    ShardSpec,
    empty,
    register_kernel,
)
from recshard_lab.embedding.kernels.numba.compiled import loop, why_absent
from recshard_lab.embedding.kernels.numba.threads import cut_evenly, run_all, share_out, threads_for
from recshard_lab.embedding.optimizers import EmbOptimType, WeightDecayMode

Array = NDArray[Any]

_RULES = {EmbOptimType.EXACT_SGD: 0, EmbOptimType.EXACT_ADAGRAD: 1, EmbOptimType.EXACT_ROWWISE_ADAGRAD: 2}
_ALL, _ONLY_SQUARES, _GIVEN_SQUARES = range(3)
_WORDS, _MORE_WORDS = 7, 2050
_MOST_ROWS = 2**32  # sorted as 32-bit numbers
_BASE, _DIM, _HALF, _COLUMN, _STATE, _FULL_DIM, _ROWS = range(7)  # these five lines equal those of the loops
_NONE_INT, _NONE_FLOAT, _NONE = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.uint32)


@dataclass
class _Saved:
    """A batch in the form of the loops' arguments."""

    ids: Tensor
    offsets: Tensor  # int64; pooled [F * B + 1], else [F + 1]
    weights: Tensor | None  # float
    weights_dtype: torch.dtype
    batch: int  # 1 when not pooled
    starts: list[int]  # [F + 1] where each shard feature's ids begin


@register_kernel
class NumbaKernel(LookupKernel):
    """`LookupKernel` in loops that numba compiles."""

    name = "numba"

    @classmethod
    def preference(cls, spec: KernelSpec) -> int:
        """First on CPU. Its speed over fbgemm's for lookup, backward and step (26 tables x 100k x 64, batch 4096,
        pooling 10, one thread, ``recshard bench lookup``): SGD 2.2x on uniform ids and 1.9x on Zipf 1.2 ids, row-wise
        Adagrad 1.2x on both, the lookup alone 0.9x. Two threads take 0.6 of the time of one; fbgemm steps on one."""
        return 20 if spec.device.type == "cpu" else -20

    @classmethod
    def unavailable(cls) -> str | None:
        return why_absent()

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        optimizer = spec.optimizer
        if optimizer is None:
            return "it always steps an optimizer in backward, and keeps no gradients"
        if optimizer.optimizer not in _RULES:
            return f"it has no loop for {optimizer.optimizer}"
        missing = [name for name in optimizer.extras if name != "weight_decay"]
        if missing:
            return f"it has no {', '.join(missing)}"
        if optimizer.weight_decay and optimizer.weight_decay_mode is not WeightDecayMode.L2:
            return f"it has no weight_decay_mode {optimizer.weight_decay_mode}"
        if spec.weighted and not spec.pooled:
            return NO_WEIGHTS
        if spec.device.type != "cpu":
            return f"it runs on cpu, not on {spec.device.type}"
        return next((reason for shard in spec.shards if (reason := _refuses_shard(shard))), None)

    def _allocate(self) -> None:
        super()._allocate()
        self._by_shard: list[list[int]] = [[] for _ in self.shards]
        for feature, shard in enumerate(self.features):
            self._by_shard[shard].append(feature)
        self._shard_features = np.array([feature for own in self._by_shard for feature in own], np.int64)
        self._shard_starts = np.array([0, *accumulate(len(own) for own in self._by_shard)], np.int64)
        self._dims = [self.shards[shard].num_cols for shard in self.features]
        self._columns = list(accumulate(self._dims, initial=0))
        self._addresses: list[int] = []
        self._features = np.empty((len(self._dims), 7), np.int64)
        self._most = np.array([self.shards[shard].num_rows for shard in self.features], np.int64)
        for name in ("first_bad_feature", "pool" if self.pooled else "gather", "step_rows"):
            loop(name)  # not in the first step

    def _table(self, saved: _Saved) -> Array:
        """The loops' table of shard features. Reads the addresses anew of tensors that were copied or moved."""
        held = [*self._weights, *(state for own in self._states for state in own.values())]
        addresses = [tensor.data_ptr() for tensor in held]
        table = self._features
        if addresses != self._addresses:
            states = addresses[len(self.shards) :] or [0] * len(self.shards)
            for feature, index in enumerate(self.features):
                shard, half = self.shards[index], self._weights[index].dtype is torch.float16
                table[feature, _BASE], table[feature, _STATE] = addresses[index], states[index]
                table[feature, _DIM], table[feature, _HALF] = shard.num_cols, half
                table[feature, _FULL_DIM], table[feature, _ROWS] = shard.full_dim, shard.num_rows
            table[:, _COLUMN] = self._columns[:-1]
            self._addresses = addresses
        if not self.pooled:
            table = table.copy()
            table[:, _COLUMN] = self._flat_starts(saved)[:-1]
        return table

    def _flat_starts(self, saved: _Saved) -> list[int]:
        """``[L + 1]``: where each feature's rows begin in the flat output."""
        counts = np.diff(saved.starts)
        return [0, *accumulate(int(count) * dim for count, dim in zip(counts, self._dims, strict=True))]

    # ---- forward ----

    @torch.no_grad()
    def remember(self, batch: KernelInput, train: bool = True) -> _Saved:
        ids, offsets, weights, *_ = batch
        self.check_weights(weights)
        features = len(self._dims)
        samples = (offsets.numel() - 1) // features if self.pooled else 1
        _check_shapes(
            ids, offsets, weights, f"{features} * B + 1" if self.pooled else features + 1, features * samples + 1
        )
        offsets = offsets.long().contiguous()
        dtype = torch.float32 if weights is None else weights.dtype
        kept = None if weights is None else weights.detach().float().contiguous()
        saved = _Saved(ids.contiguous(), offsets, kept, dtype, samples, [])
        self._look_at(saved)
        return saved

    def _look_at(self, saved: _Saved) -> None:
        """Raises ValueError unless offsets ascend within the ids and every id is a row of its shard."""
        offsets, batch = saved.offsets, saved.batch
        feature = loop("first_bad_feature")(self._most, *self._batch(saved), saved.ids.numel(), batch)
        if feature >= 0:
            raise ValueError(self._what_is_bad(saved, feature))
        saved.starts = offsets[::batch].tolist() if batch else [0] * (len(self._dims) + 1)

    def _what_is_bad(self, saved: _Saved, feature: int) -> str:
        own = saved.offsets[feature * saved.batch : (feature + 1) * saved.batch + 1]
        shard, total = self.shards[self.features[feature]], saved.ids.numel()
        if own[0] < 0 or own[-1] > total or bool((own.diff() < 0).any()):
            return (
                f"offsets of shard feature {feature} (table {shard.table!r}) run from {int(own[0])} to {int(own[-1])}: "
                f"they must ascend, from 0 to the number of ids, {total}"
            )
        ids = saved.ids[int(own[0]) : int(own[-1])]
        bad = int(ids[(ids < 0) | (ids >= shard.num_rows)][0])
        return f"id {bad} is not a row of table {shard.table!r}, which has rows 0 to {shard.num_rows - 1} here"

    @torch.no_grad()
    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        saved = self.remember(batch)
        table = self._table(saved)
        where = (saved.ids.data_ptr(), int(saved.ids.dtype is torch.int64), saved.offsets.numpy())
        if not self.pooled:
            out = empty((self._flat_starts(saved)[-1],))
            total = saved.ids.numel()
            cuts = cut_evenly([total], threads_for(out.numel()))
            run_all([partial(loop("gather"), table, *where, out.data_ptr(), *cut) for cut in cuts])
            return out, saved
        out = empty((saved.batch, self._columns[-1]))
        weight_address = 0 if saved.weights is None else saved.weights.data_ptr()
        rest = (weight_address, out.data_ptr(), self._columns[-1], saved.batch)
        run_all([partial(loop("pool"), table, *where, *rest, *cut) for cut in self._cuts(saved)])
        return out, saved

    def _cuts(self, saved: _Saved) -> list[tuple[int, int]]:
        """Ranges of bags, feature-major, of like work."""
        loads = self._feature_loads(saved)
        cuts = cut_evenly(loads, threads_for(sum(loads)), saved.batch)
        return [cut for cut in cuts if cut[0] < cut[1]]

    def _feature_loads(self, saved: _Saved) -> list[int]:
        """Numbers that each feature reads and writes."""
        ends = saved.starts[1:]
        return [(end - start + saved.batch) * d for start, end, d in zip(saved.starts, ends, self._dims, strict=False)]

    # ---- backward ----

    @torch.no_grad()
    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        assert self.optimizer is not None
        if self.optimizer.row_wise:
            self.check_row_norms(row_norms)
        self._look_at(saved)  # the batch's memory may have been written to since
        columns = self._columns[-1] if self.pooled else self._flat_starts(saved)[-1]
        shape = (saved.batch, columns) if self.pooled else (columns,)
        if grad.shape != shape or grad.device.type != "cpu":
            raise ValueError(
                f"gradient {list(grad.shape)} on {grad.device} does not match the lookup's rows {list(shape)} on cpu"
            )
        grad = grad.float()
        if not self.pooled:
            grad = grad.reshape(1, -1)
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        table = self._table(saved)
        weight_grads = None if saved.weights is None else self._weight_grads(table, saved, grad)
        if row_norms is not None and self.optimizer.row_wise:
            self._step_with_norms(table, saved, grad, row_norms)
        else:
            self._step(table, saved, grad)
        return weight_grads

    def _weight_grads(self, table: Array, saved: _Saved, grad: Tensor) -> Tensor:
        out = torch.empty(saved.ids.numel())
        batch = (*self._batch(saved), grad.data_ptr(), grad.stride(0), saved.batch, out.data_ptr())
        run_all([partial(loop("weight_grads"), table, *batch, *cut) for cut in self._cuts(saved)])
        return out.to(saved.weights_dtype)

    def _batch(self, saved: _Saved) -> tuple[int, int, Array]:
        return saved.ids.data_ptr(), int(saved.ids.dtype is torch.int64), saved.offsets.numpy()

    def _step(self, table: Array, saved: _Saved, grad: Tensor) -> None:
        """Divides the shards among threads by load, or the rows of every shard if that is uneven."""
        loads = self._shard_loads(saved)
        threads = threads_for(sum(loads))
        shares, even = share_out(loads, threads)
        parts = 1 if even else threads
        if parts > 1:
            shares = [list(range(len(self.shards)))] * threads
        tasks = []
        for number, shards in enumerate(shares):
            part = number if parts > 1 else 0
            tasks.append(self._rows_task(table, shards, saved, grad, part, parts))
        run_all(tasks)

    def _step_with_norms(self, table: Array, saved: _Saved, grad: Tensor, row_norms: RowNorms) -> None:
        """Computes the squares of all shards, lets the caller add those of the other columns, then steps."""
        ids = [sum(saved.starts[feature + 1] - saved.starts[feature] for feature in own) for own in self._by_shard]
        firsts = np.array([0, *accumulate(ids)], np.int64)
        rows, squares = np.empty(firsts[-1], np.int64), np.empty(firsts[-1], np.float32)
        counts = np.zeros(len(ids), np.int64)
        found = (firsts, rows, squares, counts, np.empty(firsts[-1], np.uint32), np.empty(firsts[-1], np.uint32))
        loads = self._shard_loads(saved)
        shares, _ = share_out(loads, threads_for(sum(loads)))
        run_all([self._rows_task(table, own, saved, grad, 0, 1, _ONLY_SQUARES, found) for own in shares])
        spans = [slice(first, first + count) for first, count in zip(firsts, counts, strict=False)]
        totals = row_norms(
            [torch.from_numpy(rows[span]) for span in spans], [torch.from_numpy(squares[span]) for span in spans]
        )
        for span, total in zip(spans, totals, strict=True):
            squares[span] = total.float().numpy()
        run_all([self._rows_task(table, own, saved, grad, 0, 1, _GIVEN_SQUARES, found) for own in shares])

    def _rows_task(
        self,
        table: Array,
        shards: Sequence[int],
        saved: _Saved,
        grad: Tensor,
        part: int,
        parts: int,
        stage: int = _ALL,
        found: tuple[Array, ...] | None = None,
    ) -> Any:
        count = len(self.shards)
        found = found or (np.zeros(count, np.int64), _NONE_INT, _NONE_FLOAT, np.zeros(count, np.int64), _NONE, _NONE)
        optimizer = self.optimizer
        assert optimizer is not None
        rates = optimizer.learning_rate, optimizer.eps, optimizer.weight_decay
        numbers = [np.float32(number) for number in rates]
        wiring = (np.array(shards, np.int64), self._shard_starts, self._shard_features)
        how = (_RULES[optimizer.optimizer], *numbers, part, parts, stage)
        common = self._common(saved, grad)
        run = loop("step_rows")

        def task() -> None:
            largest, words, floats = self._room(shards, saved)
            factors, grads, total = floats
            room = (words, factors.numpy(), grads.data_ptr(), total.data_ptr(), largest)
            run(table, *wiring, *common, *how, *found, *room)

        return task

    def _room(self, shards: Sequence[int], saved: _Saved) -> tuple[int, Array, list[Tensor]]:
        """Buffers of `step_rows`: the most ids of a shard, integers, floats (factors, gradients, a row)."""
        features = [self._by_shard[shard] for shard in shards]
        ids = [sum(saved.starts[feature + 1] - saved.starts[feature] for feature in own) for own in features]
        sources = [len(own) * saved.batch if self.pooled else n for own, n in zip(features, ids, strict=True)]
        dims = [self.shards[shard].num_cols for shard in shards]
        largest = max(ids, default=0)
        sizes = (
            0 if saved.weights is None else largest,
            max((count * dim for count, dim in zip(sources, dims, strict=True)), default=0),
            max(dims, default=0),
        )
        words = np.empty(_WORDS * largest + _MORE_WORDS, np.uint32)
        return largest, words, [empty((size,)) for size in sizes]  # aligned: a split vector waits for its own store

    def _common(self, saved: _Saved, grad: Tensor) -> tuple[Any, ...]:
        weights = 0 if saved.weights is None else saved.weights.data_ptr()
        flat = 0 if self.pooled else 1
        return (*self._batch(saved), weights, grad.data_ptr(), grad.stride(0), saved.batch, flat)

    def _shard_loads(self, saved: _Saved) -> list[int]:
        loads = self._feature_loads(saved)
        return [sum(loads[feature] for feature in own) for own in self._by_shard]


def _check_shapes(ids: Tensor, offsets: Tensor, weights: Tensor | None, expected: object, size: int) -> None:
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} are {tensor.dtype} {list(tensor.shape)} on {tensor.device}; they must be int32 or int64, "
                f"of one dimension, on cpu"
            )
    if offsets.numel() != size or size < 1:
        raise ValueError(f"got {offsets.numel()} offsets, expected {expected}")
    if weights is not None and (weights.shape != ids.shape or weights.device.type != "cpu"):
        raise ValueError(
            f"per-sample weights are {list(weights.shape)} on {weights.device}, expected [{ids.numel()}] on cpu, one "
            f"per id"
        )


def _refuses_shard(shard: ShardSpec) -> str | None:
    table = f"table {shard.table!r}"
    if shard.data_type not in (DataType.FP32, DataType.FP16):
        return f"{table} is {shard.data_type.value}; it trains FP32 and FP16"
    if shard.data_type is DataType.FP16 and not _halves_are_fast():
        return f"{table} is FP16, and this processor has no FP16 instructions"
    if shard.num_rows > _MOST_ROWS:
        return f"{table} has {shard.num_rows} rows here; it sorts at most {_MOST_ROWS}"
    return None


def _halves_are_fast() -> bool:
    """Whether the processor converts half precision; otherwise LLVM calls a function that may be missing."""
    return platform.machine() in ("aarch64", "arm64") or torch.backends.cpu.get_cpu_capability().startswith("AVX")
