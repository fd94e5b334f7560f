"""``launch``: from what a notebook asks for to ranks that run; one world a process."""

from __future__ import annotations

from .errors import LaunchError
from .session import Ranks
from .shape import Shape

__all__ = ["current", "launch"]


def current() -> Ranks | None:
    """The ranks that are running, if any."""
    return Ranks.running


def launch(
    n: int,
    nodes: int = 1,
    backend: str | None = None,
    *,
    threads: int = 1,
    start_method: str | None = None,
    inter_node_latency_ms: float | None = None,
    inter_node_gbps: float | None = None,
    engine: str | None = None,
    address: str | None = None,
) -> Ranks:
    """Starts `n` ranks on this machine and returns when a real all_reduce has gone round.

    n: ranks. nodes: virtual nodes they believe to live on, n / nodes ranks each. backend: ``gloo``,
    ``nccl`` or None (NCCL with one GPU a rank where CUDA GPUs are, Gloo otherwise). threads: torch threads
    a rank. start_method: ``fork`` (from a process that has imported torch already: 0.1 s), ``spawn`` (a clean
    interpreter a rank through ``multiprocess``: seconds) or None (fork where the system can).
    inter_node_latency_ms, inter_node_gbps: an emulated link between the virtual nodes (gigabits a second of each
    rank, each way): exchanges of embeddings that cross nodes end no sooner than over such a link.
    engine: ``local`` (the same as None) or ``ray``: ranks on a Ray cluster (``pip install recshard-lab[ray]``), whose
    differences `engines.ray_cluster` lists. address: of that cluster, ``auto`` for the one at hand, None for the
    one this process is connected to or else a new one on this machine alone.
    Ranks of the same shape that are running already are returned as they are.

    Raises LaunchError, naming a fix, when the shape does not fit or others are running.

        with recshard_lab.launch(4) as ranks:
            ranks.run(torch.distributed.get_rank)   # [0, 1, 2, 3]
    """
    shape = Shape.checked(
        n,
        nodes,
        backend,
        threads,
        start_method,
        inter_node_latency_ms=inter_node_latency_ms,
        inter_node_gbps=inter_node_gbps,
        engine=engine,
        address=address,
    )
    with Ranks.starting:  # one launch at a time, from any thread
        running = Ranks.running
        if running is not None and running.usable:
            if running.asked == shape:
                running._holders += 1
                return running
            raise LaunchError(
                f"asked for {shape}, but {running.shape} are running. "
                "Fix: stop them first, %recshard_stop or recshard_lab.launcher.current().stop()."
            )
        if running is not None:
            running.stop()
        Ranks.running = Ranks(shape)
        return Ranks.running
