"""Ranks on a Ray cluster: one actor a rank, the rank a process beside its actor (``pip install recshard-lab[ray]``).

Cells, calls, push and pull, output, displays, errors, deaths and all three stages of an interrupt are as with forked
ranks, because the same process stands at the end of the same three streams. What is different:

- A launch takes seconds (actors, interpreters, torch), and so does ``%recshard_restart``; a cell costs some
  milliseconds more, and large values go through Ray's object store.
- Nodes are the cluster's: as few machines as hold the ranks in equal shares; ``nodes=k`` asks for k machines, and gives
  virtual nodes where one machine has room for all. A link between real nodes cannot be emulated.
- Process groups meet at a TCP port of rank 0's machine, on its loopback interface when all ranks live there and on the
  address that Ray knows it by otherwise. Ray itself, even on one machine, listens on every interface; since 2.60 it
  asks whoever connects for a token unless told otherwise (RAY_AUTH_MODE).
- Ranks find recshard_lab, and the modules you wrote, only where their machine has them; what the notebook defines
  travels. Their variables are their machine's, with torchrun's added.
- Ray kills ranks without asking when a machine runs short of memory; that is a death like any other, but only the
  signal is known. When a machine or an actor is lost, so is the exit code.
- Stopping ranks leaves Ray running, whoever started it, until the notebook's kernel ends.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from .engine import Ending, OnExit
from .ray_actor import RankActor

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["RayEngine", "cluster_backend"]

PLACE_S = 30.0  # for Ray to reserve what the ranks need
KNOCK_S = 5.0  # for a cluster's port to answer
ACTORS_S = 120.0  # for the actors to be up


def connected(address: str | None) -> Any:
    """The ray module, connected: to `address`, to the cluster at hand, or to one started on this machine alone."""
    try:
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
    """OSError where nobody listens at ``host:port``: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def machines(ray: Any) -> list[dict[str, float]]:
    """The resources of each machine of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cluster_backend(address: str | None, backend: str | None, world_size: int) -> str:
    """``gloo`` or ``nccl``; None takes NCCL where the cluster has a GPU for each rank."""
    gpus = int(sum(machine.get("GPU", 0) for machine in machines(connected(address))))
    if backend == "nccl" and gpus < world_size:
        raise LaunchError(
            f"launch(n={world_size}, backend='nccl', engine='ray'): NCCL needs one GPU a rank and the cluster has "
            f"{gpus}. Fix: backend='gloo'."
        )
    return backend or ("nccl" if gpus >= world_size else "gloo")


def layout(shape: Shape, available: Sequence[dict[str, float]]) -> int:
    """On how many machines the ranks go, an equal share on each; raises LaunchError when they do not fit."""

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
    wanted = divisors if shape.nodes == 1 else [hosts for hosts in (shape.nodes, 1) if hosts in divisors]
    for hosts in wanted:
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
    """One world's reservation and actors."""

    def __init__(self, shape: Shape) -> None:
        self._ray = ray = connected(shape.address)
        hosts = layout(shape, machines(ray))
        self.shape = replace(shape, hosts=hosts, nodes=hosts if hosts > 1 else shape.nodes)
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
        if self.shape.hosts > 1:
            variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = self._places[rank][1]
        if self.shape.backend == "nccl":  # Ray shows each actor its own GPU; ranks count those of their node
            local = self.shape.world_size // self.shape.hosts
            first = rank // local * local
            lent = [gpu for place in self._places[first : first + local] for gpu in place[2]]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(lent)
        return RayRank(self._ray, self._actors[rank], {**spec, "variables": variables}, fds, on_exit)

    def close(self) -> None:
        """Ends the actors and gives the reservation back."""
        with suppress(Exception):  # Ray was shut down, or its cluster is gone, and they with it
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
    """A rank behind an actor: two threads carry what passes between it and the launcher's descriptors."""

    def __init__(self, ray: Any, actor: Any, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> None:
        self._ray, self._actor, self._on_exit = ray, actor, on_exit
        self._control = socket.socket(fileno=os.dup(fds[0]))
        self._streams = {"stdout": os.dup(fds[1]), "stderr": os.dup(fds[2])}
        self._started = actor.start.remote(spec)
        self._pid = 0
        self._known, self._over = threading.Event(), False
        for work, name in ((self._hear, "hear"), (self._tell, "tell")):
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

    def _hear(self) -> None:
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
            ending = "was let go"  # the launcher closed its ends
        except Exception as error:  # of Ray's many
            ending = f"was lost with its Ray actor ({first_line(error)})"
        self._over = True
        self._known.set()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes the other thread
        for fd in self._streams.values():
            os.close(fd)
        self._on_exit(ending)

    def _tell(self) -> None:
        write = self._actor.write.options(concurrency_group="write")
        with suppress(Exception):  # the actor's end is heard of in the other thread
            self._ray.get(self._started)
            while data := self._control.recv(1 << 20):
                self._ray.get(write.remote(data))  # one at a time: order matters
            if not self._over:
                self._actor.hang_up.remote()
        self._control.close()


def write_all(fd: int, data: bytes) -> None:
    """Every byte, however full the pipe is."""
    while data:
        data = data[os.write(fd, data) :]


def first_line(error: Exception) -> str:
    """What an exception says, without Ray's pages after it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
