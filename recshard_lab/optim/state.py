"""One parameter's optimizer state: how it appears in a state dict, what fits it, and how it is filled."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


def plain_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state for saving: objects that have a ``state_dict`` of their own give that, tensors stay themselves."""
    return {key: _plain(value) for key, value in entry.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return plain_entry(value)
    return value.state_dict() if _stateful(value, "state_dict") else value


def check_entry(held: Mapping[str, Any], given: Any, path: str) -> None:
    """Raises ValueError naming what a state lacks, has too many of, or has in another shape."""
    if not isinstance(given, Mapping):
        raise ValueError(f"state of {path!r} must be a dictionary with the keys {sorted(held)}, got {given!r:.80}")
    missing, extra = sorted(map(str, set(held) - set(given))), sorted(map(str, set(given) - set(held)))
    if missing or extra:
        raise ValueError(
            f"state of {path!r} has the keys {sorted(map(str, given))}, expected {sorted(map(str, held))}: "
            f"missing {missing}, unknown {extra}"
        )
    for key, value in held.items():
        _check_value(value, given[key], f"{path}.{key}")


def _check_value(held: Any, given: Any, path: str) -> None:
    if isinstance(held, dict):
        check_entry(held, given, path)
    elif (shards := local_shards(held)) is not None:
        if (others := local_shards(given)) is None:
            raise ValueError(f"state {path!r} is sharded here, the one given is {_describe(given)}")
        own, theirs = (_local_layout(layout) for layout in (shards, others))
        if own != theirs:
            raise ValueError(f"state {path!r} has local shards {own} here, the one given has {theirs}")
    elif isinstance(held, Tensor) and not _stateful(held, "load_state_dict"):
        number = isinstance(given, int | float) and held.numel() == 1
        if not number and (not isinstance(given, Tensor) or given.shape != held.shape):
            raise ValueError(f"state {path!r} has shape {list(held.shape)} here, the one given is {_describe(given)}")


def load_entry(held: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fills a checked state in place."""
    for key, value in held.items():
        new = given[key]
        if isinstance(value, dict):
            load_entry(value, new)
        elif (shards := local_shards(value)) is not None:
            for (_, own), (_, other) in zip(shards, local_shards(new) or (), strict=True):
                own.detach().copy_(other)
        elif _stateful(value, "load_state_dict"):
            value.load_state_dict(new)
        elif isinstance(value, Tensor):
            value.detach().copy_(new) if isinstance(new, Tensor) else value.detach().fill_(new)
        else:
            held[key] = deepcopy(new)


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
