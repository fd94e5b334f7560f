"""How many ranks, on how many nodes, over which backend: checked before any process starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cores import usable_cores
from .devices import TIMES_NOTE, checked_backend, choose, shared, shares_by_default, visible_gpus
from .engines import start_methods
from .errors import LaunchError
from .seeds import check_seed

__all__ = ["Shape"]

RANKS_PER_CORE = 8  # above it a launch is refused: steps would measure the scheduler, not the plan
MAX_RANKS = 64

LATENCY_VARIABLE = "RECSHARD_INTER_NODE_LATENCY_MS"  # read by `comm.wire` on the ranks
BANDWIDTH_VARIABLE = "RECSHARD_INTER_NODE_GBPS"


@dataclass(frozen=True)
class Shape:
    """The ranks of one launch. Node k has the ranks ``[k * local_world_size, (k + 1) * local_world_size)``."""

    world_size: int
    nodes: int
    backend: str  # "gloo" or "nccl"
    threads: int  # torch threads per rank
    engine: str = "fork"  # of `engines.ENGINES`
    inter_node_latency_ms: float | None = None  # of the emulated link between virtual nodes
    inter_node_gbps: float | None = None  # gigabits a second of each rank, each way
    address: str | None = None  # of a Ray cluster
    hosts: int = 1  # machines; above 1 they are the nodes, otherwise nodes are virtual
    devices: tuple[str, ...] = ()  # by rank: "cpu", "cuda:K" or the UUID of a MIG slice; () means "cpu" for all
    memory_gb: float | None = None  # device memory per rank, in 1e9 bytes; None: all there is
    seed: int | None = None  # of each rank's random numbers; None: others at each launch
    unused_gpus: str = field(default="", compare=False)  # why the ranks are on the CPU although there are GPUs

    def __post_init__(self) -> None:
        if not self.devices:
            object.__setattr__(self, "devices", ("cpu",) * self.world_size)

    @property
    def share_gpu(self) -> bool:
        """Whether several ranks compute on one GPU; Gloo then carries their tensors."""
        return shared(self.devices)

    @property
    def times_note(self) -> str:
        """What to print beside measured times; empty unless ranks share a GPU."""
        return TIMES_NOTE if self.share_gpu else ""

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.nodes

    def __str__(self) -> str:
        text = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self.nodes > 1:
            text += f" on {self.nodes} {'machines' if self.hosts > 1 else 'virtual nodes'}"
            text += f" ({self.link})" if self.link else ""
        text += f" over {self.backend}"
        if self.devices[0] != "cpu":
            text += f" on {', '.join(self.devices)}"
        if self.memory_gb is not None:
            text += f", {self.memory_gb:g} GB each"
        if self.seed is not None:
            text += f", seed {self.seed}"
        return text + (f", engine {self.engine}" if self.engine != "fork" else "")

    @property
    def link(self) -> str:
        """The emulated link between nodes in words; empty when there is none."""
        said = [] if self.inter_node_latency_ms is None else [f"{self.inter_node_latency_ms:g} ms"]
        said += [] if self.inter_node_gbps is None else [f"{self.inter_node_gbps:g} Gbit/s a rank"]
        return f"emulated link between them: {', '.join(said)}" if said else ""

    def variables(self) -> dict[str, str]:
        """What a rank reads the emulated link from; the launcher itself slows nothing."""
        values = {LATENCY_VARIABLE: self.inter_node_latency_ms, BANDWIDTH_VARIABLE: self.inter_node_gbps}
        return {name: repr(value) for name, value in values.items() if value is not None}

    @classmethod
    def checked(
        cls,
        world_size: int,
        nodes: int = 1,
        backend: str | None = None,
        threads: int = 1,
        start_method: str | None = None,
        *,
        inter_node_latency_ms: float | None = None,
        inter_node_gbps: float | None = None,
        engine: str | None = None,
        address: str | None = None,
        share_gpu: bool = False,
        devices: str | Sequence[int | str] | None = None,
        memory_gb: float | None = None,
        seed: int | None = None,
    ) -> Shape:
        """The shape, or a LaunchError that names the argument, its value and a fix."""
        for name, value in (("n", world_size), ("nodes", nodes), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LaunchError(f"launch({name}={value!r}): expected a whole number of at least 1.")
        check_seed("launch", seed)
        if world_size % nodes:
            fit = max(k for k in range(1, nodes + 1) if world_size % k == 0)
            raise LaunchError(
                f"launch(n={world_size}, nodes={nodes}): ranks do not divide evenly over nodes. "
                f"Fix: nodes={fit}, or n={world_size + nodes - world_size % nodes}."
            )
        link = checked_link(nodes, inter_node_latency_ms, inter_node_gbps)
        kind = checked_engine(engine, start_method, address)
        limit_gb = checked_memory(memory_gb)
        call, owner = f"launch(n={world_size}", "this machine"
        if kind == "ray":
            if share_gpu or devices is not None:
                name = "share_gpu" if share_gpu else "devices"
                raise LaunchError(
                    f"{call}, engine='ray', {name}={share_gpu or devices!r}): Ray assigns whole GPUs to ranks. "
                    f"Fix: leave out {name}."
                )
            call, owner = f"{call}, engine='ray'", "the cluster"
            checked_backend(call, backend)
            from .engines.ray_cluster import cluster_gpus

            gpus = cluster_gpus(address)
        else:
            gpus = visible_gpus()
            share_gpu = share_gpu or shares_by_default(backend, devices, gpus)
        choice = choose(call, world_size, backend, share_gpu, devices, gpus=gpus, owner=owner)
        cores = usable_cores()
        limit = min(MAX_RANKS, RANKS_PER_CORE * cores)
        if kind != "ray" and world_size > limit:
            raise LaunchError(
                f"launch(n={world_size}): more ranks than this machine can usefully share: {cores} "
                f"core{'s' if cores > 1 else ''} x {RANKS_PER_CORE} ranks a core, and never above {MAX_RANKS}, "
                f"allow {limit}. Fix: n={limit}."
            )
        return cls(
            world_size,
            nodes,
            choice.backend,
            threads,
            kind,
            *link,
            address=address,
            devices=choice.devices,
            memory_gb=limit_gb,
            seed=seed,
            unused_gpus=choice.notice,
        )

    def notice(self) -> str:
        """What a reader should know about these ranks on this machine, one fact per line; empty if nothing."""
        lines = [line for line in (self.unused_gpus, self.times_note) if line]
        cores = usable_cores()
        if self.engine != "ray" and self.backend == "gloo" and self.world_size * self.threads > cores:
            lines.append(
                f"{self.world_size} ranks x {self.threads} thread{'s' if self.threads > 1 else ''} share {cores} "
                f"core{'s' if cores > 1 else ''}: results are exact, times include waiting for a core."
            )
        if self.link:
            lines.append(
                "The link between nodes is emulated: exchanges of embeddings that cross nodes are made to wait as "
                "long as such a link would take; DistributedDataParallel's all-reduce and your own collectives are not."
            )
        return "\n".join(lines)


def checked_engine(engine: str | None, start_method: str | None, address: str | None) -> str:
    """One of `ENGINES`: the requested one, otherwise the default of this system."""
    methods = start_methods()
    if not methods:
        raise LaunchError(
            "launch() does not work on Windows: ranks need POSIX signals and socket pairs. Planning and training on "
            "one process do. Fix: run Python and Jupyter in WSL 2 (wsl --install)."
        )
    if engine not in (None, "local", "ray"):
        raise LaunchError(f"launch(engine={engine!r}): expected 'local', 'ray' or None.")
    if engine == "ray" and start_method is not None:
        raise LaunchError(
            f"launch(engine='ray', start_method={start_method!r}): on Ray every rank is a clean interpreter. "
            "Fix: leave out start_method."
        )
    if engine == "ray":
        return "ray"
    if address is not None:
        raise LaunchError(f"launch(address={address!r}): only engine='ray' has an address. Fix: leave it out.")
    if start_method not in (None, "fork", "spawn"):
        raise LaunchError(f"launch(start_method={start_method!r}): expected 'fork', 'spawn' or None.")
    if start_method == "fork" and "fork" not in methods:
        raise LaunchError("launch(start_method='fork'): this system cannot fork. Fix: start_method='spawn'.")
    return start_method or methods[0]


def checked_link(nodes: int, latency_ms: float | None, gbps: float | None) -> tuple[float | None, float | None]:
    """The emulated link, or a LaunchError: without nodes there is nothing between them."""
    for name, value, least in (("inter_node_latency_ms", latency_ms, 0), ("inter_node_gbps", gbps, None)):
        if value is None:
            continue
        number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
        if not number or value < 0 or (least is None and value == 0):
            raise LaunchError(
                f"launch({name}={value!r}): expected a number {'of at least 0' if least == 0 else 'above 0'}."
            )
        if nodes == 1:
            raise LaunchError(f"launch({name}={value!r}, nodes=1): one node has no link to another. Fix: nodes=2.")
    return None if latency_ms is None else float(latency_ms), None if gbps is None else float(gbps)


def checked_memory(memory_gb: Any) -> float | None:
    """``memory_gb=`` as a float, or a LaunchError."""
    if memory_gb is None:
        return None
    number = not isinstance(memory_gb, bool) and isinstance(memory_gb, int | float) and math.isfinite(memory_gb)
    if not number or memory_gb <= 0:
        raise LaunchError(f"launch(memory_gb={memory_gb!r}): expected a number above 0. Fix: memory_gb=2.")
    return float(memory_gb)
