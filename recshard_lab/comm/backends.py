"""The devices that a process group supports, and the backend of each.

``torch.distributed.get_backend`` returns ``"cpu:gloo,cuda:nccl"`` for a group created so, never ``"nccl"``. All code
that depends on the backend uses these functions.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from recshard_lab.comm.groups import ShardingEnv, subgroups


def backends_of(pg: Any) -> dict[str, str]:
    """Device type -> backend, such as ``{"cpu": "gloo", "cuda": "nccl"}``; empty without a process group."""
    if pg is None:
        return {}
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(pg).split(","))


def uses_nccl(env: ShardingEnv) -> bool:
    """Whether GPU tensors are exchanged with NCCL.

    >>> uses_nccl(ShardingEnv.from_local(1, 0))
    False
    """
    return backends_of(env.pg).get("cuda") == "nccl"


def compute_device(env: ShardingEnv) -> torch.device:
    """Default device of a model over these ranks: this rank's GPU with NCCL, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl(env) else torch.device("cpu")


def message_device(env: ShardingEnv) -> torch.device:
    """Device of messages that the host writes and reads: the CPU if the group supports it, otherwise this rank's GPU.

    It depends on the group and never on a batch, so all ranks use one backend for one message.
    """
    backends = backends_of(env.pg)
    return compute_device(env) if backends and "cpu" not in backends else torch.device("cpu")


def host_env(env: ShardingEnv) -> ShardingEnv:
    """The same ranks over connections that carry CPU tensors: ``env`` itself, or a Gloo group beside NCCL.

    All ranks must call it. The group is created once for a process group and released with it.

    >>> host_env(ShardingEnv.from_local(1, 0)).pg is None
    True
    """
    if env.pg is None or "cpu" in backends_of(env.pg):
        return env

    def create() -> tuple[Any, ...]:
        members = dist.get_process_group_ranks(env.pg)
        whole = len(members) == dist.get_world_size()
        return (dist.new_group(members, backend="gloo", use_local_synchronization=not whole),)

    (group,) = subgroups(env.pg, "host", create)
    return replace(env, pg=group)


def sizes_env(env: ShardingEnv) -> ShardingEnv:
    """Like `host_env`, over connections of which messages of rows make no use.

    So a rank that skips messages of rows, and sends sizes, cannot be mistaken for one that sends rows. Gloo ends the
    process that receives more bytes than it expects.

    A group of some ranks has no connections apart: torch names such a new group after the number of groups that each
    rank has made, so ranks with different numbers would wait for each other.
    """
    host = host_env(env)
    if host is not env or env.pg is None or env.world_size < dist.get_world_size():
        return host
    (group,) = subgroups(env.pg, "sizes", lambda: (env.twin().pg,))
    return replace(env, pg=group)
