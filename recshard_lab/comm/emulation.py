"""A slower road between nodes, for ranks that only pretend to live on several: emulated, and labelled so.

Ranks on virtual nodes talk through one machine's memory, so crossing a node costs nothing and nobody sees why
node-aware schemes exist. With an `InterNodeLink` every exchange that crosses nodes ends no sooner than over such a
link::

    end >= start + latency + bytes to or from other nodes / bandwidth        (the larger direction)

Only exchanges of this library are slowed (``comm.collectives``), not those that user code makes by itself, nor the
dense all-reduce of DistributedDataParallel. Waiting is sleeping: the other ranks of a crowded machine may use the core.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

LATENCY_VARIABLE = "RECSHARD_INTER_NODE_LATENCY_MS"
BANDWIDTH_VARIABLE = "RECSHARD_INTER_NODE_GBPS"


@dataclass(frozen=True)
class InterNodeLink:
    """What each rank has towards other nodes.

    Args:
        latency_ms: added to every exchange that crosses nodes.
        gbps: gigabits a second of each rank, each way; None does not limit.

    Raises:
        ValueError: a negative latency, or a bandwidth that is not above zero.

    >>> InterNodeLink(latency_ms=0.5, gbps=1.0).least_ms(1_000_000)
    8.5
    """

    latency_ms: float = 0.0
    gbps: float | None = None

    def __post_init__(self) -> None:
        if not self.latency_ms >= 0:
            raise ValueError(f"inter-node latency must be at least 0 ms, got {self.latency_ms!r}")
        if self.gbps is not None and not self.gbps > 0:
            raise ValueError(f"inter-node bandwidth must be above 0 Gbit/s, got {self.gbps!r}")

    def least_ms(self, num_bytes: int) -> float:
        """Milliseconds that ``num_bytes`` across nodes take at least."""
        return self.latency_ms + (num_bytes * 8e-6 / self.gbps if self.gbps is not None else 0.0)

    def environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes this link again, on a rank."""
        found = {LATENCY_VARIABLE: repr(self.latency_ms)}
        if self.gbps is not None:
            found[BANDWIDTH_VARIABLE] = repr(self.gbps)
        return found

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "InterNodeLink | None":
        """The link that the launcher asked for; None when it asked for none."""
        variables = os.environ if environment is None else environment
        latency, gbps = variables.get(LATENCY_VARIABLE), variables.get(BANDWIDTH_VARIABLE)
        if latency is None and gbps is None:
            return None
        return cls(float(latency or 0.0), float(gbps) if gbps else None)
