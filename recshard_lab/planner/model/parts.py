"""Who spends the time of a phase: the network, the host or the device."""

from dataclasses import replace
from typing import Any

from recshard_lab.sharding import Topology

FREE = 1e30  # bytes or operations per ms of what costs nothing
#: figures of `Topology` by who spends them; those of lookups and updates are in the loads `loads.COMPUTED`
FIGURES = {
    "network": (
        "intra_host_bw", "inter_host_bw", "intra_host_latency_ms", "inter_host_latency_ms", "peer_ms",
        "inter_host_peer_ms",
    ),
    "host": ("launch_ms", "host_ms", "shard_feature_ms", "row_split_ms", "norm_ms", "step_ms", "sync_ms"),
    "device": ("hbm_mem_bw", "cache_bw", "flops_per_ms", "tf32_flops_per_ms", "route_ns_per_id", "kernel_ms"),
}  # fmt: skip


def only(topology: Topology, *parts: str) -> Topology:
    """The topology on which everything costs nothing but these parts of a phase.

    >>> only(Topology(8, "cuda"), "network", "device").launch_ms
    0.0
    """
    others = [name for part, names in FIGURES.items() if part not in parts for name in names]
    free: dict[str, Any] = {name: FREE if name.endswith(("_bw", "flops_per_ms")) else 0.0 for name in others}
    return replace(topology, **free)
