"""Process groups of a rank: creates them, ends their stuck collectives, and repairs them in place.

A collective that waits for a failed rank is ended by closing the TCP connections of its group from a side thread of
the *same* process. The wait then raises. Aborting or destroying the group has no effect while a model, such as DDP,
holds a reference to it.

Afterwards every ProcessGroup drops its backends and gets new ones. The ProcessGroup object stays the same, so models
that hold it keep working.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore

from ..sockets import tcp_sockets, watch_hosts
from .errors import SPACE, LaunchError
from .joining import network

__all__ = [
    "Cable",
    "cables",
    "connect",
    "cut",
    "group_count",
    "group_names",
    "host_store",
    "is_store_port",
    "open_store",
    "rebuild",
    "reconnect",
    "space_needed",
    "spans_hosts",
]

Cable = tuple[tuple[str, int], tuple[str, int]]  # (this end, the other end) of a TCP connection

TIMEOUT = timedelta(minutes=30)
_VALUE_AT = 16  # in a Python object of pybind11: the address of its C++ object


def connect(store_path: str, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    """Joins the default group through a store (a file, which needs no port) and checks it with an all_reduce."""
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    with space_needed(store_path):
        store = open_store(store_path, world_size)
        if spans_hosts():
            hosts, variables = network(store, rank, world_size, str(urlsplit(store_path).hostname))
            os.environ.update(variables)
            watch_hosts(hosts)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    prove(world_size, device)


def prove(world_size: int, device: torch.device) -> None:
    """Runs one all_reduce and checks its result."""
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if int(total.item()) != world_size:
        raise RuntimeError(f"the first all_reduce returned {total.item()}, the world size is {world_size}")


def uses_nccl() -> bool:
    """Whether the default group carries GPU tensors over NCCL. `comm.uses_nccl` is the same for any group."""
    return "cuda:nccl" in dist.get_backend_config().split(",")


def waits_end_silently() -> bool:
    """Whether `cut` ends waits without an error: the host waits for a GPU's stream, which goes on after NCCL's abort.

    The rank must then be interrupted, or its cell would continue with numbers that never arrived.
    """
    return dist.is_initialized() and uses_nccl()


def cables() -> list[Cable]:
    """The TCP connections of this process that may lead to another rank: on one host, those on loopback."""
    found = []
    for sock in tcp_sockets():
        with suppress(OSError):  # listening, or closed already
            here, there = sock.getsockname(), sock.getpeername()
            local = here[0] in ("127.0.0.1", "::1") and there[0] == here[0]
            if (local or spans_hosts()) and not is_store_port(here[1]) and not is_store_port(there[1]):
                found.append(((here[0], here[1]), (there[0], there[1])))
    return found


def cut(chosen: Collection[Cable]) -> int:
    """Closes these connections, also if a thread waits on them, and aborts NCCL groups. Returns their number."""
    count = 0
    for sock in tcp_sockets():
        with suppress(OSError):  # listening, or closed already
            if (sock.getsockname()[:2], sock.getpeername()[:2]) in chosen:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    for group in _groups():
        backend = _backend_on(group, "cuda")
        if backend is not None:
            backend.abort()
    return count


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
    """Device type -> (BackendType, new backend) for each that `group` has; device types of one backend share it.

    The BackendType is that under which torch registered the old one. Gloo under a name of ours is CUSTOM.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    made: dict[str, Any] = {}
    fresh = {}
    for place in ("cpu", "cuda"):
        old = _backend_on(group, place)
        if old is None:
            continue
        backend = backends[place]
        if backend not in made:
            prefixed = PrefixStore(f"{name}/{place}", store)
            if isinstance(old, dist.ProcessGroupGloo):
                made[backend] = dist.ProcessGroupGloo(prefixed, group.rank(), group.size(), TIMEOUT)
            else:
                made[backend] = dist.ProcessGroupNCCL(prefixed, group.rank(), group.size(), old.options)
        fresh[place] = dist.Backend.backend_type_map[backend], made[backend]
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
    """Creates the default group again after a cell destroyed it on a rank. Other groups are lost."""
    if dist.is_initialized():
        dist.destroy_process_group()
    connect(store_path, rank, world_size, backend, device)


def group_count() -> int:
    """How many groups this rank has named so far."""
    return int(dist.distributed_c10d._world.group_count)


def issue_counts() -> tuple[int, ...]:
    """Sequence numbers of all groups. At least one changes with every collective of this process."""
    backends = [_backend_on(group, place) for group in _groups() for place in ("cpu", "cuda")]
    return tuple(backend._get_sequence_number_for_group() for backend in backends if backend is not None)


TIMEOUT = timedelta(minutes=5)

_hosted: list[Store] = []  # the server lives as long as its store
_addresses: set[tuple[str, int]] = set()


def open_store(where: str, world_size: int) -> Store:
    """The store at `where`, a path or ``tcp://host:port/name``. Each name is a separate store on one server."""
    if not where.startswith("tcp://"):
        return FileStore(where, world_size)
    parts = urlsplit(where)
    assert parts.hostname is not None
    assert parts.port is not None
    _addresses.add((parts.hostname, parts.port))
    client = TCPStore(parts.hostname, parts.port, world_size, False, TIMEOUT)
    return PrefixStore(parts.path.strip("/"), client)


@contextmanager
def space_needed(where: str) -> Iterator[None]:
    """Turns a full disk into a LaunchError that names the folder of the store at `where`."""
    try:
        yield
    except DistStoreError as error:  # torch names no file
        if where.startswith("tcp://") or os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise LaunchError(
            f"{os.strerror(errno.ENOSPC)} in {os.path.dirname(where)}, where ranks meet. {SPACE}"
        ) from None


def host_store(listener: socket.socket) -> None:
    """Serves stores from this process on a socket that already listens."""
    host, port = listener.getsockname()[:2]
    server = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    _hosted.append(server)


def is_store_port(port: int) -> bool:
    """Whether a connection with this port at one end leads to a store, which outlives process groups."""
    return any(port == known for _, known in _addresses)


def spans_hosts() -> bool:
    """Whether ranks may be connected by more than the loopback interface."""
    return any(not host.startswith("127.") and host != "::1" for host, _ in _addresses)
