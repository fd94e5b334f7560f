"""Mixins of modules, and interfaces of batches."""

from typing import Any

import torch
from torch import nn
from torchrec.streamable import Multistreamable, Pipelineable
from torchrec.types import CacheMixin, CopyMixIn, DataType, ModuleCopyMixin, ModuleNoCopyMixin

from tests.compat.parity.case import case, raised


@case("torchrec.types.CopyMixIn", "torchrec.types.ModuleCopyMixin", "torchrec.types.ModuleNoCopyMixin")
def copied_to_a_device() -> Any:
    class Moves(ModuleCopyMixin, nn.Linear):
        pass

    class Stays(ModuleNoCopyMixin, nn.Linear):
        pass

    moves, stays = Moves(2, 1), Stays(2, 1)
    meta = torch.device("meta")
    return [
        moves.copy(meta).weight.device,
        stays.copy(meta).weight.device,
        stays.copy(meta) is stays,
        issubclass(Moves, CopyMixIn),
    ]


@case("torchrec.types.CacheMixin")
def a_cache_to_clear() -> Any:
    class Caches(CacheMixin):
        def __init__(self) -> None:
            self.kept = [1]

        def clear_cache(self) -> None:
            self.kept.clear()

    one = Caches()
    one.clear_cache()
    return [one.kept, isinstance(one, CacheMixin)]


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
