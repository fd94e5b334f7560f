"""``torchrec.distributed.comm``: nodes of the launcher, and process groups inside and across them."""

from __future__ import annotations

import os
from typing import Any

import torch

from recshard_lab.comm import ShardingEnv, get_local_size
from recshard_lab.compat.distributed.types import ShardingEnv2D


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """The node of a rank.

    Args:
        world_size, rank: default: those of the default process group.

    >>> get_group_rank(1, 0)
    0
    """
    return (ShardingEnv.default().rank if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Nodes of the ranks.

    >>> get_num_groups(1)
    1
    """
    world = ShardingEnv.default().world_size if world_size is None else world_size
    return world // get_local_size(world)


def get_node_group_size(world_size: int | None = None) -> int:
    """Ranks that count as a node: ``NODE_GROUP_SIZE`` of the environment, otherwise those of a node."""
    return int(os.environ.get("NODE_GROUP_SIZE") or get_local_size(world_size))


def get_topology_domain_multiple() -> int | None:
    """Nodes that fast links join: ``TOPOLOGY_DOMAIN_MULTIPLE`` of the environment, or None."""
    value = os.environ.get("TOPOLOGY_DOMAIN_MULTIPLE")
    return int(value) if value else None


def get_topology_group_world_size(world_size: int | None = None) -> int:
    """Ranks that fast links join: those of a node, times `get_topology_domain_multiple`."""
    return get_local_size(world_size) * (get_topology_domain_multiple() or 1)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[Any | None, Any | None]:
    """(ranks of this node, ranks with this local rank on every node), as process groups. Collective.

    Args:
        device: None for the ``meta`` device, which has no groups.
        backend: that of the default process group; another one is refused.

    Raises:
        ValueError: another backend.
    """
    if device is not None and device.type == "meta":
        return None, None
    _check_backend(backend)
    intra, inter = ShardingEnv.default().node_envs()
    return intra.pg, inter.pg


def _check_backend(backend: str | None) -> None:
    from torch import distributed as dist

    own = dist.get_backend() if dist.is_initialized() else None
    if backend is not None and own is not None and backend not in own:
        raise ValueError(
            f"backend={backend!r} is not that of the default process group ({own}). Fix: omit it, or pass "
            f"backend={own!r}"
        )


def intra_and_cross_node_pg_2D(env: ShardingEnv2D, device: torch.device | None = None) -> tuple[Any | None, Any | None]:
    """The same inside a sharding group, whose nodes are ``env.node_group_size`` of its ranks. Collective.

    Args:
        env: the sharding group.
        device: None for the ``meta`` device, which has no groups.
    """
    if device is not None and device.type == "meta":
        return None, None
    intra, inter = env.node_envs()
    return intra.pg, inter.pg
