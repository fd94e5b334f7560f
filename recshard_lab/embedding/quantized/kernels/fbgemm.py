"""fbgemm's IntNBit kernels: one operator looks up all features.

fbgemm 1.8 on CPU computes FP32, FP16, FP8, INT8, INT4 and INT2 rows of any width. BF16 rows end the process with a
division by zero, so this backend refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.fbgemm import why_absent, why_no_cuda
from recshard_lab.embedding.quantized.formats import FP8_EXPONENT_BIAS, FP8_EXPONENT_BITS, row_alignment
from recshard_lab.embedding.quantized.kernels import Feature, QuantKernel, register_quant_kernel

# fbgemm's numbers for SparseType, PoolingMode and EmbeddingLocation
_TYPES = {DataType.FP32: 0, DataType.FP16: 1, DataType.INT8: 2, DataType.INT4: 3, DataType.INT2: 4, DataType.FP8: 6}
_OUTPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
_POOLING = {"sum": 0, "mean": 1, "none": 2}
_ON_DEVICE, _ON_HOST = 0, 3


@register_quant_kernel
class FbgemmQuantKernel(QuantKernel):
    """`QuantKernel` on ``int_nbit_split_embedding_codegen_lookup_function``."""

    name = "fbgemm"

    @classmethod
    def preference(cls, device: torch.device) -> int:
        return 10

    @classmethod
    def unavailable(cls) -> str | None:
        return why_absent()

    @classmethod
    def refuses(cls, feature: Feature, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda", "meta"):
            return f"it runs on cpu and cuda, not on {device.type}"
        if device.type == "cuda" and (reason := why_no_cuda()) is not None:
            return reason
        if feature.place.kind not in _TYPES:
            return f"it has no kernel for {feature.place.kind.value}"
        return None

    def __init__(
        self, features: Sequence[Feature], device: torch.device, output_dtype: torch.dtype, pooling: str
    ) -> None:
        super().__init__(features, device, output_dtype, pooling)
        on_cuda = device.type == "cuda"
        self.checks_upper_bound = not on_cuda  # type: ignore[misc]
        places = [feature.place for feature in features]

        def constant(numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        columns = list(accumulate((place.dim for place in places), initial=0))
        most = {kind: max((p.dim for p in places if p.kind is kind), default=0) for kind in _TYPES}
        self._index_dtype = torch.int32 if on_cuda and max(p.rows for p in places) < 2**31 else None
        self._tables = (
            constant([], torch.uint8),
            constant([_ON_DEVICE if on_cuda else _ON_HOST] * len(places), torch.int32),
            constant([place.start for place in places], torch.int64),
            constant([_TYPES[place.kind] for place in places], torch.uint8),
            constant(columns, torch.int32),
            columns[-1],
            *(most[kind] for kind in (DataType.INT2, DataType.INT4, DataType.INT8, DataType.FP16, DataType.FP32)),
        )
        self._alignment = row_alignment(device)
        self._most_fp8 = most[DataType.FP8]
        self._operator = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function

    def forward(
        self,
        flat: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        if self._index_dtype is not None:
            ids, offsets = ids.to(self._index_dtype), offsets.to(self._index_dtype)
        rows: Tensor = self._operator(
            flat,
            *self._tables,
            ids,
            offsets,
            _POOLING[self.pooling],
            weights,
            _OUTPUTS[self.output_dtype],
            None,
            None,
            self._alignment,
            self._most_fp8,
            FP8_EXPONENT_BITS,
            FP8_EXPONENT_BIAS,
        )
        return rows
