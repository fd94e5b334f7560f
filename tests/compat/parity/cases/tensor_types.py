"""Packed tensors, mixins of modules, and interfaces of batches."""

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torchrec.streamable import Multistreamable, Pipelineable
from torchrec.tensor_types import (
    UInt2Tensor,
    UInt4Tensor,
    UIntXTensor,
    down_size,
    fill_defaults,
    find_arg_of_type,
    up_size,
)
from torchrec.types import CacheMixin, CopyMixIn, DataType, ModuleCopyMixin, ModuleNoCopyMixin

from tests.compat.parity.case import case, raised

MODULE = "torchrec.tensor_types"
BYTES = torch.tensor([[228, 27], [1, 2]], dtype=torch.uint8)


@case(f"{MODULE}.down_size", f"{MODULE}.up_size")
def sizes_of_packed_numbers() -> Any:
    return [
        list(up_size(4, torch.Size([2, 3]))),
        list(down_size(4, torch.Size([2, 8]))),
        list(up_size(2, torch.Size([5]))),
    ]


@case(f"{MODULE}.fill_defaults", f"{MODULE}.find_arg_of_type")
def arguments_with_defaults() -> Any:
    return [
        fill_defaults([1, 2], 4, [8, 9]),
        fill_defaults([1, 2, 3], 3, [8, 9]),
        raised(lambda: fill_defaults([1], 4, [9])),
        find_arg_of_type([1, "a", "b"], str),
        find_arg_of_type([1], str),
    ]


@case(f"{MODULE}.UInt2Tensor", f"{MODULE}.UInt4Tensor", f"{MODULE}.UIntXTensor")
def packed_tensors() -> Any:
    def shown(kind: Any) -> Any:
        packed = kind(BYTES)
        return {
            "N": packed.N,
            "shape": list(packed.shape),
            "dtype": packed.dtype,
            "numel": packed.numel(),
            "bytes": packed.view(torch.uint8),
            "elem": packed.elem,
            "list": packed.tolist(),
            "text": repr(packed),
            "family": isinstance(packed, UIntXTensor),
        }

    return [shown(UInt2Tensor), shown(UInt4Tensor)]


@case(f"{MODULE}.UInt2Tensor", f"{MODULE}.UInt4Tensor")
def views_of_packed_tensors() -> Any:
    packed = UInt2Tensor(BYTES)
    return {
        "slice": packed[:, 0:4].view(torch.uint8),
        "rows": packed[1:].view(torch.uint8),
        "narrow": packed.narrow(1, 4, 4).view(torch.uint8),
        "row": packed[0].view(torch.uint8),
        "flat": list(packed.view(-1).shape),
        "reshaped": list(UInt4Tensor(BYTES).view(4, 2).shape),
        "meta": list(packed.to("meta").shape),
    }


@case(f"{MODULE}.UInt2Tensor", f"{MODULE}.UInt4Tensor")
def copies_of_packed_tensors() -> Any:
    packed = UInt4Tensor(BYTES)
    target = UInt4Tensor(torch.zeros_like(BYTES))
    target.copy_(packed)
    copies = [
        packed.clone(),
        packed.detach(),
        packed.to("cpu"),
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
    ]
    parameter = nn.Parameter(packed, requires_grad=False)
    return [target.elem, [[type(one), one.view(torch.uint8)] for one in copies], list(parameter.shape)]


@case(f"{MODULE}.UInt4Tensor")
def operators_that_packed_tensors_do_not_have() -> Any:
    packed = UInt4Tensor(BYTES)
    return [raised(lambda: packed + packed), raised(lambda: packed.split(2, dim=1))]


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
