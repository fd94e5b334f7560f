"""``torchrec.distributed.fbgemm_qcomm_codec``: codecs with TorchRec's calls, for messages and for a user's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from recshard_lab import comm
from recshard_lab.comm import Codec, CommOp, make_codec
from recshard_lab.comm.codecs import PlainCodec


class CommType(Enum):
    """Number format on the wire. `QCommsConfig` refuses MX4."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


@dataclass
class QCommsConfig:
    """The format of each direction.

    Args:
        forward_precision: of looked-up rows.
        backward_precision: of their gradients.
        forward_loss_scale, backward_loss_scale: factors on the wire (FP16 and BF16 only).
        fp8_quantize_dim, fp8_quantize_dim_bwd: None. Elements of FP8 have no scale.
        fp8_bwd_uses_143, fp8_output_dtype, output_dtype: of FP8 with scales and of MX4 alone, as in TorchRec.
        mx4_quantize_dim, mx4_quantize_dim_bwd, mx4_rounding_mode: of MX4 alone.

    Raises:
        ValueError: MX4, a scale for each row of FP8, an unknown format, or a loss scale for a format that has none.

    >>> QCommsConfig(CommType.FP8).backward_precision
    <CommType.FP32: 'fp32'>
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    fp8_output_dtype: Any = None
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: Any = None
    output_dtype: Any = None

    def __post_init__(self) -> None:
        for direction in ("forward", "backward"):
            name, precision = f"{direction}_precision", getattr(self, f"{direction}_precision")
            precision = CommType(getattr(precision, "value", precision))
            setattr(self, name, precision)
            if precision is CommType.MX4:
                raise ValueError(
                    f"{name}=CommType.MX4 is not supported: 32 columns share an exponent, and messages here do not pad "
                    f"rows to whole groups. Fix: CommType.FP8 or CommType.INT8"
                )
            columns = self.fp8_quantize_dim or self.fp8_quantize_dim_bwd
            if precision is CommType.FP8 and columns:
                raise ValueError(
                    f"fp8_quantize_dim={columns} is not supported: scales of FP8 rows need fbgemm's CUDA kernels. "
                    f"Fix: leave it out, or use CommType.INT8, which has a scale per row"
                )
            if precision is not CommType.FP8:  # checks the loss scale
                comm.QCommsConfig(comm.CommType(precision.value), forward_loss_scale=self._scale(direction))
            elif self._scale(direction) is not None:
                raise ValueError(
                    f"{direction}_loss_scale={self._scale(direction)!r} does not apply to fp8: only FP16 and BF16 are "
                    f"scaled. Fix: leave it out"
                )

    def _scale(self, direction: str) -> float | None:
        scale: float | None = getattr(self, f"{direction}_loss_scale")
        return scale

    def codec(self, direction: str, adds: bool = False) -> Codec:
        """The codec of a direction, "forward" or "backward".

        Args:
            direction: the direction.
            adds: whether messages are added on the way. FP8 then becomes FP16 forward and BF16 backward, as in
                TorchRec.
        """
        precision: CommType = getattr(self, f"{direction}_precision")
        if precision is not CommType.FP8:
            return make_codec(comm.CommType(precision.value), self._scale(direction))
        if adds:
            return make_codec(comm.CommType.FP16 if direction == "forward" else comm.CommType.BF16)
        return Fp8Codec()


class Fp8Codec(Codec):
    """FP8 of fbgemm: 4 bits of exponent, 3 of mantissa, an exponent bias of 15. Values up to 0.9375, exact to 2**-4.

    An element is torch's ``float8_e4m3fn`` of 256 times the value. Larger values and infinities saturate, NaN does
    not.

    >>> codec = Fp8Codec()
    >>> codec.decode(codec.encode(torch.tensor([[0.1, -2.0]])), 2)
    tensor([[ 0.1016, -0.9375]])
    """

    comm_type: ClassVar[Any] = CommType.FP8
    wire_dtype, adds_on_wire = torch.uint8, False
    limit = 0.9375

    def encoded_width(self, width: int) -> int:
        """`width`: one byte per number."""
        return width

    def encode(self, rows: Tensor, parts: int = 1) -> Tensor:
        """``[n, w]`` -> bytes ``[n, w]``."""
        if rows.device.type == "cpu":
            within = self._within(rows, self.limit)
        else:
            within = self._cut_on_device(rows.clone(), rows, self.limit)
        return (within.float().clamp(-self.limit, self.limit) * 256).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, encoded: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Bytes ``[n, w]`` -> ``[n, w]``."""
        return encoded.view(torch.float8_e4m3fn).to(dtype) / 256

    def error_bound(self, rows: Tensor) -> Tensor:
        """Half an ulp: 2**-4 of the value, 2**-18 near 0; what is cut off beyond 0.9375."""
        size = rows.detach().abs().double()
        bound = (size * 2.0**-4).clamp(min=2.0**-18)
        return torch.where(size > self.limit, size - self.limit, bound).nan_to_num(nan=0.0, posinf=torch.inf)


class QuantizedCommCodecs(comm.QuantizedCommCodecs):
    """The codecs of both directions. Default: FP32.

    Args:
        forward: of looked-up rows.
        backward: of their gradients.
    """

    def __init__(self, forward: Codec | None = None, backward: Codec | None = None) -> None:
        super().__init__(_with_calls(forward or PlainCodec()), _with_calls(backward or PlainCodec()))


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """Codecs of a configuration; FP32 both ways for None.

    >>> codec = get_qcomm_codecs(QCommsConfig(CommType.FP16)).forward
    >>> codec.decode(codec.encode(torch.tensor([1.5]), None), None)
    tensor([1.5000])
    """
    config = qcomms_config or QCommsConfig()
    return QuantizedCommCodecs(config.codec("forward"), config.codec("backward"))


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: list[CommOp] | None = None, device: torch.device | None = None
) -> dict[str, QuantizedCommCodecs] | None:
    """The same configuration for every kind of message, or None if both directions are FP32.

    Args:
        qcomms_config: the formats. Messages that a reduce-scatter adds are FP16 and BF16 in place of FP8.
        comm_ops: the kinds of message to encode. Default: all.
        device: accepted as in TorchRec; codecs work on the device of their input.
    """
    if {qcomms_config.forward_precision, qcomms_config.backward_precision} == {CommType.FP32}:
        return None
    registry = {}
    for op in comm_ops if comm_ops is not None else CommOp:
        adds = op is CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
        codecs = (qcomms_config.codec(direction, adds) for direction in ("forward", "backward"))
        registry[op.name] = QuantizedCommCodecs(*codecs)
    return registry


def _with_calls(codec: Codec) -> Codec:
    if not hasattr(codec, "calc_quantized_size"):
        codec.__class__ = _class_with_calls(type(codec))
    return codec


@cache
def _class_with_calls(kind: type[Any]) -> type[Any]:
    """A codec's class whose methods take TorchRec's arguments too: any shape, and a context."""

    class WithCalls(kind):
        def encode(self, rows: Tensor, parts: Any = None) -> Tensor:
            if isinstance(parts, int):
                encoded: Tensor = super().encode(rows, parts)
                return encoded
            flat = super().encode(rows.reshape(-1, rows.shape[-1]), 1)
            return flat.reshape(*rows.shape[:-1], -1)

        def decode(self, encoded: Tensor, width: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
            if isinstance(width, int):
                decoded: Tensor = super().decode(encoded, width, dtype)
                return decoded
            columns = encoded.shape[-1] - (self.encoded_width(1) - 1 if self.row_wise else 0)
            flat = super().decode(encoded.reshape(-1, encoded.shape[-1]), columns, dtype)
            return flat.reshape(*encoded.shape[:-1], columns)

        def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
            """Elements of a message of one row."""
            size: int = self.encoded_width(input_len)
            return size

        def create_context(self) -> None:
            """None: no codec needs one."""

    WithCalls.__name__, WithCalls.__qualname__ = kind.__name__, kind.__qualname__
    return WithCalls
