"""A rank's process groups: made, cut while stuck, and put right again inside the same objects.

A collective that waits for a rank which will never come is freed by closing the TCP connections of the
group from a side thread of the *same* process: the wait then ends with an error, whoever holds the group.
(Aborting or destroying the group does not do it while a model, DDP for one, still holds the group.)

Afterwards every ProcessGroup drops its backends and gets fresh ones. The ProcessGroup object stays the one that models
hold, so they go on working, however often this happens.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from .stores import is_store_port, open_store, space_needed, spans_hosts

__all__ = ["Cable", "cables", "connect", "cut", "group_count", "group_names", "rebuild", "reconnect"]

Cable = tuple[tuple[str, int], tuple[str, int]]  # (this end, the other end) of a TCP connection

TIMEOUT = timedelta(minutes=30)
_VALUE_AT = 16  # in a Python object of pybind11: the address of its C++ object


def connect(store_path: str, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    """Joins the default group through a store (a file, for which no port is opened) and proves it by an all_reduce."""
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    with space_needed(store_path):
        store = open_store(store_path, world_size)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    prove(world_size, device)


def prove(world_size: int, device: torch.device) -> None:
    """One real all_reduce, and its result checked."""
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if int(total.item()) != world_size:
        raise RuntimeError(f"the first all_reduce gave {total.item()}, expected {world_size}")


def uses_nccl() -> bool:
    """Whether the default group carries GPU tensors over NCCL. `comm.uses_nccl` is the same for any group."""
    return "cuda:nccl" in dist.get_backend_config().split(",")


def cables() -> list[Cable]:
    """The TCP connections of this process that may lead to another rank: on one host, those on loopback."""
    found = []
    for sock in _tcp_sockets():
        with sock:
            try:
                here, there = sock.getsockname(), sock.getpeername()
            except OSError:
                continue  # listening, or closed already
            local = here[0] in ("127.0.0.1", "::1") and there[0] == here[0]
            if (local or spans_hosts()) and not is_store_port(here[1]) and not is_store_port(there[1]):
                found.append(((here[0], here[1]), (there[0], there[1])))
    return found


def cut(chosen: Collection[Cable]) -> int:
    """Closes the connections named, under whoever waits on them; NCCL groups are aborted. Returns how many."""
    count = 0
    for sock in _tcp_sockets():
        with sock:
            try:
                here, there = sock.getsockname()[:2], sock.getpeername()[:2]
                if (here, there) in chosen:
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:
                continue
    for group in _groups():
        backend = _backend_on(group, "cuda")
        if backend is not None:
            backend.abort()
    return count


def _tcp_sockets() -> list[socket.socket]:
    sockets = []
    for name in os.listdir("/dev/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:  # not a socket
            os.close(copy)
            continue
        if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
            sockets.append(sock)
        else:
            sock.close()
    return sockets


def _groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []


def group_names() -> dict[str, list[int]]:
    """Name -> global ranks of every group this rank is in; the default group first."""
    return {group.group_name: group_members(group) for group in _groups()}


def group_members(group: Any) -> list[int]:
    """The global ranks of a group, in its own order."""
    ranks: Mapping[int, int] = dist.distributed_c10d._world.pg_group_ranks[group]
    return sorted(ranks, key=ranks.__getitem__)


def _backend_on(group: Any, device: str) -> Any | None:
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def rebuild(store_path: str, names: Sequence[str], group_count: int, device: torch.device) -> None:
    """Gives the groups named a fresh backend each, in place, and proves the default one by an all_reduce.

    group_count: torch's counter that names the next group, brought to the same value on every rank.
    """
    world = dist.distributed_c10d._world
    with space_needed(store_path):
        store = open_store(store_path, dist.get_world_size())
    by_name = {group.group_name: group for group in _groups()}
    for name in names:
        group = by_name[name]
        with space_needed(store_path):
            fresh = _fresh_backends(group, name, store)
        _drop_backends(group)
        for place, (kind, backend) in fresh.items():
            group._register_backend(torch.device(place), kind, backend)
        group._set_group_name(name)  # also the name under which torch records the new backend's collectives
    world.group_count = group_count
    prove(dist.get_world_size(), device)


def _fresh_backends(group: Any, name: str, store: Store) -> dict[str, tuple[Any, Any]]:
    """Device type -> (BackendType, new backend) for each that `group` has; device types of one backend share it."""
    kinds = dist.ProcessGroup.BackendType
    made: dict[Any, Any] = {}
    fresh = {}
    for place in ("cpu", "cuda"):
        old = _backend_on(group, place)
        if old is None:
            continue
        kind = kinds.GLOO if isinstance(old, dist.ProcessGroupGloo) else kinds.NCCL
        if kind not in made:
            prefixed = PrefixStore(f"{name}/{place}", store)
            if kind == kinds.GLOO:
                made[kind] = dist.ProcessGroupGloo(prefixed, group.rank(), group.size(), TIMEOUT)
            else:
                made[kind] = dist.ProcessGroupNCCL(prefixed, group.rank(), group.size(), old.options)
        fresh[place] = kind, made[kind]
    return fresh


def _drop_backends(group: Any) -> None:
    """Closes the connections and threads of a ProcessGroup, as its destructor would, and keeps the ProcessGroup.

    torch registers one backend for each BackendType and device and never replaces it. Its own
    `ProcessGroup::release_resources` clears that register, and Python cannot reach it but through the C++ symbol.
    """
    library = ctypes.CDLL(torch._C.__file__)  # dlsym searches the libraries that it links, as well
    address = ctypes.c_void_p.from_address(id(group) + _VALUE_AT).value
    methods = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZTVN4c10d12ProcessGroupE")) + 2 * ctypes.sizeof(
        ctypes.c_void_p
    )
    if not address or ctypes.c_void_p.from_address(address).value != methods:
        raise RuntimeError(f"torch {torch.__version__} lays out a ProcessGroup in an unknown way; restart the ranks")
    release = library._ZN4c10d12ProcessGroup17release_resourcesEv
    release.argtypes, release.restype = [ctypes.c_void_p], None
    release(address)


def reconnect(store_path: str, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    """The default group from nothing, where a cell destroyed it on some rank; older groups are lost."""
    if dist.is_initialized():
        dist.destroy_process_group()
    connect(store_path, rank, world_size, backend, device)


def group_count() -> int:
    """How many groups this rank has named so far."""
    return int(dist.distributed_c10d._world.group_count)


def issue_counts() -> tuple[int, ...]:
    """Numbers of which one changes whenever anything is sent over a group of this process."""
    backends = [_backend_on(group, place) for group in _groups() for place in ("cpu", "cuda")]
    return tuple(backend._get_sequence_number_for_group() for backend in backends if backend is not None)
