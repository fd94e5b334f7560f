"""One script for every way to start it: alone, under ``torchrun``, and on ranks launched from a notebook."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import LaunchError

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "join"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks. Ranks of one node are neighbours; node counts nodes from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    device: torch.device


@contextmanager
def join(backend: str | None = None) -> Iterator[Place]:
    """The default process group for what is inside, however this process was started.

    - On launched ranks (`launch`, ``%recshard_launch``) the group is there already: nothing is done, now or after.
    - Under ``torchrun`` the group is made from its environment, and destroyed at the end.
    - In a process started by itself it is a world of one.

    backend: ``gloo``, ``nccl`` or None: NCCL (with Gloo for CPU tensors) where this node has a GPU for each of its
    ranks, Gloo otherwise. Where all ranks live on one host their connections stay on the loopback interface, unless
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise.

    Raises LaunchError when torchrun's variables are there only in part, or the backend cannot be.

    >>> import torch.distributed as dist
    >>> with join() as place:
    ...     place.rank, place.world_size, dist.get_world_size()
    (0, 1, 1)
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        from .groups import uses_nccl

        yield _place(torch.device("cuda", torch.cuda.current_device()) if uses_nccl() else torch.device("cpu"))
        return
    given = [name for name in _NEEDED if name in os.environ]
    alone = not {"RANK", "WORLD_SIZE"} & set(given)
    if not alone and len(given) < len(_NEEDED):
        missing = ", ".join(name for name in _NEEDED if name not in given)
        raise LaunchError(
            f"{', '.join(given)} are set but not {missing}: not a whole environment of torchrun. "
            "Start the script with torchrun, with plain python, or set what is missing."
        )
    chosen = _chosen_backend(backend, 1 if alone else int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device("cpu") if chosen == "gloo" else _gpu()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backends = "gloo" if chosen == "gloo" else "cpu:gloo,cuda:nccl"
    with _loopback() if alone or _one_host() else nullcontext():
        if alone:
            dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backends, init_method="env://")
        try:
            yield _place(device)
        finally:
            if dist.is_initialized():  # the script may have destroyed it itself
                dist.destroy_process_group()


def _place(device: torch.device) -> Place:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    node = int(os.environ.get("GROUP_RANK", rank // local_size))
    return Place(rank, size, local_rank, local_size, node, device)


def _gpu() -> torch.device:
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _chosen_backend(backend: str | None, local_world_size: int) -> str:
    import torch

    if backend not in (None, "gloo", "nccl"):
        raise LaunchError(f"join(backend={backend!r}): expected 'gloo', 'nccl' or None.")
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < local_world_size:
        raise LaunchError(
            f"join(backend='nccl'): {local_world_size} ranks on this node and {gpus} GPUs. "
            "Fix: backend='gloo', or fewer ranks a node."
        )
    return backend or ("nccl" if gpus >= local_world_size else "gloo")


def _one_host() -> bool:
    """All ranks live here: torchrun has one node, or its nodes meet at a loopback address."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(os.environ["MASTER_ADDR"], None)}
    except OSError:  # init_process_group will say it better
        return False
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)


@contextmanager
def _loopback() -> Iterator[None]:
    """Gloo and NCCL on the loopback interface, unless the reader chose one."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    ours = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, interface))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
