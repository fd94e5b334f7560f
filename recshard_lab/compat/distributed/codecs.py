"""``torchrec.distributed.fbgemm_qcomm_codec``: codecs with TorchRec's calls, for messages and for a user's tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from recshard_lab import comm
from recshard_lab.comm import Codec, CommOp, CommType, QCommsConfig
from recshard_lab.comm.codec_formats import PlainCodec


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
    codecs = comm.get_qcomm_codecs(qcomms_config)
    return QuantizedCommCodecs(codecs.forward, codecs.backward)


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: list[CommOp] | None = None, device: torch.device | None = None
) -> dict[str, QuantizedCommCodecs] | None:
    """As of `recshard_lab.comm`, or None if both directions are FP32."""
    if {qcomms_config.forward_precision, qcomms_config.backward_precision} == {CommType.FP32}:
        return None
    found = comm.get_qcomm_codecs_registry(qcomms_config, comm_ops, device)
    return {name: QuantizedCommCodecs(own.forward, own.backward) for name, own in found.items()}


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
