"""Memory that a plan must leave free, under TorchRec's names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import Topology


@dataclass(frozen=True)
class FixedPercentageStorageReservation:
    """A share of every rank's memory.

    Args:
        percentage: the share, from 0 to below 1; it takes the place of ``Topology.reserve_fraction``.

    Raises:
        ValueError: a share that cannot be.

    >>> FixedPercentageStorageReservation(0.25).topology(Topology(2, ddr_cap=400)).free_memory_bytes()
    300
    """

    percentage: float

    def __post_init__(self) -> None:
        if not 0 <= self.percentage < 1:
            raise ValueError(f"percentage must lie in [0, 1), got {self.percentage!r}: 0.15 is fifteen percent")

    def topology(self, topology: Topology) -> Topology:
        """The same ranks with that share reserved."""
        return replace(topology, reserve_fraction=self.percentage)

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The same step; the dense part is what the workload says."""
        return workload


@dataclass(frozen=True)
class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """A share of every rank's memory, and room for the dense part of the model that is planned for.

    Buffers for ids and rows need no reservation: the planner counts them.

    Args:
        percentage: the share.
        parameter_multiplier: bytes kept free for each byte of dense parameters (weight, gradient, optimizer state).
        dense_tensor_estimate: bytes of dense parameters, where the model does not say; counted when left out.
    """

    parameter_multiplier: float = 6.0
    dense_tensor_estimate: int | None = None

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The same step with the dense parameters of `module`: all but those below the paths `tables`."""
        if self.dense_tensor_estimate is not None:
            count = self.dense_tensor_estimate // 4
        else:
            within = tuple(f"{path}." if path else "" for path in tables)
            count = sum(p.numel() for name, p in module.named_parameters() if not name.startswith(within))
        return replace(workload, dense_parameters=count, dense_bytes_per_parameter=4 * self.parameter_multiplier)
