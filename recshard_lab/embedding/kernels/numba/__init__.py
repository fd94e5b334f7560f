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
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.base import (
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

_RULES = {EmbOptimType.EXACT_SGD: 0, EmbOptimType.EXACT_ADAGRAD: 1, EmbOptimType.EXACT_ROWWISE_ADAGRAD: 2}
_ALL, _ONLY_SQUARES, _GIVEN_SQUARES = range(3)
_WORDS, _MORE_WORDS = 7, 2064
_MOST_ROWS = 2**32  # sorted as 32-bit numbers
_BASE, _DIM, _HALF, _STATE, _FULL_DIM, _ROWS, _SHARD = range(7)  # these five lines equal those of the loops
_NOTHING = (0,) * 6  # instead of squares


@dataclass
class _Saved:
    """A batch in the form of the loops' arguments."""

    ids: Tensor
    offsets: Tensor  # int64; pooled [F * B + 1], else [F + 1]
    weights: Tensor | None  # float
    weights_dtype: torch.dtype
    batch: int  # 1 when not pooled
    sizes: Tensor  # [S] ids of each shard, [F + 1] first column of each feature in the output (flat: number)
    given: tuple[int, ...] = ()  # what every loop takes
    most_ids: int = 0  # of a shard
    threads: int = 1


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
        if spec.device.type != "cpu":
            return f"it runs on cpu, not on {spec.device.type}"
        return next((reason for shard in spec.shards if (reason := _refuses_shard(shard))), None)

    def _allocate(self) -> None:
        super()._allocate()
        assert self.optimizer is not None
        self._row_wise = self.optimizer.row_wise
        self._by_shard = self.features_by_shard()
        # what no batch changes, in tensors: their addresses are cheap to read anew, as kernels may be copied
        self._every_shard = torch.arange(len(self.shards))
        self._shard_starts = torch.tensor([0, *accumulate(map(len, self._by_shard))])
        self._shard_features = torch.tensor([*chain(*self._by_shard)], dtype=torch.int64)
        self._dims = [self.shards[number].num_cols for number in self.features]
        self._width, self._widest = sum(self._dims), max(self._dims, default=0)
        columns = [len(own) * shard.num_cols for own, shard in zip(self._by_shard, self.shards, strict=True)]
        self._most_columns = max(columns, default=0)
        # [F, 7] as `BASE`... name the columns; `_table` writes the two addresses
        facts = [
            [0, shard.num_cols, shard.data_type is DataType.FP16, 0, shard.full_dim, shard.num_rows, number]
            for number, shard in ((number, self.shards[number]) for number in self.features)
        ]
        self._facts = torch.tensor(facts, dtype=torch.int64).view(-1, 7)
        # at most one state: the address of shard s is at `len(shards) + s`
        self._held = [*self._weights, *(state for own in self._states for state in own.values())]
        self._addresses: list[int] = []
        for name in ("look_at", "pool" if self.pooled else "gather", "step_rows"):
            loop(name)  # not in the first step

    def _table(self) -> int:
        """The loops' table of shard features. Reads the addresses anew of tensors that were copied or moved."""
        addresses = list(map(Tensor.data_ptr, self._held))
        if addresses != self._addresses:
            shards = self._facts[:, _SHARD]
            self._facts[:, _BASE] = torch.tensor(addresses)[shards]
            if self._states[0]:
                self._facts[:, _STATE] = torch.tensor(addresses)[len(self.shards) + shards]
            self._addresses = addresses
        return self._facts.data_ptr()

    # ---- forward ----

    def remember(self, batch: KernelInput, train: bool = True) -> _Saved:
        ids, offsets, weights, *_ = batch
        features = len(self._dims)
        samples = (offsets.numel() - 1) // features if self.pooled else 1
        for name, tensor in (("ids", ids), ("offsets", offsets)):
            if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)} on {tensor.device}; they must be int32 or int64, "
                    f"of one dimension, on cpu"
                )
        if offsets.numel() != (size := features * samples + 1) or size < 1:
            expected = f"{features} * B + 1" if self.pooled else size
            raise ValueError(f"got {offsets.numel()} offsets, expected {expected}")
        if weights is not None:
            self.check_weights(weights)
            if weights.shape != ids.shape or weights.device.type != "cpu":
                raise ValueError(
                    f"per-sample weights are {list(weights.shape)} on {weights.device}, expected [{ids.numel()}] on "
                    f"cpu, one per id"
                )
        dtype = torch.float32 if weights is None else weights.dtype
        kept = None if weights is None else weights.detach().float().contiguous()
        sizes = torch.empty(len(self.shards) + features + 1, dtype=torch.int64)
        # int64 offsets and float weights: only ids have two forms, so a loop is compiled once
        saved = _Saved(ids.contiguous(), offsets.long().contiguous(), kept, dtype, samples, sizes)
        self._look_at(saved)
        return saved

    def _look_at(self, saved: _Saved) -> None:
        """Raises ValueError unless offsets ascend within the ids and every id is a row of its shard."""
        ids, counts, shards = saved.ids, saved.sizes.data_ptr(), len(self.shards)
        # `sizes` is one tensor of two parts: counts [shards], places [F + 1]
        places = counts + saved.sizes.element_size() * shards
        where = (ids.data_ptr(), int(ids.dtype is torch.int64), saved.offsets.data_ptr())
        weights = 0 if saved.weights is None else saved.weights.data_ptr()
        saved.given = (self._table(), places, *where, weights, saved.batch, int(not self.pooled))
        saved.most_ids = loop("look_at")(*saved.given, len(self._dims), ids.numel(), shards, counts)
        if saved.most_ids < 0:
            raise ValueError(self._what_is_bad(saved, -1 - saved.most_ids))
        # of the numbers that are read and written, were all features alike
        saved.threads = threads_for((ids.numel() + saved.offsets.numel()) * self._width // len(self._dims))

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

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        saved = self.remember(batch)
        if self.pooled:
            out = empty((saved.batch, self._width))
            run = partial(loop("pool"), *saved.given, out.data_ptr(), self._width)
            run_all(run, self._cuts(saved))
        else:
            out = empty((int(saved.sizes[-1]),))
            run = partial(loop("gather"), *saved.given, out.data_ptr(), len(self._dims))
            run_all(run, cut_evenly([saved.ids.numel()], saved.threads))
        return out, saved

    def _cuts(self, saved: _Saved) -> list[tuple[int, int]]:
        """Ranges of bags, feature-major, of like work."""
        if saved.threads == 1:
            return [(0, saved.offsets.numel() - 1)]
        counts = saved.offsets.as_strided((len(self._dims) + 1,), (saved.batch,)).diff().tolist()  # [F]
        loads = [(count + saved.batch) * dim for count, dim in zip(counts, self._dims, strict=True)]
        return cut_evenly(loads, saved.threads, saved.batch)

    # ---- backward ----

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        if self._row_wise and row_norms is None:
            self.check_row_norms(None)
        self._look_at(saved)  # the batch's memory may have been written to since
        shape = (saved.batch, self._width) if self.pooled else (int(saved.sizes[-1]),)
        if grad.shape != shape or grad.device.type != "cpu":
            raise ValueError(
                f"gradient {list(grad.shape)} on {grad.device} does not match the lookup's rows {list(shape)} on cpu"
            )
        grad = grad.detach().float()
        if not self.pooled:
            grad = grad.reshape(1, -1)
        # rows may have any distance, but their numbers are adjacent: a column slice is not copied
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        weight_grads = None
        if saved.weights is not None:
            found = torch.empty(saved.ids.numel())
            run = partial(loop("weight_grads"), *saved.given, grad.data_ptr(), grad.stride(0), found.data_ptr())
            run_all(run, self._cuts(saved))
            weight_grads = found.to(saved.weights_dtype)
        if self._row_wise and row_norms is not None:
            self._step_with_norms(saved, grad, row_norms)
        else:
            run_all(partial(self._step_rows, saved, grad, _ALL, ()), self._shares(saved, by_rows=True))
        return weight_grads

    def _shares(self, saved: _Saved, by_rows: bool) -> list[tuple[Tensor, int, int]]:
        """Divides the shards among threads by load. If that is uneven, ``by_rows`` divides the rows of every shard.
        Each share has its shards, and which of how many parts of their rows."""
        if (threads := saved.threads) == 1:
            return [(self._every_shard, 0, 1)]
        own = zip(self._ids_by_shard(saved), self._by_shard, self.shards, strict=True)
        loads = [(ids + saved.batch * len(features)) * shard.num_cols for ids, features, shard in own]
        shares, even = share_out(loads, threads)
        if by_rows and not even:
            return [(self._every_shard, part, threads) for part in range(threads)]
        return [(torch.tensor(shards), 0, 1) for shards in shares]

    def _ids_by_shard(self, saved: _Saved) -> list[int]:
        return saved.sizes[: len(self.shards)].tolist()

    def _step_with_norms(self, saved: _Saved, grad: Tensor, row_norms: RowNorms) -> None:
        """Computes the squares of all shards, lets the caller add those of the other columns, then steps."""
        # room for as many rows as ids: the number of distinct ones is known after the sort
        firsts = [0, *accumulate(self._ids_by_shard(saved))]
        rows, squares = torch.empty(firsts[-1], dtype=torch.int64), torch.empty(firsts[-1])
        counts = torch.empty(len(self.shards), dtype=torch.int64)
        sorted_ids = torch.empty(2, firsts[-1], dtype=torch.int32)  # keys and values, which the second stage reuses
        found = (torch.tensor(firsts), counts, rows, squares, *sorted_ids)
        # whole shards: a shard's rows are written one after the other
        shares = self._shares(saved, by_rows=False)
        run_all(partial(self._step_rows, saved, grad, _ONLY_SQUARES, found), shares)
        spans = [slice(first, first + count) for first, count in zip(firsts, counts.tolist(), strict=False)]
        totals = row_norms([rows[span] for span in spans], [squares[span] for span in spans])
        for span, total in zip(spans, totals, strict=True):
            squares[span] = total
        run_all(partial(self._step_rows, saved, grad, _GIVEN_SQUARES, found), shares)

    def _step_rows(
        self, saved: _Saved, grad: Tensor, stage: int, found: Sequence[Tensor], shards: Tensor, part: int, parts: int
    ) -> None:
        optimizer, weighted = self.optimizer, saved.weights is not None
        assert optimizer is not None
        # a room for whole vectors of 16, aligned, as a split vector waits for its own store
        most = saved.most_ids // 16 * 16 + 16
        factors = _WORDS * most + _MORE_WORDS
        grads = factors + most * weighted
        sources = saved.batch * self._most_columns if self.pooled else grad.numel()
        total = grads + sources // 16 * 16 + 16
        room = empty((total + self._widest,))
        start = room.data_ptr()
        wiring = (shards.data_ptr(), shards.numel(), self._shard_starts.data_ptr(), self._shard_features.data_ptr())
        rates = (optimizer.learning_rate, optimizer.eps, optimizer.weight_decay)
        loop("step_rows")(
            *saved.given,
            *(grad.data_ptr(), grad.stride(0)),
            *wiring,
            *(_RULES[optimizer.optimizer], *rates),
            *(part, parts, stage),
            *(map(Tensor.data_ptr, found) if found else _NOTHING),
            # 4 bytes: floats, and 32-bit words
            *(start, start + 4 * factors, start + 4 * grads, start + 4 * total, most),
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
