"""Which messages to encode, in which format, and the precision that it costs. ``codec_formats.py`` has the formats.

>>> registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16))
>>> registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].backward.comm_type
<CommType.BF16: 'bf16'>
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import TypeAlias

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm.codec_formats import (
    Bf16Codec,
    Codec,
    CommType,
    Fp16Codec,
    Int8Codec,
    PlainCodec,
)


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
    kept = torch.where(known, gap <= bound, _same(rows, decoded) | bound.isinf())
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


def _same(rows: Tensor, decoded: Tensor) -> Tensor:
    return (rows == decoded) | (rows.isnan() & decoded.isnan())
