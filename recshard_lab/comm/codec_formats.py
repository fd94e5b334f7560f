"""Codecs: looked-up rows and their gradients in fewer bytes on the wire, with a known error bound.

::

    FP32   4 bytes an element     exact
    FP16   2 bytes                half an ulp: 2**-11 of the value, 2**-25 where the value is below 2**-14
    BF16   2 bytes                half an ulp: 2**-8 of the value
    INT8   1 byte + 8 a row       (max - min) / 255 / 2 of the row

Forward rows and backward gradients have separate codecs. Backward is *straight-through*: the gradient passes an encoded
forward as if nothing had been rounded.

No overflow is silent. A finite value beyond a format's largest *saturates*: the codec sends that largest value, counts
it in ``codec.saturated`` and warns once, on the logger ``recshard_lab``. The host never waits for a GPU to count: there
the warning follows at a later message, or when ``codec.saturated`` is read. FP16 and BF16 keep NaN and infinities; an
INT8 row that has one arrives as a row of NaN.

Shape letters: n rows, w columns of an embedding row, e elements that encode them.
"""

import logging
from abc import ABC, abstractmethod
from enum import Enum, unique
from math import frexp
from typing import ClassVar

import torch
from torch import Tensor

from recshard_lab.comm.rowwise import PARAMETER_BYTES, decode_rows, encode_rows


@unique
class CommType(Enum):
    """Number format on the wire."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    def __str__(self) -> str:
        return self.value


class Codec(ABC):
    """Encodes rows ``[n, w]`` for the wire and decodes received ones."""

    comm_type: ClassVar[CommType]
    wire_dtype: ClassVar[torch.dtype]
    adds_on_wire: ClassVar[bool]
    """Whether the sum of encoded values decodes to the sum of the values, as a reduce-scatter needs."""
    row_wise: ClassVar[bool] = False
    """Whether an element's code depends on the rest of its row."""

    def __init__(self) -> None:
        self._on_host, self._warned, self._limit = 0, False, 0.0
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor]] = {}  # the count, its last copy in pinned memory

    @property
    def saturated(self) -> int:
        """Finite values that were too large and were sent as the largest value. Waits for a GPU that encoded rows."""
        total = self._on_host + sum(int(count) for count, _ in self._on_devices.values())
        self._warn(total)
        return total

    @property
    def quantized_dtype(self) -> torch.dtype:
        """TorchRec's name for `wire_dtype`."""
        return self.wire_dtype

    @abstractmethod
    def encoded_width(self, width: int) -> int:
        """Elements e of `wire_dtype` that a row of ``width`` columns takes."""

    @abstractmethod
    def encode(self, rows: Tensor, parts: int = 1) -> Tensor:
        """``[n, w]`` floating point -> ``[n, e]``. ``parts`` such tensors may be added on the wire without overflow."""

    @abstractmethod
    def decode(self, encoded: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[n, e]`` -> ``[n, width]``."""

    @abstractmethod
    def error_bound(self, rows: Tensor) -> Tensor:
        """``[n, w]``: the largest error of each decoded element; infinite where a row turns to NaN."""

    def _within(self, rows: Tensor, limit: float) -> Tensor:
        """``rows`` on the CPU with finite values beyond ``limit`` replaced by it, and counted."""
        self._limit = limit
        if rows.numel() == 0 or (float(rows.amax()) <= limit and float(rows.amin()) >= -limit):  # NaN fails both
            return rows
        over = rows.isfinite() & (rows.abs() > limit)
        count = int(over.sum())
        self._on_host += count
        if count:
            self._warn(self._on_host, f" (largest {float(rows[over].abs().max()):g})")
        return torch.where(over, rows.clamp(-limit, limit), rows) if count else rows

    def _cut_on_device(self, target: Tensor, rows: Tensor, limit: float) -> Tensor:
        """The same in ``target``, a copy of ``rows`` in any format. The host does not wait for the count.

        Warns of values that earlier messages counted.
        """
        self._limit = limit
        if rows.device not in self._on_devices:
            count = torch.zeros((), dtype=torch.int64, device=rows.device)
            self._on_devices[rows.device] = count, torch.zeros((), dtype=torch.int64).pin_memory()
        count, arrived = self._on_devices[rows.device]
        self._warn(int(arrived))
        for sign in (1, -1):
            beyond = (rows > limit) if sign > 0 else (rows < -limit)
            beyond &= rows != sign * torch.inf
            count += beyond.sum()
            target.masked_fill_(beyond, sign * limit)
        arrived.copy_(count, non_blocking=True)
        return target

    def _warn(self, count: int, largest: str = "") -> None:
        if count and not self._warned:
            self._warned = True
            logging.getLogger("recshard_lab").warning(
                f"{self.comm_type} codec: {count} values beyond {self._limit:g}{largest} were sent as {self._limit:g}: "
                f"the format holds no larger ones. Fix: use bf16 for this direction, or a smaller loss scale. "
                f"This warning appears once; codec.saturated counts all"
            )


class PlainCodec(Codec):
    """FP32: sends rows unchanged."""

    comm_type, wire_dtype, adds_on_wire = CommType.FP32, torch.float32, True

    def encoded_width(self, width: int) -> int:
        return width

    def encode(self, rows: Tensor, parts: int = 1) -> Tensor:
        return rows

    def decode(self, encoded: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return encoded.to(dtype)

    def error_bound(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)


class _HalfCodec(Codec):
    """16 bits an element, optionally scaled first: ``loss_scale`` lifts small gradients out of the subnormals."""

    adds_on_wire = True
    relative: ClassVar[float]  # half an ulp of a normal number, over the number
    absolute: ClassVar[float]  # half an ulp of a subnormal one

    def __init__(self, loss_scale: float | None = None) -> None:
        super().__init__()
        if loss_scale is not None and not 0 < loss_scale < float("inf"):
            raise ValueError(f"a loss scale must be a positive number, got {loss_scale!r}")
        self.loss_scale = loss_scale

    def encoded_width(self, width: int) -> int:
        return width

    def encode(self, rows: Tensor, parts: int = 1) -> Tensor:
        if self.loss_scale is not None:
            rows = rows * self.loss_scale
        limit = torch.finfo(self.wire_dtype).max / parts
        if rows.device.type == "cpu":
            return self._within(rows, limit).to(self.wire_dtype)
        return self._cut_on_device(rows.to(self.wire_dtype), rows, limit)

    def decode(self, encoded: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        rows = encoded.to(dtype)
        return rows if self.loss_scale is None else rows.div_(self.loss_scale)

    def error_bound(self, rows: Tensor) -> Tensor:
        scale = self.loss_scale or 1.0
        size = rows.detach().abs().double()
        most = torch.finfo(self.wire_dtype).max / scale
        bound = (size * self.relative).clamp(min=self.absolute / scale)
        if rows.dtype is torch.float64 or frexp(scale)[0] != 0.5:  # rounded to fp32 as well, or scaled inexactly
            bound = bound + size * 2.0**-22
        return torch.where(size > most, size - most * (1 - self.relative), bound).nan_to_num(nan=0.0, posinf=0.0)


class Fp16Codec(_HalfCodec):
    """FP16: 11 bits of mantissa, values up to 65,504."""

    comm_type, wire_dtype = CommType.FP16, torch.float16
    relative, absolute = 2.0**-11, 2.0**-25


class Bf16Codec(_HalfCodec):
    """BF16: 8 bits of mantissa, the range of FP32."""

    comm_type, wire_dtype = CommType.BF16, torch.bfloat16
    relative, absolute = 2.0**-8, 2.0**-134


class Int8Codec(Codec):
    """INT8: one scale and offset per row, in the layout of fbgemm's FusedRowwise8bit: w codes, scale, offset."""

    comm_type, wire_dtype, adds_on_wire, row_wise = CommType.INT8, torch.uint8, False, True
    limit = torch.finfo(torch.float32).max / 4  # so that max - min, and what decodes, stay finite

    def encoded_width(self, width: int) -> int:
        return width + PARAMETER_BYTES

    def encode(self, rows: Tensor, parts: int = 1) -> Tensor:
        if rows.device.type == "cpu":
            return encode_rows(self._within(rows, self.limit).float().contiguous())
        return encode_rows(self._cut_on_device(rows.contiguous().to(torch.float32, copy=True), rows, self.limit))

    def decode(self, encoded: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return decode_rows(encoded, width).to(dtype)

    def error_bound(self, rows: Tensor) -> Tensor:
        if rows.numel() == 0:
            return torch.zeros_like(rows, dtype=torch.float64)
        exact = rows.detach().double()
        cut = exact.clamp(-self.limit, self.limit)
        low, high = cut.amin(1, keepdim=True), cut.amax(1, keepdim=True)
        spread, largest = high - low, torch.maximum(low.abs(), high.abs())
        rounding = spread * 2.0**-21 + largest * 2.0**-22 + 1.2e-36  # fp32's own, and of tiny rows the subnormals'
        bound = spread / 510 + rounding + (exact - cut).abs()
        return torch.where(exact.isfinite().all(1, keepdim=True), bound, torch.inf)
