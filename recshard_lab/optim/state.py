"""The optimizer state of one parameter: its form in a state dict, the check before a load, and the load."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


def plain_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state for saving, without copies. Replaces each object that has ``state_dict()`` by its result."""
    return {key: _plain(value) for key, value in entry.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return plain_entry(value)
    return value.state_dict() if _stateful(value, "state_dict") else value


def check_entry(current: Mapping[str, Any], loaded: Any, path: str) -> None:
    """Checks that a loaded state has the keys, shapes and shards of the current one.

    Raises:
        ValueError: it differs; names the first difference.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(f"state of {path!r} must be a dictionary with the keys {sorted(current)}, got {loaded!r:.80}")
    missing = sorted(map(str, set(current) - set(loaded)))
    extra = sorted(map(str, set(loaded) - set(current)))
    if missing or extra:
        raise ValueError(
            f"state of {path!r} has the keys {sorted(map(str, loaded))}, expected {sorted(map(str, current))}: "
            f"missing {missing}, unknown {extra}"
        )
    for key, value in current.items():
        _check_value(value, loaded[key], f"{path}.{key}")


def _check_value(current: Any, loaded: Any, path: str) -> None:
    if isinstance(current, dict):
        check_entry(current, loaded, path)
    elif (shards := local_shards(current)) is not None:
        if (others := local_shards(loaded)) is None:
            raise ValueError(f"state {path!r} is {_describe(loaded)}, expected a sharded tensor or DTensor")
        expected, layout = (_local_layout(each) for each in (shards, others))
        if layout != expected:
            raise ValueError(
                f"state {path!r} has local shards {layout}, expected {expected}. Fix: load it with "
                f"torch.distributed.checkpoint, which reshards"
            )
    elif isinstance(current, Tensor) and not _stateful(current, "load_state_dict"):
        is_number = isinstance(loaded, int | float) and current.numel() == 1
        if not is_number and (not isinstance(loaded, Tensor) or loaded.shape != current.shape):
            raise ValueError(f"state {path!r} is {_describe(loaded)}, expected shape {list(current.shape)}")


def load_entry(current: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Copies a state that `check_entry` has checked into the current one."""
    for key, value in current.items():
        new = loaded[key]
        if isinstance(value, dict):
            load_entry(value, new)
        elif (shards := local_shards(value)) is not None:
            for (_, tensor), (_, other) in zip(shards, local_shards(new) or (), strict=True):
                tensor.detach().copy_(other)
        elif _stateful(value, "load_state_dict"):
            value.load_state_dict(new)
        elif isinstance(value, Tensor):
            value.detach().copy_(new) if isinstance(new, Tensor) else value.detach().fill_(new)
        else:
            current[key] = deepcopy(new)


def _stateful(value: Any, method: str) -> bool:
    return not isinstance(value, Tensor) and local_shards(value) is None and callable(getattr(value, method, None))


def local_shards(value: Any) -> list[tuple[tuple[int, ...], Tensor]] | None:
    """(offsets, tensor) of each shard on this rank of a torch ``ShardedTensor`` or DTensor. None for other values."""
    if hasattr(value, "local_shards"):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
    if not hasattr(value, "to_local"):
        return None
    with torch.no_grad():
        local = value.to_local()
    tensors = local.local_shards() if hasattr(local, "local_shards") else [local]
    return [(tuple(c.offsets), tensor) for c, tensor in zip(value.__create_chunk_list__(), tensors, strict=True)]


def _local_layout(shards: list[tuple[tuple[int, ...], Tensor]]) -> list[str]:
    return [f"{list(tensor.shape)} at {list(offsets)}" for offsets, tensor in shards]


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
