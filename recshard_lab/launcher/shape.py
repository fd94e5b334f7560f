"""How many ranks, on how many nodes, over which backend: checked before any process starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..cores import usable_cores
from .engines import default_start_method
from .errors import LaunchError

__all__ = ["Shape"]

RANKS_PER_CORE = 8  # above it a launch is refused: steps would measure the scheduler, not the plan
MAX_RANKS = 64

LATENCY_VARIABLE = "RECSHARD_INTER_NODE_LATENCY_MS"  # read by `comm.emulation` on the ranks
BANDWIDTH_VARIABLE = "RECSHARD_INTER_NODE_GBPS"


@dataclass(frozen=True)
class Shape:
    """The ranks asked for. Ranks ``[k * local_world_size, (k + 1) * local_world_size)`` live on node k."""

    world_size: int
    nodes: int
    backend: str  # "gloo" or "nccl"
    threads: int  # torch threads a rank
    engine: str = "fork"  # of `engines.ENGINES`
    inter_node_latency_ms: float | None = None  # of the emulated link between virtual nodes
    inter_node_gbps: float | None = None  # gigabits a second of each rank, each way
    address: str | None = None  # of a Ray cluster
    hosts: int = 1  # machines; above 1 they are the nodes, otherwise nodes are virtual

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.nodes

    def __str__(self) -> str:
        text = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self.nodes > 1:
            text += f" on {self.nodes} {'machines' if self.hosts > 1 else 'virtual nodes'}"
            text += f" ({self.link})" if self.link else ""
        return f"{text} over {self.backend}" + (f", engine {self.engine}" if self.engine != "fork" else "")

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
    ) -> Shape:
        """The shape, or a LaunchError that names what was given and a fix."""
        for name, value in (("n", world_size), ("nodes", nodes), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LaunchError(f"launch({name}={value!r}): expected a whole number of at least 1.")
        if world_size % nodes:
            fit = max(k for k in range(1, nodes + 1) if world_size % k == 0)
            raise LaunchError(
                f"launch(n={world_size}, nodes={nodes}): ranks do not divide evenly over nodes. "
                f"Fix: nodes={fit}, or n={world_size + nodes - world_size % nodes}."
            )
        link = checked_link(nodes, inter_node_latency_ms, inter_node_gbps)
        kind = checked_engine(engine, start_method, address)
        if kind == "ray":
            from .engines.ray_cluster import cluster_backend

            chosen = cluster_backend(address, checked_backend_name(backend), world_size)
            return cls(world_size, nodes, chosen, threads, kind, *link, address)
        cores = usable_cores()
        limit = min(MAX_RANKS, RANKS_PER_CORE * cores)
        if world_size > limit:
            raise LaunchError(
                f"launch(n={world_size}): more ranks than this machine can usefully share: {cores} "
                f"core{'s' if cores > 1 else ''} x {RANKS_PER_CORE} ranks a core, and never above {MAX_RANKS}, "
                f"allow {limit}. Fix: n={limit}."
            )
        return cls(world_size, nodes, checked_backend(backend, world_size), threads, kind, *link)

    def notice(self) -> str:
        """What a reader should know about this shape on this machine, a line each; empty when nothing."""
        lines = []
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
    """One of `ENGINES`; left to itself, what this system can."""
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
    if start_method == "fork" and default_start_method() != "fork":
        raise LaunchError("launch(start_method='fork'): this system cannot fork. Fix: 'spawn'.")
    return start_method or default_start_method()


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


def checked_backend_name(backend: str | None) -> str | None:
    """What was given, if it is a backend or None."""
    if backend not in (None, "gloo", "nccl"):
        raise LaunchError(f"launch(backend={backend!r}): expected 'gloo', 'nccl' or None.")
    return backend


def checked_backend(backend: str | None, world_size: int) -> str:
    """``gloo`` or ``nccl``; None takes NCCL where CUDA GPUs are."""
    if checked_backend_name(backend) == "gloo":
        return "gloo"
    import torch

    gpus = torch.cuda.device_count()
    if backend is None and gpus == 0:
        return "gloo"
    if world_size > gpus:
        fix = f"n={gpus}, or backend='gloo'" if gpus else "backend='gloo'"
        raise LaunchError(
            f"launch(n={world_size}, backend={backend!r}): NCCL needs one GPU a rank and this machine has {gpus}. "
            f"Fix: {fix}."
        )
    return "nccl"
