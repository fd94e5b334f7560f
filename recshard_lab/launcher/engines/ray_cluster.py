"""Ranks on a Ray cluster: one actor per rank, and the rank as a process beside it (``pip install recshard-lab[ray]``).

Cells, calls, push and pull, output, displays, errors, deaths and all three stages of an interrupt work as with forked
ranks. The differences:

- A launch and ``%recshard_restart`` take seconds (actors, interpreters, torch). A cell takes a few milliseconds more.
  Large values pass through Ray's object store.
- Nodes are the cluster's machines: the fewest that hold the ranks in equal shares. ``nodes=k`` requests k machines. If
  one machine has room for all ranks and there are not k, nodes are virtual. A link between machines is not emulated.
- Process groups meet at a TCP port of rank 0's machine. If all ranks are on one machine, ranks use its loopback
  interface. Otherwise they use the interface that leads to the other machines.
- Ray itself listens beyond loopback. With RAY_AUTH_MODE=token every connection to it needs a token.
- Ranks import recshard_lab, and modules that you wrote, from their own machine. What the notebook defines is sent to
  them. Their environment variables are those of their machine, and torchrun's.
- Ray kills ranks if a machine runs short of memory. Such a death is reported with its signal. If a machine or an actor
  is lost, its ranks' exit codes are unknown.
- Ray keeps running when ranks stop. A cluster that `launch` has started ends with the notebook's kernel.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...interrupts import uninterrupted
from ..errors import LaunchError
from .engine import Ending, OnExit
from .ray_actor import RankActor

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["RayEngine", "cluster_gpus"]

PLACE_S = 30.0  # for Ray to reserve the resources of the ranks
KNOCK_S = 5.0  # for a cluster's port to answer
ACTORS_S = 120.0  # for the actors to start


def connected(address: str | None) -> Any:
    """The ray module, connected to `address`, to the cluster of RAY_ADDRESS, or to a new one on this machine."""
    try:
        with uninterrupted():
            import ray
    except ImportError:
        raise LaunchError("launch(engine='ray') needs Ray. Fix: pip install 'recshard-lab[ray]'.") from None
    if ray.is_initialized():
        known = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", known):
            raise LaunchError(
                f"launch(engine='ray', address={address!r}): this process is connected to the Ray cluster at {known}. "
                "Fix: leave out address, or call ray.shutdown() first."
            )
        return ray
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None and "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", include_dashboard=False, **quiet)
        return ray
    try:
        knock(address or os.environ["RAY_ADDRESS"])
        ray.init(address=address or os.environ["RAY_ADDRESS"], **quiet)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"launch(engine='ray', address={address!r}): no Ray cluster answers there ({error}). "
            "Fix: start one with `ray start --head`, or leave out address to start one on this machine."
        ) from None
    return ray


def knock(address: str) -> None:
    """Raises OSError if nothing listens at ``host:port``. Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def machines(ray: Any) -> list[dict[str, float]]:
    """The resources of each machine of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cluster_gpus(address: str | None) -> tuple[str, ...]:
    """The GPUs of all machines of the cluster, which Ray assigns to ranks."""
    count = int(sum(machine.get("GPU", 0) for machine in machines(connected(address))))
    return tuple(f"cuda:{index}" for index in range(count))


def layout(shape: Shape, available: Sequence[dict[str, float]]) -> int:
    """The number of machines for the ranks, an equal share on each. Raises LaunchError if they do not fit."""

    def fits(hosts: int) -> bool:
        share = shape.world_size // hosts
        enough = [
            machine
            for machine in available
            if machine.get("CPU", 0) >= share * shape.threads
            and (shape.backend != "nccl" or machine.get("GPU", 0) >= share)
        ]
        return len(enough) >= hosts

    divisors = [hosts for hosts in range(1, len(available) + 1) if shape.world_size % hosts == 0]
    candidates = divisors if shape.nodes == 1 else [hosts for hosts in (shape.nodes, 1) if hosts in divisors]
    for hosts in candidates:
        if fits(hosts):
            if hosts > 1 and shape.link:
                raise LaunchError(
                    f"launch(nodes={shape.nodes}, engine='ray'): the nodes are machines of the cluster, and the link "
                    "between real machines cannot be emulated. Fix: leave out inter_node_latency_ms and "
                    "inter_node_gbps."
                )
            return hosts
    has = ", ".join(f"{machine.get('CPU', 0):g} CPUs {machine.get('GPU', 0):g} GPUs" for machine in available)
    raise LaunchError(
        f"launch(n={shape.world_size}, nodes={shape.nodes}, threads={shape.threads}, engine='ray'): no equal shares of "
        f"ranks fit the cluster's machines ({has}); a rank takes {shape.threads} CPU"
        f"{' and a GPU' if shape.backend == 'nccl' else ''}. Fix: fewer ranks, or more machines."
    )


class RayEngine:
    """The reservation and actors of one world."""

    def __init__(self, shape: Shape) -> None:
        self._ray = ray = connected(shape.address)
        hosts = layout(shape, machines(ray))
        local = shape.world_size // hosts
        devices = tuple(f"cuda:{rank % local}" for rank in range(shape.world_size)) if shape.backend == "nccl" else ()
        self.shape = replace(shape, hosts=hosts, nodes=hosts if hosts > 1 else shape.nodes, devices=devices)
        self._actors: list[Any] = []
        self._group = ray.util.placement_group(
            [self._share(shape.world_size // hosts)] * hosts, strategy="STRICT_SPREAD" if hosts > 1 else "PACK"
        )
        try:
            if not self._group.wait(PLACE_S):
                raise LaunchError(
                    f"launch(n={shape.world_size}, engine='ray'): the cluster is large enough, but {PLACE_S:g} s were "
                    f"not enough to get its resources: now free are {ray.available_resources().get('CPU', 0):g} CPUs. "
                    "Fix: end other work on the cluster, or fewer ranks."
                )
            self._actors = [self._actor(rank) for rank in range(shape.world_size)]
            self._places = ray.get([actor.place.remote() for actor in self._actors], timeout=ACTORS_S)
            host = self._places[0][0] if hosts > 1 else "127.0.0.1"
            self._store = f"tcp://{host}:{ray.get(self._actors[0].listen.remote(host))}"
        except ray.exceptions.RayError as error:
            self.close()
            raise LaunchError(f"launch(engine='ray'): the ranks' actors did not start.\n{error}") from None
        except BaseException:
            self.close()
            raise

    def store(self, generation: int) -> str:
        return f"{self._store}/{generation}"

    def start(self, rank: int, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> RayRank:
        variables = dict(spec["variables"])
        if self.shape.hosts > 1:  # a rank chooses the interface that leads to the other machines
            del variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]
        if self.shape.backend == "nccl":  # Ray shows each actor its own GPU; ranks count those of their node
            local = self.shape.world_size // self.shape.hosts
            first = rank // local * local
            lent = [gpu for place in self._places[first : first + local] for gpu in place[1]]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(lent)
        return RayRank(self._ray, self._actors[rank], {**spec, "variables": variables}, fds, on_exit)

    def close(self) -> None:
        """Ends the actors and releases the reservation."""
        with suppress(Exception):  # Ray was shut down, or its cluster has ended
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)

    def _share(self, ranks: int) -> dict[str, float]:
        share = {"CPU": float(ranks * self.shape.threads)}
        return {**share, "GPU": float(ranks)} if self.shape.backend == "nccl" else share

    def _actor(self, rank: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank // (self.shape.world_size // self.shape.hosts)
        )
        remote = self._ray.remote(concurrency_groups={"read": 1, "write": 1})(RankActor)
        return remote.options(
            num_cpus=self.shape.threads,
            num_gpus=1 if self.shape.backend == "nccl" else 0,
            scheduling_strategy=strategy,
        ).remote()


class RayRank:
    """A rank behind an actor. Two threads carry data between the actor and the launcher's descriptors."""

    def __init__(self, ray: Any, actor: Any, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> None:
        self._ray, self._actor, self._on_exit = ray, actor, on_exit
        self._control = socket.socket(fileno=os.dup(fds[0]))
        self._streams = {"stdout": os.dup(fds[1]), "stderr": os.dup(fds[2])}
        self._started = actor.start.remote(spec)
        self._pid = 0
        self._known, self._over = threading.Event(), False
        for work, name in ((self._receive, "receive"), (self._send, "send")):
            threading.Thread(target=work, name=f"recshard-ray-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        self._known.wait()
        return self._pid

    def kill(self, number: int) -> None:
        if not self._over:
            self._actor.kill.remote(int(number))

    def memory_bytes(self) -> int:
        if self._over:
            return 0
        with suppress(self._ray.exceptions.RayError):
            return int(self._ray.get(self._actor.memory_bytes.remote(), timeout=5))
        return 0

    def _receive(self) -> None:
        ending: Ending = "was lost"
        try:
            self._pid = self._ray.get(self._started)
            self._known.set()
            read = self._actor.read.options(concurrency_group="read")
            while not self._over:
                for stream, data in self._ray.get(read.remote()):
                    if stream == "exit":
                        ending, self._over = data, True
                    elif stream == "control":
                        self._control.sendall(data)
                    else:
                        write_all(self._streams[stream], data)
        except OSError:
            ending = "was let go"  # the launcher closed its descriptors
        except Exception as error:  # of Ray's many
            ending = f"was lost with its Ray actor ({first_line(error)})"
        self._over = True
        self._known.set()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes the other thread
        for fd in self._streams.values():
            os.close(fd)
        self._on_exit(ending)

    def _send(self) -> None:
        write = self._actor.write.options(concurrency_group="write")
        with suppress(Exception):  # the other thread reports the end of the actor
            self._ray.get(self._started)
            while data := self._control.recv(1 << 20):
                self._ray.get(write.remote(data))  # one at a time: order matters
            if not self._over:
                self._actor.hang_up.remote()
        self._control.close()


def write_all(fd: int, data: bytes) -> None:
    """Writes all bytes, and waits while the pipe is full."""
    while data:
        data = data[os.write(fd, data) :]


def first_line(error: Exception) -> str:
    """The first line of an exception's text; Ray's continue for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
