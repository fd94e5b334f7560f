"""Which devices a process group carries tensors of, and by which backend.

``torch.distributed.get_backend`` returns ``"cpu:gloo,cuda:nccl"`` for a group that was made that way, never
``"nccl"``. Everything that depends on the backend asks here.
"""

from typing import Any

import torch
import torch.distributed as dist

from recshard_lab.comm.groups import ShardingEnv


def backends_of(pg: Any) -> dict[str, str]:
    """Device type -> backend, such as ``{"cpu": "gloo", "cuda": "nccl"}``; empty without a process group."""
    if pg is None:
        return {}
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(pg).split(","))


def uses_nccl(env: ShardingEnv) -> bool:
    """Whether tensors on a GPU travel over NCCL.

    >>> uses_nccl(ShardingEnv.from_local(1, 0))
    False
    """
    return backends_of(env.pg).get("cuda") == "nccl"


def compute_device(env: ShardingEnv) -> torch.device:
    """Where a model over these ranks is placed by default: this rank's GPU with NCCL, the CPU otherwise."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl(env) else torch.device("cpu")


def message_device(env: ShardingEnv) -> torch.device:
    """Where messages are placed that the host writes and reads: the CPU if the group carries it, else this rank's GPU.

    The answer depends on the group alone, never on a batch, so that all ranks use one backend for one message.
    """
    carried = backends_of(env.pg)
    return compute_device(env) if carried and "cpu" not in carried else torch.device("cpu")
