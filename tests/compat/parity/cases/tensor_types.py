"""Mixins of modules, and interfaces of batches."""

from typing import Any

import torch
from torchrec.streamable import Multistreamable, Pipelineable
from torchrec.types import DataType

from tests.compat.parity.case import case, raised


@case("torchrec.types.DataType")
def data_types() -> Any:
    return [
        [kind.name, kind.value, str(kind)]
        for kind in DataType
        if kind.name in ("FP32", "FP16", "BF16", "INT8", "INT4", "INT2")
    ]


@case("torchrec.streamable.Multistreamable", "torchrec.streamable.Pipelineable")
def interfaces_of_batches() -> Any:
    class Own(Pipelineable):
        def to(self, device: torch.device, non_blocking: bool = False) -> "Own":
            return self

        def record_stream(self, stream: torch.Stream) -> None:
            pass

    class Half(Multistreamable):
        pass

    own = Own()
    return [own.to(torch.device("cpu")) is own, isinstance(own, Multistreamable), raised(Half)]
