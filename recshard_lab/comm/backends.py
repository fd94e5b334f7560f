"""The devices that a process group supports, and the backend of each.

``torch.distributed.get_backend`` returns ``"cpu:gloo,cuda:nccl"`` for a group created so, never ``"nccl"``. All code
that depends on the backend uses these functions.
"""

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from recshard_lab.comm.failing import cpu_backend
from recshard_lab.comm.groups import ShardingEnv, group_among, subgroups

DEVICE_VARIABLE = "RECSHARD_DEVICE"
"""The launcher's variable for the device of each rank, such as "cuda:0"."""
TIMES_VARIABLE = "RECSHARD_TIMES_NOTE"
"""The launcher's variable for what to print beside times that ranks measure."""


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
    """Default device of a model over these ranks: this rank's GPU with NCCL, otherwise the launched rank's device.

    Ranks that share a GPU exchange its tensors with Gloo, so the backend alone does not give their device.
    """
    if uses_nccl(env):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))


def times_note() -> str:
    """What to print beside times that this rank measures: empty unless it shares a GPU with other launched ranks."""
    return os.environ.get(TIMES_VARIABLE, "")


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
    (group,) = subgroups(env.pg, "host", lambda: (group_among(env.pg, [range(env.world_size)], "gloo"),))
    return replace(env, pg=group)


def sizes_env(env: ShardingEnv) -> ShardingEnv:
    """Like `host_env`, over connections of which messages of rows make no use.

    So a rank that skips messages of rows, and sends sizes, cannot be mistaken for one that sends rows. Gloo ends the
    process that receives more bytes than it expects. One thread serves the connections of both: a second one would
    make every step about 4% slower on two CPU ranks.
    """
    host = host_env(env)
    if host is not env or env.pg is None:
        return host
    rows = cpu_backend(env)

    def create() -> tuple[Any, ...]:
        if not isinstance(rows, dist.ProcessGroupGloo):
            return (env.twin().pg,)
        if _BESIDE.upper() not in dir(dist.Backend):
            dist.Backend.register_backend(_BESIDE, _gloo_beside, extended_api=True, devices=["cpu"])
        return (group_among(env.pg, [range(env.world_size)], _BESIDE, rows),)

    (group,) = subgroups(env.pg, "sizes", create)
    return replace(env, pg=group)


_BESIDE = "gloo_beside"


def _gloo_beside(asked: Any, other: Any) -> Any:
    """A Gloo backend whose connections are served by the thread of another one."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = other.options._devices, 1, asked.timeout
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)
