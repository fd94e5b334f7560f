"""Which messages to encode, in which format, and the precision that it costs.

>>> registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16))
>>> registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].backward.comm_type
<CommType.BF16: 'bf16'>
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil, frexp, log2
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments

# INT8 by rows: ``x ~ code * scale + offset`` with ``offset = min``, ``scale = (max - min) / 255`` of each row.
#
# The layout is that of fbgemm's FusedRowwise8bit: ``[n, w] float32  ->  [n, w + 8] uint8``, the last eight bytes scale
# and offset. On the CPU its operator encodes if it is installed; torch gives the same bits. fbgemm adds 1e-8 to
# max - min before it divides, which would erase rows of small gradients. Such rows are first multiplied by a power of
# two, which is exact, or encoded by torch. Choosing needs the rows' extremes on the host, so torch encodes on a GPU.


PARAMETER_BYTES = 8
_HUGE = torch.finfo(torch.float32).max / 4
_UNTOUCHED = 0.25  # from here on, max - min + 1e-8 == max - min in float32
_TINY = 2.0**-100


def encode_rows(rows: Tensor) -> Tensor:
    """``[n, w]`` float32 of at most a quarter of the largest float32 -> ``[n, w + 8]`` uint8."""
    if rows.numel() == 0:
        return rows.new_empty(rows.shape[0], rows.shape[1] + PARAMETER_BYTES, dtype=torch.uint8)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    spread = high - low
    exponent = _exponent(low, high, spread) if rows.device.type == "cpu" and _has_fbgemm() else None
    if exponent is None:
        return _by_torch(rows, low, spread)
    if exponent == 0:
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    encoded: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows * 2.0**exponent)
    encoded[:, rows.shape[1] :] = torch.cat([spread / 255, low], 1).view(torch.uint8)
    return encoded


def decode_rows(encoded: Tensor, width: int) -> Tensor:
    """``[n, w + 8]`` uint8 -> ``[n, w]`` float32; rows whose scale is NaN are NaN."""
    if encoded.numel() == 0 or width == 0:
        return torch.empty(encoded.shape[0], width, device=encoded.device)
    if _has_fbgemm() and (encoded.device.type == "cpu" or (width % 4 == 0 and encoded.storage_offset() % 4 == 0)):
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(encoded.contiguous())
    scale, offset = encoded[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32).split(1, 1)
    return torch.addcmul(offset, encoded[:, :width].float(), scale)


def _by_torch(rows: Tensor, low: Tensor, spread: Tensor) -> Tensor:
    finite = spread.isfinite()
    inverse = torch.where(spread > 0, 255 / spread, 0.0).clamp(max=torch.finfo(torch.float32).max)
    codes = ((rows - low) * inverse).round_()
    codes = torch.where(finite, codes, 0.0).clamp_(0, 255).to(torch.uint8)
    parameters = torch.where(finite, torch.cat([spread / 255, low], 1), torch.nan)
    return torch.cat([codes, parameters.contiguous().view(torch.uint8)], 1)


def _exponent(low: Tensor, high: Tensor, spread: Tensor) -> int | None:
    """The power of two by which all rows must be multiplied for fbgemm; None if torch must encode them."""
    largest = max(float(high.max()), -float(low.min()))
    smallest = float(torch.where(spread > 0, spread, torch.inf).min())
    if not largest <= _HUGE or smallest < _TINY:  # NaN too
        return None
    if smallest >= _UNTOUCHED:
        return 0
    exponent = ceil(log2(_UNTOUCHED / smallest))
    return exponent if largest * 2.0**exponent <= _HUGE else None


@cache
def _has_fbgemm() -> bool:
    if find_spec("fbgemm_gpu") is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of parts that this build lacks
            import_module("fbgemm_gpu")
    except Exception:  # a build for another torch raises anything from its loader; torch gives the same bits
        return False
    return True


# Codecs: looked-up rows and their gradients in fewer bytes on the wire, with a known error bound.
#
# ::
#
#     FP32   4 bytes an element     exact
#     FP16   2 bytes                half an ulp: 2**-11 of the value, 2**-25 where the value is below 2**-14
#     BF16   2 bytes                half an ulp: 2**-8 of the value
#     INT8   1 byte + 8 a row       (max - min) / 255 / 2 of the row
#
# Forward rows and backward gradients have separate codecs. Backward is *straight-through*: the gradient passes an
# encoded forward as if nothing had been rounded.
#
# No overflow is silent. A finite value beyond a format's largest *saturates*: the codec sends that largest value,
# counts it in ``codec.saturated`` and warns once, on the logger ``recshard_lab``. The host never waits for a GPU to
# count: there the warning follows at a later message, or when ``codec.saturated`` is read. FP16 and BF16 keep NaN and
# infinities; an INT8 row that has one arrives as a row of NaN.
#
# Shape letters: n rows, w columns of an embedding row, e elements that encode them.


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

    def encoded_width(self, width: int) -> int:
        """Elements e of `wire_dtype` that a row of ``width`` columns takes. Default: ``width``."""
        return width

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


@unique
class CommOp(Enum):
    """The kinds of message that have a codec: the keys of a registry."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


@names_wrong_arguments
@dataclass(frozen=True)
class QCommsConfig:
    """The format of each direction.

    Args:
        forward_precision: of looked-up rows.
        backward_precision: of their gradients.
        forward_loss_scale: rows are multiplied by it on the wire (FP16 and BF16 only).
        backward_loss_scale: gradients are.

    Raises:
        ValueError: an unknown format, or a loss scale for a format that has none.

    >>> QCommsConfig(CommType.FP16, CommType.BF16).backward_precision
    <CommType.BF16: 'bf16'>
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None

    def __post_init__(self) -> None:
        for direction in ("forward", "backward"):
            precision = getattr(self, f"{direction}_precision")
            if not isinstance(precision, CommType):
                known = ", ".join(f"CommType.{one.name}" for one in CommType)
                raise ValueError(f"{direction}_precision must be one of {known}; got {precision!r}")
            scale = getattr(self, f"{direction}_loss_scale")
            if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
                raise ValueError(f"{direction}_loss_scale must be a positive number or None, got {scale!r}")
            if scale is not None and precision not in (CommType.FP16, CommType.BF16):
                raise ValueError(
                    f"{direction}_loss_scale={scale!r} does not apply to {precision}: only FP16 and BF16 are scaled. "
                    f"Fix: leave it out"
                )


@dataclass(frozen=True)
class QuantizedCommCodecs:
    """The codecs of both directions."""

    forward: Codec = field(default_factory=PlainCodec)
    backward: Codec = field(default_factory=PlainCodec)


Registry: TypeAlias = Mapping[str, QuantizedCommCodecs]


def codecs_for(op: CommOp, registry: Registry | None) -> QuantizedCommCodecs:
    """The codecs of a kind of message; FP32 where the registry does not name it.

    Raises:
        ValueError: a key does not name a kind of message, or a value is not `QuantizedCommCodecs`.
    """
    if registry is not None and not isinstance(registry, Mapping):
        raise ValueError(f"qcomm_codecs_registry must be a mapping or None, got {registry!r}")
    for name, codecs in (registry or {}).items():
        if name not in CommOp.__members__:
            known = ", ".join(CommOp.__members__)
            raise ValueError(f"qcomm_codecs_registry has an unknown key {name!r}. Fix: use one of {known}")
        if not isinstance(codecs, QuantizedCommCodecs):
            raise ValueError(
                f"qcomm_codecs_registry[{name!r}] must be QuantizedCommCodecs, got {codecs!r}. "
                f"Fix: create the registry with get_qcomm_codecs_registry(QCommsConfig(...))"
            )
    return (registry or {}).get(op.name) or QuantizedCommCodecs()


def make_codec(precision: CommType, loss_scale: float | None = None) -> Codec:
    """The codec of a format.

    >>> make_codec(CommType.INT8).encoded_width(64)
    72
    """
    if precision is CommType.FP16:
        return Fp16Codec(loss_scale)
    if precision is CommType.BF16:
        return Bf16Codec(loss_scale)
    return Int8Codec() if precision is CommType.INT8 else PlainCodec()


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """Codecs of a configuration; FP32 both ways for None."""
    config = qcomms_config or QCommsConfig()
    return QuantizedCommCodecs(
        make_codec(config.forward_precision, config.forward_loss_scale),
        make_codec(config.backward_precision, config.backward_loss_scale),
    )


@names_wrong_arguments
def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: list[CommOp] | None = None, device: torch.device | str | None = None
) -> dict[str, QuantizedCommCodecs]:
    """What sharders take as ``qcomm_codecs_registry=``: the same configuration for every kind of message.

    Args:
        qcomms_config: the formats.
        comm_ops: the kinds of message to encode; all when left out.
        device: ignored, because codecs work on the device of their input; TorchRec has this argument.

    >>> sorted(get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16)))[0]
    'POOLED_EMBEDDINGS_ALL_TO_ALL'
    """
    return {op.name: get_qcomm_codecs(qcomms_config) for op in (comm_ops if comm_ops is not None else CommOp)}


@dataclass(frozen=True)
class CodecError:
    """The difference between decoded values and the originals.

    Attributes:
        codec: its format's name.
        max_abs, mean_abs: error over the finite values.
        bound: the largest error that the format allows on this tensor; infinite where a row turns to NaN.
        within: whether the error of every element is within its bound, and NaN and infinities arrive as documented.
        saturated: finite values that were replaced by the largest value.
        plain_bytes, encoded_bytes: on the wire.
    """

    codec: str
    max_abs: float
    mean_abs: float
    bound: float
    within: bool
    saturated: int
    plain_bytes: int
    encoded_bytes: int

    def __str__(self) -> str:
        verdict = "within its bound" if self.within else "BEYOND ITS BOUND"
        cut = f", {self.saturated} values saturated" if self.saturated else ""
        return (
            f"{self.codec}: max error {self.max_abs:.3g} (bound {self.bound:.3g}), mean {self.mean_abs:.3g}, "
            f"{verdict}{cut}; {self.encoded_bytes:,} bytes for {self.plain_bytes:,}"
        )


@names_wrong_arguments
def codec_error(codec: Codec | CommType, tensor: Tensor) -> CodecError:
    """Encodes and decodes rows, and measures the error.

    Args:
        codec: a codec, or a format.
        tensor: ``[..., w]`` floating point; the last dimension is a row.

    >>> print(codec_error(CommType.INT8, torch.arange(0.0, 256.0).view(1, 256)))
    int8: max error 0 (bound 0.5), mean 0, within its bound; 264 bytes for 1,024
    """
    codec = make_codec(codec) if isinstance(codec, CommType) else codec
    if tensor.is_meta:
        raise ValueError("codec_error compares values, and a tensor on the meta device has none")
    if tensor.dim() == 0 or not tensor.is_floating_point():
        raise ValueError(f"codec_error takes rows of floating point numbers, got {tensor.dtype} of {tensor.dim()} dims")
    width = tensor.shape[-1]
    rows = tensor.detach().reshape(-1, width) if tensor.numel() else tensor.detach().new_empty(0, width)
    before = codec.saturated
    encoded = codec.encode(rows)
    decoded = codec.decode(encoded, width, rows.dtype)
    bound = codec.error_bound(rows).double()
    known = rows.isfinite() & decoded.isfinite()
    gap = (decoded.double() - rows.double()).abs()
    kept = torch.where(known, gap <= bound, rows.isclose(decoded, 0, 0, equal_nan=True) | bound.isinf())
    errors = gap[known]
    return CodecError(
        codec=str(codec.comm_type),
        max_abs=float(errors.max()) if errors.numel() else 0.0,
        mean_abs=float(errors.mean()) if errors.numel() else 0.0,
        bound=float(bound.max()) if bound.numel() else 0.0,
        within=bool(kept.all()),
        saturated=codec.saturated - before,
        plain_bytes=rows.numel() * rows.element_size(),
        encoded_bytes=encoded.numel() * encoded.element_size(),
    )
