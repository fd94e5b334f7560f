"""``torchrec.inference.state_dict_transform``: state dicts with sharded tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor


def state_dict_gather(src: Mapping[str, Tensor | ShardedTensor], dst: Mapping[str, Tensor]) -> None:
    """Copies the tensors of `src` into those of `dst`. Sharded tensors are gathered on rank 0, which is collective.

    Args:
        src: this rank's state dict.
        dst: name -> a whole tensor. On ranks other than 0, tensors that are sharded in `src` are not changed.

    Raises:
        KeyError: a name that `src` lacks.
    """
    for name, target in dst.items():
        found = src[name]
        if isinstance(found, ShardedTensor):
            found.gather(0, target if dist.get_rank() == 0 else None)
        else:
            target.detach().copy_(found)


def state_dict_all_gather_keys(state_dict: Mapping[str, Tensor | ShardedTensor], pg: dist.ProcessGroup) -> list[str]:
    """The names of the state dicts of all ranks, each once, in the order of their first occurrence. Collective."""
    names: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(names, list(state_dict), group=pg)
    return list(dict.fromkeys(name for rank in names for name in rank))


def state_dict_to_device(
    state_dict: Mapping[str, Tensor | ShardedTensor], pg: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor | ShardedTensor]:
    """The state dict on another device.

    Args:
        state_dict: tensors; of sharded ones the shards of this rank move.
        pg: the ranks of the sharded tensors.
        device: the device.
    """
    moved: dict[str, Tensor | ShardedTensor] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, ShardedTensor):
            moved[name] = tensor.to(device, process_group=pg)
        else:
            moved[name] = tensor.to(device)
    return moved
