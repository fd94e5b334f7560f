"""One script for every way to start it: alone, under ``torchrun``, and on ranks launched from a notebook."""

from __future__ import annotations

import json
import os
import socket
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..interrupts import uninterrupted
from ..sockets import interface_of, loopback, loopback_interface, plain, route_to, watch_hosts
from .devices import DEVICE_VARIABLE, choose, rank_variables, shares_by_default, visible_gpus
from .errors import LaunchError
from .seeds import check_seed, seed_rank

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "join", "network"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks. Nodes are numbered from 0; the ranks of a node are consecutive."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    device: torch.device


@contextmanager
def join(
    backend: str | None = None,
    *,
    share_gpu: bool = False,
    devices: str | Sequence[int | str] | None = None,
    seed: int | None = None,
) -> Iterator[Place]:
    """Provides the default process group inside the block, however this process was started.

    - On launched ranks (`launch`, ``%recshard_launch``) the group exists already. It is used, and left as it is.
    - Under ``torchrun`` the group is made from the environment variables, and destroyed at the end.
    - A process started by itself is a world of one rank.

    If all ranks are on one host, Gloo and NCCL use the loopback interface. Otherwise Gloo uses the interface that leads
    to the other hosts. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME override both.

    On several hosts, a host counts as lost if it acknowledges nothing for 20 s. Connections to it are then closed, and
    waits for its ranks raise an error.

    Args:
        backend: ``gloo``, ``nccl`` or None, as of `launch`, for the ranks and GPUs of this node. An NCCL group has Gloo
            for CPU tensors. If GPUs stay unused, local rank 0 emits a RuntimeWarning.
        share_gpu: as of `launch`: several ranks may compute on one GPU.
        devices: as of `launch`: the GPUs of this node to use.
        seed: as of `launch`: seeds this process when the block begins, on launched ranks too. None: random generators
            stay as they are.

    Raises:
        LaunchError: some of torchrun's variables are missing, the backend is not possible here, or no interface leads
            to the other hosts.

    >>> import torch.distributed as dist
    >>> with join() as place:
    ...     place.rank, place.world_size, dist.get_world_size()
    (0, 1, 1)
    """
    with uninterrupted():
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore
        from torch.distributed.rendezvous import rendezvous

    check_seed("join", seed)
    if dist.is_initialized():
        place = _place(_present_device())
        _seed_if_requested(seed, place)
        yield place
        return
    present = [name for name in _NEEDED if name in os.environ]
    alone = not {"RANK", "WORLD_SIZE"} & set(present)
    if not alone and len(present) < len(_NEEDED):
        missing = ", ".join(name for name in _NEEDED if name not in present)
        raise LaunchError(
            f"{', '.join(present)} are set but not {missing}: torchrun sets all of them. "
            f"Fix: start the script with torchrun or with plain python, or set {missing}."
        )
    local_size = 1 if alone else int(os.environ["LOCAL_WORLD_SIZE"])
    local_rank = 0 if alone else int(os.environ["LOCAL_RANK"])
    gpus = visible_gpus()
    choice = choose(
        f"join(LOCAL_WORLD_SIZE={local_size}",
        local_size,
        backend,
        share_gpu or shares_by_default(backend, devices, gpus),
        devices,
        gpus=gpus,
        owner="this node",
        count="LOCAL_WORLD_SIZE",
    )
    if choice.notice and local_rank == 0:
        warnings.warn(choice.notice, RuntimeWarning, stacklevel=3)
    of_rank = rank_variables(choice.devices, local_rank)
    device = torch.device(of_rank[DEVICE_VARIABLE])
    if alone:
        store, rank, world_size = HashStore(), 0, 1
        hosts: dict[str, str] = {}
        variables = _unset(loopback_interface())
    else:
        store, rank, world_size = next(rendezvous("env://"))
        hosts, variables = network(store, rank, world_size, os.environ["MASTER_ADDR"])
    with _environment(variables | of_rank):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backends = "gloo" if choice.backend == "gloo" else "cpu:gloo,cuda:nccl"
        watch_hosts(hosts)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size)
        try:
            place = _place(device)
            _seed_if_requested(seed, place)
            yield place
        finally:
            if dist.is_initialized():  # the script may have destroyed it itself
                dist.destroy_process_group()
            watch_hosts({})


def _place(device: torch.device) -> Place:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    node = int(os.environ.get("GROUP_RANK", rank // local_size))
    return Place(rank, size, local_rank, local_size, node, device)


def _seed_if_requested(seed: int | None, place: Place) -> None:
    if seed is not None:
        seed_rank(seed, place.rank)


def _present_device() -> torch.device:
    """The device of a rank whose group exists: the launcher's choice, otherwise by the group's backend."""
    import torch

    from .groups import uses_nccl

    if DEVICE_VARIABLE in os.environ:
        return torch.device(os.environ[DEVICE_VARIABLE])
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl() else torch.device("cpu")


def network(store: Any, rank: int, world_size: int, master: str) -> tuple[dict[str, str], dict[str, str]]:
    """Exchanges through the store what each rank knows of its host.

    Args:
        master: name or address of the host that serves the store.

    Returns:
        Address -> name of every other host, and the variables that name this rank's network interfaces.
    """
    addresses = {plain(entry.address) for entries in psutil.net_if_addrs().values() for entry in entries}
    own = {
        "host": _host_id(),
        "name": socket.gethostname(),
        "source": route_to(master),
        "addresses": sorted(address for address in addresses if not loopback(address)),
    }
    keys = [f"recshard_lab/host/{number}" for number in range(world_size)]
    store.set(keys[rank], json.dumps(own))
    store.wait(keys)
    places = [json.loads(place) for place in store.multi_get(keys)]
    others = [place for place in places if place["host"] != own["host"]]
    if not others:
        return {}, _unset(loopback_interface())
    sources = [own["source"], *(place["source"] for place in others)]
    reachable = [address for address in sources if not loopback(address)]
    if not reachable and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise LaunchError(
            f"the ranks are on several hosts, and all of these reach {master!r} over loopback: the interface between "
            "the hosts is unknown. Fix: set GLOO_SOCKET_IFNAME on each host."
        )
    # a host's own name often resolves to loopback there: then the way to another host decides
    interface = interface_of(route_to(reachable[0])) if reachable else ""
    watched: dict[str, str] = {}
    for place in others:
        ranks = [str(number) for number, other in enumerate(places) if other["host"] == place["host"]]
        name = f"host {place['name']} (rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)})"
        watched |= dict.fromkeys(set(place["addresses"]) - set(own["addresses"]), name)
    return watched, _unset(interface, "GLOO_SOCKET_IFNAME")


def _host_id() -> str:
    """The same on all processes that share a loopback interface, and on no others."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return f"{socket.gethostname()} {uuid.getnode()}"


def _unset(interface: str, *names: str) -> dict[str, str]:
    """The variables among `names` that have no value yet, with `interface`."""
    chosen = names or ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in chosen if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables inside the block, and their former values after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
