"""``torchrec.distributed.utils``: names, copies, settings of tables."""

from __future__ import annotations

import pdb
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.profiler import record_function

from recshard_lab.compat.distributed.types import EmbeddingEvent, ShardingBucketMetadata
from recshard_lab.distributed import DistributedModelParallel, ShardedCollection
from recshard_lab.models import FeatureProcessorsCollection
from recshard_lab.sharding import ParameterSharding
from recshard_lab.sparse import KeyedJaggedTensor

T = TypeVar("T")


# ---- names ----


def append_prefix(prefix: str, name: str) -> str:
    """Both with a dot between, or the one that is not empty.

    >>> append_prefix("model", "weight"), append_prefix("", "weight")
    ('model.weight', 'weight')
    """
    return ".".join(part for part in (prefix, name) if part)


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Puts `prefix` before each name of a state dict, in place."""
    for name in sorted(state_dict):
        state_dict[prefix + name] = state_dict.pop(name)


def filter_state_dict(state_dict: Mapping[str, Any], name: str) -> OrderedDict[str, Any]:
    """The entries below `name`, without ``name.`` before them.

    >>> filter_state_dict({"a.x": 1, "b.x": 2}, "a")
    OrderedDict([('x', 1)])
    """
    inside = f"{name}."
    return OrderedDict((key.removeprefix(inside), own) for key, own in state_dict.items() if key.startswith(inside))


def get_class_name(obj: object) -> str:
    """The name of an object's class."""
    return type(obj).__name__


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Paths of the outermost modules that have no sharded module inside. Empty if nothing is sharded.

    >>> get_unsharded_module_names(nn.Linear(1, 1))
    []
    """
    names: list[str] = []
    _has_shards(model, "", names)
    return names


def _has_shards(module: nn.Module, path: str, names: list[str]) -> bool:
    """Whether a sharded module is inside. If so, adds the paths of the outermost modules without one."""
    if isinstance(module, ShardedCollection):
        return True
    children = list(module.named_children())
    if isinstance(module, DistributedModelParallel):
        children = [("_dmp_wrapped_module", module._dmp_wrapped_module)]
    unsharded: list[str] = []
    found = False
    for name, child in children:
        inside: list[str] = []
        own = append_prefix(path, name)
        if _has_shards(child, own, inside):
            found = True
            unsharded += inside
        else:
            unsharded.append(own)
    if found:
        names += unsharded
    return found


# ---- copies ----


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocates the parameters and buffers on ``meta`` and calls ``reset_parameters()`` of their modules.

    Args:
        module: a tree of modules. Tensors on other devices stay.
        device: of the new tensors.
    """
    for own in module.modules():
        tensors = [*own.parameters(recurse=False), *own.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            own.to_empty(device=device, recurse=False)
            reset = getattr(own, "reset_parameters", None)
            if callable(reset):
                reset()


class CopyableMixin(nn.Module):
    """A module with ``copy(device)``."""

    def copy(self, device: torch.device) -> nn.Module:
        """The module on another device; the original stays, or is returned if it is there."""
        return self.to(device)


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """A copy of a module with its tensors of one device on another. Sharded collections are copied there too.

    Args:
        module: any module.
        current_device: tensors of this device move. Others stay where they are.
        to_device: the other device.
    """
    memo: dict[int, Any] = {}
    for own in module.modules():
        if isinstance(own, ShardedCollection):
            memo[id(own)] = own.copy(to_device if own.device == current_device else own.device)
    copied = deepcopy(module, memo)
    sharded = {id(part) for own in memo.values() if isinstance(own, ShardedCollection) for part in own.modules()}
    for own in copied.modules():
        if id(own) in sharded:
            continue
        for name, parameter in own.named_parameters(recurse=False):
            if parameter.device == current_device:
                setattr(own, name, nn.Parameter(parameter.detach().to(to_device), parameter.requires_grad))
        for name, buffer in own.named_buffers(recurse=False):
            if buffer.device == current_device:
                setattr(own, name, buffer.to(to_device))
    return copied


# ---- values ----


def none_throws(optional: T | None, message: str = "Unexpected `None`") -> T:
    """The value.

    Raises:
        AssertionError: it is None.
    """
    if optional is None:
        raise AssertionError(message)
    return optional


def assert_instance(obj: object, t: type[T]) -> T:
    """The object.

    Raises:
        AssertionError: it is not an instance of `t`.
    """
    if not isinstance(obj, t):
        raise AssertionError(f"got {type(obj).__name__}, expected {t.__name__}")
    return obj


def get_device_type() -> str:
    """``"cuda"`` or ``"mtia"`` if torch has such a device, otherwise ``"cpu"``."""
    if torch.cuda.is_available():
        return "cuda"
    return "mtia" if torch.mtia.is_available() else "cpu"


class ForkedPdb(pdb.Pdb):
    """A debugger for a process that was forked: it reads the terminal, which such a process lacks as stdin."""

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Reads commands from ``/dev/stdin``."""
        kept = sys.stdin
        try:
            with open("/dev/stdin", encoding="utf-8") as sys.stdin:
                super().interaction(*args, **kwargs)
        finally:
            sys.stdin = kept


def maybe_annotate_embedding_event(
    event: EmbeddingEvent, module_fqn: str | None, sharding_type: str | None
) -> AbstractContextManager[Any]:
    """A block that profiles show as a stage of a module; without a path, one that they do not show.

    Args:
        event: the stage.
        module_fqn: path of the module.
        sharding_type: scheme of its tables.
    """
    if not module_fqn:
        return nullcontext()
    return record_function(f"[{event.value}]_[{module_fqn}]_[{sharding_type}]")


# ---- settings of tables ----


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None, param_fused_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Both, where those of the table take precedence.

    >>> merge_fused_params({"eps": 1.0}, {"eps": 2.0})
    {'eps': 2.0}
    """
    return {**(fused_params or {}), **(param_fused_params or {})}


def add_params_from_parameter_sharding(
    fused_params: Mapping[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """`fused_params` with the cache of a table, if its plan has one: ``cache_load_factor``."""
    found = dict(fused_params or {})
    cache = parameter_sharding.cache_params
    if cache is not None and parameter_sharding.sharding_type != "data_parallel":
        found["cache_load_factor"] = cache.load_factor
    return found


def get_bucket_metadata_from_shard_metadata(shards: list[Any], num_buckets: int) -> ShardingBucketMetadata:
    """The buckets of row shards that have whole buckets.

    Args:
        shards: torch's ShardMetadata of all row shards of a table.
        num_buckets: buckets of the table.

    Raises:
        AssertionError: rows that are no multiple of the buckets, or a shard with a part of a bucket.
    """
    rows = sum(shard.shard_sizes[0] for shard in shards)
    if num_buckets < 1 or rows % num_buckets:
        raise AssertionError(f"{rows} rows are not divisible by {num_buckets} buckets")
    size = rows // num_buckets
    for shard in shards:
        if shard.shard_sizes[0] % size:
            raise AssertionError(f"a shard of {shard.shard_sizes[0]} rows has a part of a bucket of {size} rows")
    return ShardingBucketMetadata(
        [shard.shard_sizes[0] // size for shard in shards], [shard.shard_offsets[0] // size for shard in shards], size
    )


def create_global_tensor_shape_stride_from_metadata(
    parameter_sharding: ParameterSharding, devices_per_node: int | None = None
) -> tuple[torch.Size, tuple[int, int]]:
    """Shape ``[E, D]`` and strides of a whole table, from the shards of its plan.

    Args:
        parameter_sharding: of the table, with shards.
        devices_per_node: accepted as in TorchRec; the shards say it.
    """
    spec = parameter_sharding.sharding_spec
    assert spec is not None, "a replicated table has no shards"
    ends = [
        [offset + size for offset, size in zip(own.shard_offsets, own.shard_sizes, strict=True)] for own in spec.shards
    ]
    rows, cols = (max(axis) for axis in zip(*ends, strict=True))
    return torch.Size((rows, cols)), (cols, 1)


def modify_input_for_feature_processor(
    features: KeyedJaggedTensor,
    feature_processors: nn.ModuleDict | FeatureProcessorsCollection,
    is_collection: bool,
) -> None:
    """Sets the weights of a batch to the places of its ids in their bags, in place.

    A position-weighted processor reads its weights there after the ids have travelled.

    Args:
        features: the batch.
        feature_processors: accepted as in TorchRec; the places do not depend on them.
        is_collection: the same.
    """
    offsets = features.offsets()
    places = torch.arange(features.values().numel(), device=offsets.device)
    features._weights = (places - torch.repeat_interleave(offsets[:-1], features.lengths())).float()
