"""Memory that plans leave free, under TorchRec's names.

``reserve`` gives the devices without the reserved bytes, by TorchRec's rules: the percentage is of device memory alone.
``topology`` and ``workload`` are the hooks of this library's own search, whose percentage is of the memory that stores
the weights, on CPUs too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from enum import StrEnum
from typing import Any

from torch import nn

from recshard_lab.compat.planner.base import Constraints, StorageReservation
from recshard_lab.compat.planner.constants import BIGINT_DTYPE, POOLING_FACTOR
from recshard_lab.compat.planner.costs import PlannerError, PlannerErrorType
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.compat.planner.utils import gb_to_bytes
from recshard_lab.planner import FixedPercentageStorageReservation as OurPercentage
from recshard_lab.planner import HeuristicalStorageReservation as OurHeuristic
from recshard_lab.planner import Workload
from recshard_lab.planner.model.torchrec_cost import COPIES_OF_A_BATCH
from recshard_lab.sharding import Topology as OurTopology
from recshard_lab.sharding import find_collections


class StorageReservationType(StrEnum):
    """The kinds of reservation."""

    HEURISTIC = "heuristic"
    FIXED_PERCENTAGE = "fixed_percentage"
    FIXED_ABSOLUTE = "fixed_absolute"


class _Reservation(StorageReservation):
    """Reserves bytes of a copy of the topology, and keeps the last one."""

    _last: Topology | None = None

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[Any],
        constraints: Constraints | None = None,
    ) -> Topology:
        """A copy of the topology without the reserved bytes.

        Raises:
            PlannerError: of type INSUFFICIENT_STORAGE, if a `HeuristicalStorageReservation` exceeds a device's bytes.
        """
        made = deepcopy(topology)
        self._take(made, batch_size, module, sharders, constraints or {})
        self._last = made
        return deepcopy(made)

    @abstractmethod
    def _take(self, topology: Topology, *inputs: Any) -> None:
        """Removes the reserved bytes. Inputs: batch size, module, sharders, and constraints by table."""

    @property
    def last_reserved_topology(self) -> Topology | None:
        """A copy of the last result of `reserve`; None before it."""
        return deepcopy(self._last)

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The same step. This library's search calls it."""
        return workload


class FixedPercentageStorageReservation(_Reservation):
    """Reserves a share of each rank's device memory.

    Args:
        percentage: the share, from 0 to 1.

    Raises:
        AssertionError: another share.

    >>> reserved = FixedPercentageStorageReservation(0.25).reserve(Topology(2, "cuda", hbm_cap=400), 1, nn.Module(), [])
    >>> reserved.devices[0].storage.hbm
    300
    """

    def __init__(self, percentage: float) -> None:
        self._percentage = _checked_share(percentage)

    def _take(self, topology: Topology, *inputs: Any) -> None:
        for device in topology.devices:
            device.storage.hbm = int((1 - self._percentage) * device.storage.hbm)

    def topology(self, topology: OurTopology) -> OurTopology:
        """The same ranks with that share reserved. This library's search calls it."""
        return OurPercentage(self._percentage).topology(topology)


class FixedAbsoluteStorageReservation(FixedPercentageStorageReservation):
    """Reserves bytes of each rank's device memory; all of it where a device has fewer.

    Args:
        hbm_reserved_bytes: bytes.

    Raises:
        AssertionError: a negative number.

    >>> FixedAbsoluteStorageReservation.from_gb(1.5).hbm_reserved_bytes == 3 << 29
    True
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise AssertionError(f"hbm_reserved_bytes must not be negative, got {hbm_reserved_bytes}. Fix: pass 0")
        super().__init__(0.0)
        self.hbm_reserved_bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """The same of a number of GiB."""
        return cls(gb_to_bytes(hbm_reserved_gb))

    def _take(self, topology: Topology, *inputs: Any) -> None:
        for device in topology.devices:
            device.storage.hbm = max(0, device.storage.hbm - self.hbm_reserved_bytes)

    def topology(self, topology: OurTopology) -> OurTopology:
        """The same ranks with that many bytes less, and no share reserved. This library's search calls it."""
        free = max(0, topology.memory_cap_bytes - self.hbm_reserved_bytes)
        if topology.compute_device == "cuda":
            return replace(topology, reserve_fraction=0.0, hbm_cap=free)
        return replace(topology, reserve_fraction=0.0, ddr_cap=free)


class InferenceStorageReservation(_Reservation):
    """Reserves a share, the dense parameters and one batch of ids, for a model in inference.

    On CPUs, parameters and ids are in host memory.

    Args:
        percentage: share of device memory, from 0 to 1.
        dense_tensor_estimate: bytes of parameters outside the tables. Default: counted.

    Raises:
        AssertionError: another share.
    """

    _parameter_multiplier, _batches = 1.0, 1

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        self._percentage, self._dense_tensor_estimate = _checked_share(percentage), dense_tensor_estimate

    def _take(self, topology: Topology, *inputs: Any) -> None:
        dense, ids = _sizes(self._parameter_multiplier, *inputs)
        if self._dense_tensor_estimate is not None:
            dense = self._dense_tensor_estimate
        for device in topology.devices:
            device.storage.hbm = int((1 - self._percentage) * device.storage.hbm)
            if topology.compute_device == "cpu":
                device.storage.ddr -= dense + ids * self._batches
            else:
                device.storage.hbm -= dense + ids * self._batches

    def topology(self, topology: OurTopology) -> OurTopology:
        """The same ranks with that share reserved. This library's search calls it."""
        return OurPercentage(self._percentage).topology(topology)

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The step with the dense parameters of `module`. This library's search calls it."""
        ours = OurHeuristic(self._percentage, self._parameter_multiplier, self._dense_tensor_estimate)
        return ours.workload(workload, module, tables)


class HeuristicalStorageReservation(InferenceStorageReservation):
    """Reserves a share, several times the dense parameters, and 20 batches of ids, for a model in training.

    Args:
        percentage: share of device memory, from 0 to 1.
        parameter_multiplier: bytes per byte of dense parameters.
        dense_tensor_estimate: bytes for dense tensors. Default: counted.

    Raises:
        AssertionError: another share.
    """

    _batches = COPIES_OF_A_BATCH

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        super().__init__(percentage, dense_tensor_estimate)
        self._parameter_multiplier = parameter_multiplier

    def _take(self, topology: Topology, *inputs: Any) -> None:
        before = deepcopy(topology.devices)
        super()._take(topology, *inputs)
        for device, old in zip(topology.devices, before, strict=True):
            if min(device.storage.hbm, device.storage.ddr) < 0:
                raise PlannerError(
                    f"rank {device.rank} has {old.storage}, and {device.storage} after the reservation. Fix: lower "
                    f"percentage or dense_tensor_estimate, or reduce the batch size",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )


def _checked_share(percentage: float) -> float:
    if not 0 <= percentage <= 1:
        raise AssertionError(f"percentage must be from 0 to 1, got {percentage!r}. Fix: 0.15 for 15 percent")
    return percentage


def _sizes(
    multiplier: float, batch_size: int, module: nn.Module, sharders: list[Any], constraints: Mapping[str, Any]
) -> tuple[int, int]:
    """Bytes of the dense part (parameters times `multiplier`, and buffers), and of the ids of one batch."""
    inside: set[int] = set()
    ids = 0.0
    for _, part, sharder, _, _ in find_collections(module, sharders):
        tables = sharder.shardable_parameters(part)
        inside.update(id(tensor) for tensor in (*part.parameters(), *part.buffers()))
        for name in tables:
            limit = constraints.get(name)
            lengths = limit.pooling_factors if limit is not None and limit.pooling_factors else [POOLING_FACTOR]
            samples = limit.batch_sizes if limit is not None and limit.batch_sizes else [batch_size] * len(lengths)
            ids += sum(length * count for length, count in zip(lengths, samples, strict=True))
    parameters = sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in inside)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers() if id(b) not in inside)
    return int(parameters * multiplier) + buffers, int(ids * BIGINT_DTYPE)
