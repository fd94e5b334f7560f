"""An emulated slow link between virtual nodes. Results that use it are labelled as emulated.

Ranks on virtual nodes share one machine's memory, so an exchange across nodes costs nothing more, and node-aware
schemes show no benefit. With an `InterNodeLink`, an exchange across nodes takes at least as long as over that link::

    end >= start + latency + bytes to or from other nodes / bandwidth        (the larger direction)

Only exchanges of this library (``comm.collectives``) are delayed. Collectives of user code and the dense all-reduce of
DistributedDataParallel are not. A rank sleeps while it waits, so other ranks may use its core.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

LATENCY_VARIABLE = "RECSHARD_INTER_NODE_LATENCY_MS"
BANDWIDTH_VARIABLE = "RECSHARD_INTER_NODE_GBPS"


@dataclass(frozen=True)
class InterNodeLink:
    """The link of each rank to other nodes.

    Args:
        latency_ms: latency in ms of every exchange across nodes.
        gbps: bandwidth per rank and direction in gigabits per second; None for no limit.

    Raises:
        ValueError: a negative latency, or a bandwidth of 0 or below.

    >>> InterNodeLink(latency_ms=0.5, gbps=1.0).min_ms(1_000_000)
    8.5
    """

    latency_ms: float = 0.0
    gbps: float | None = None

    def __post_init__(self) -> None:
        if not self.latency_ms >= 0:
            raise ValueError(f"inter-node latency must be at least 0 ms, got {self.latency_ms!r}")
        if self.gbps is not None and not self.gbps > 0:
            raise ValueError(f"inter-node bandwidth must be above 0 Gbit/s, got {self.gbps!r}")

    def min_ms(self, num_bytes: int) -> float:
        """Minimum time in ms of ``num_bytes`` across nodes."""
        return self.latency_ms + (num_bytes * 8e-6 / self.gbps if self.gbps is not None else 0.0)

    def environment(self) -> dict[str, str]:
        """Environment variables from which `from_environment` restores this link."""
        variables = {LATENCY_VARIABLE: repr(self.latency_ms)}
        if self.gbps is not None:
            variables[BANDWIDTH_VARIABLE] = repr(self.gbps)
        return variables

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "InterNodeLink | None":
        """The link that the launcher configured, or None."""
        variables = os.environ if environment is None else environment
        if LATENCY_VARIABLE not in variables and BANDWIDTH_VARIABLE not in variables:
            return None
        latency, gbps = variables.get(LATENCY_VARIABLE), variables.get(BANDWIDTH_VARIABLE)
        return cls(float(latency or 0.0), float(gbps) if gbps else None)
