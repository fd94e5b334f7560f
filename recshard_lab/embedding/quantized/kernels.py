"""Lookups of packed rows: fbgemm's IntNBit operator where it can, torch operators on every device.

fbgemm 1.8 on CPU computes FP32, FP16, FP8, INT8, INT4 and INT2 rows of any width. BF16 rows end the process with a
division by zero, so torch's operators look them up. Both read the same bytes.

Shape letters: F features, G features of one call, B batch, N ids, n of one call, R bytes of a packed row, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.embedding.kernels import (
    KernelInput,
    KernelSpec,
    LookupKernel,
    RowNorms,
    ShardSpec,
    notice_once,
    register_kernel,
)
from recshard_lab.embedding.kernels.fbgemm import why_absent, why_no_cuda
from recshard_lab.embedding.kernels.transposed import FeatureGroups, Spans
from recshard_lab.embedding.quantized.formats import (
    FP8_EXPONENT_BIAS,
    FP8_EXPONENT_BITS,
    PackedTables,
    Place,
    row_alignment,
    row_bytes,
    rows_in,
    unpack,
)

# fbgemm's numbers for SparseType, PoolingMode and EmbeddingLocation
_TYPES = {DataType.FP32: 0, DataType.FP16: 1, DataType.INT8: 2, DataType.INT4: 3, DataType.INT2: 4, DataType.FP8: 6}
_OUTPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
_POOLING = {"sum": 0, "mean": 1, "none": 2}
_ON_DEVICE, _ON_HOST = 0, 3


class FbgemmRows:
    """fbgemm's ``int_nbit_split_embedding_codegen_lookup_function``.

    Args:
        places: the table of each of G features; not pooled: of the same columns.
        device, output_dtype, pooling: as of `PackedLookup`.
    """

    name: ClassVar[str] = "fbgemm"

    @staticmethod
    def refuses(place: Place, device: torch.device) -> str | None:
        """Why it cannot look up rows of a table, or None if it can, where fbgemm is installed."""
        if device.type not in ("cpu", "cuda", "meta"):
            return f"it runs on cpu and cuda, not on {device.type}"
        if device.type == "cuda" and (reason := why_no_cuda()) is not None:
            return reason
        return None if place.kind in _TYPES else f"it has no kernel for {place.kind.value}"

    def __init__(self, places: Sequence[Place], device: torch.device, output_dtype: torch.dtype, pooling: str) -> None:
        on_cuda = device.type == "cuda"
        constant = partial(torch.tensor, device=device)
        columns = list(accumulate((place.dim for place in places), initial=0))
        most = {kind: max((p.dim for p in places if p.kind is kind), default=0) for kind in _TYPES}
        self._index_dtype = torch.int32 if on_cuda and max(p.rows for p in places) < 2**31 else None
        self._tables = (
            constant([], dtype=torch.uint8),
            constant([_ON_DEVICE if on_cuda else _ON_HOST] * len(places), dtype=torch.int32),
            constant([place.start for place in places], dtype=torch.int64),
            constant([_TYPES[place.kind] for place in places], dtype=torch.uint8),
            constant(columns, dtype=torch.int32),
            columns[-1],
            *(most[kind] for kind in (DataType.INT2, DataType.INT4, DataType.INT8, DataType.FP16, DataType.FP32)),
        )
        self._pooling, self._output = _POOLING[pooling], _OUTPUTS[output_dtype]
        fp8 = most[DataType.FP8], FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS
        self._formats = (None, None, row_alignment(device), *fp8)
        self._operator = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function

    def __call__(self, flat: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Pooled ``[B, sum of D]``, else ``[n, D]``. On CPU a RuntimeError for ids that are too large."""
        if self._index_dtype is not None:
            ids, offsets = ids.to(self._index_dtype), offsets.to(self._index_dtype)
        lookup = ids, offsets, self._pooling, weights, self._output
        rows: Tensor = self._operator(flat, *self._tables, *lookup, *self._formats)
        return rows


class TorchRows:
    """Torch operators, for tables of one number format and width: rows are read, decoded to fp32 and pooled.

    Args:
        places: the table of each of G features, of one class.
        device, output_dtype, pooling: as of `PackedLookup`.
    """

    name: ClassVar[str] = "native"

    def __init__(self, places: Sequence[Place], device: torch.device, output_dtype: torch.dtype, pooling: str) -> None:
        self._place, self._features, self._dtype, self._pooling = places[0], len(places), output_dtype, pooling
        firsts = [(place.start - place.class_start) // place.stride for place in places]
        self._first = firsts[0] if len(set(firsts)) == 1 else torch.tensor(firsts, device=device)

    def __call__(self, flat: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Pooled ``[B, G * D]``, else ``[n, D]``."""
        pooled, place, first = self._pooling != "none", self._place, self._first
        batch = (offsets.numel() - 1) // self._features if pooled else 1
        if isinstance(first, Tensor):
            ends = offsets.index_select(0, torch.arange(self._features + 1, device=offsets.device) * batch)
            first = first.repeat_interleave(ends.diff(), output_size=ids.shape[0])
        table = rows_in(flat, place.class_start, place.class_rows, place)
        rows = unpack(table.index_select(0, (ids + first).clamp(min=0).long()), place.kind)
        rows = torch.where((ids >= 0).unsqueeze(1), rows, 0)
        if not pooled:
            return rows.to(self._dtype)
        numbers = torch.arange(rows.shape[0], dtype=offsets.dtype, device=rows.device)
        bags = torch.embedding_bag(rows, numbers, offsets, False, 0, False, weights, True)[0]
        if self._pooling == "mean":
            bags = bags / offsets.diff().clamp(min=1).unsqueeze(1)
        return bags.view(self._features, batch, place.dim).transpose(0, 1).flatten(1).to(self._dtype)


def choose_rows(place: Place, device: torch.device, backend: str | None = None) -> type[FbgemmRows | TorchRows]:
    """fbgemm where it can look up rows of a table, otherwise torch; with ``backend``, that one or an error.

    Raises:
        ValueError: no backend of this name, or it cannot look up the rows. The message has the reason.
    """
    if backend not in (None, "fbgemm", "native"):
        raise ValueError(f"backend {backend!r:.80} is not registered. Fix: use one of 'fbgemm', 'native'")
    if backend == "native":
        return TorchRows
    reason = FbgemmRows.refuses(place, device)
    if reason is None:  # last, because it may load a library
        reason = why_absent()
        if reason is None:
            return FbgemmRows
        if backend is None:
            notice_once(f"kernel 'fbgemm' is not used: {reason}")
    if backend is None:
        return TorchRows
    raise ValueError(f"no kernel can look up table {place.table!r} (fbgemm: {reason}). Fix: leave backend out")


class PackedLookup:
    """Looks up features of packed tables. It has no weights: each call takes the bytes of the tables.

    Args:
        places: the table of each feature, in the order of the ids.
        device: stores the tables, and takes ids.
        output_dtype: of the rows.
        pooling: ``"sum"``, ``"mean"``, or ``"none"`` for one row per id.
        backend: as of `choose_rows`, for all features.

    Attributes:
        backends: table -> the backend that looks it up.
        checks_upper_bound: whether a call raises RuntimeError for ids that are too large. If not, the caller must
            check them.
        needs_counts: whether a call reads offsets on the host if it gets no ``counts``.
    """

    def __init__(
        self,
        places: Sequence[Place],
        device: torch.device,
        output_dtype: torch.dtype,
        pooling: str,
        backend: str | None = None,
    ) -> None:
        self._pooled = pooling != "none"
        groups: dict[Any, list[int]] = {}
        for number, place in enumerate(places):
            kind = choose_rows(place, device, backend)
            width = 0 if self._pooled else place.dim
            together = place.class_start if kind is TorchRows else width
            groups.setdefault((kind, together), []).append(number)
        self._calls = [
            kind([places[number] for number in members], device, output_dtype, pooling)
            for (kind, _), members in groups.items()
        ]
        self._groups = FeatureGroups([place.dim for place in places], list(groups.values()), device)
        self.backends = {places[number].table: kind.name for (kind, _), own in groups.items() for number in own}
        self.checks_upper_bound = device.type == "cpu" and all(isinstance(call, FbgemmRows) for call in self._calls)
        self.needs_counts = not self._groups.whole

    def __call__(
        self, flat: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Looks up one batch, with torch operators or operators that have a meta kernel.

        Args:
            flat: the bytes of `PackedTables`.
            ids: ``[N]`` int32 or int64, one feature after the other. -1 is a row of zeros.
            offsets: pooled: where bags begin, ``[F * B + 1]``, feature-major. Not pooled: where features begin,
                ``[F + 1]``.
            weights: ``[N]`` or None. Pooled only.
            counts: ids of each feature, if the host knows them.

        Returns:
            Pooled ``[B, sum of D]``. Not pooled: flat, the ``[n, D]`` rows of each feature one after the other.
        """
        outputs, spans = self._outputs(flat, ids, offsets, weights, counts)
        return self._groups.join_pooled(outputs) if self._pooled else self._groups.join_flat(outputs, spans)

    def rows(
        self, flat: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int]
    ) -> list[Tensor]:
        """The ``[n, D]`` rows of each feature, not pooled, without joining them. Arguments as of a call."""
        outputs, _ = self._outputs(flat, ids, offsets, weights, counts)
        sizes = [[counts[number] for number in members] for members in self._groups.groups]
        return self._groups.in_order([part for out, own in zip(outputs, sizes, strict=True) for part in out.split(own)])

    def _outputs(
        self, flat: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None
    ) -> tuple[list[Tensor], Spans]:
        """What each call returns, and where features begin if there are several calls."""
        offsets = offsets.to(ids.dtype).contiguous()
        weights = None if weights is None else weights.float().contiguous()
        groups = self._groups
        if groups.whole:
            return [self._calls[0](flat, ids.contiguous(), offsets, weights)], []
        spans, batch = groups.spans(offsets, self._pooled, counts)
        outputs = [
            call(
                flat,
                groups.take(ids, index, spans),
                groups.take_offsets(offsets, index, batch),
                None if weights is None else groups.take(weights, index, spans),
            )
            for index, call in enumerate(self._calls)
        ]
        return outputs, spans


@register_kernel
class PackedKernel(LookupKernel):
    """Shards of served tables, for devices and ranks. Forward only.

    `weights` are bytes ``[num_rows, R]`` uint8; all bytes zero is a row of zeros.
    """

    name = "packed"
    trains = False

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        try:
            for shard in spec.shards:
                row_bytes(_config(shard))
        except ValueError as error:
            return str(error).partition(". Fix")[0]
        return None

    def _allocate(self) -> None:
        self._packed = PackedTables([_config(shard) for shard in self.shards], self.device)
        places = [self._packed.places[shard] for shard in self.features]
        self._lookup = PackedLookup(places, self.device, torch.float32, "sum" if self.pooled else "none")

    def weights(self) -> list[Tensor]:
        return [self._packed.rows_of(number) for number in range(len(self.shards))]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        return [{} for _ in self.shards]

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        self.check_weights(batch.weights)
        return self._lookup(self._packed.flat, batch.ids, batch.offsets, batch.weights, batch.counts), None

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        raise RuntimeError("served tables have no gradients. Fix: train the model, then quantize it")


def _config(shard: ShardSpec) -> BaseEmbeddingConfig:
    return BaseEmbeddingConfig(shard.num_rows, shard.num_cols, shard.table, shard.data_type)
