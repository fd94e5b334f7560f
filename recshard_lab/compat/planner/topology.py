"""TorchRec's `Topology`: devices with their memories, and the bandwidths between them.

`ours` gives the planner's topology of this library. It has the capacities of the devices, and the bandwidths that the
caller passed: on CPU ranks, TorchRec's defaults are those of GPUs, so this library's measured figures replace them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from recshard_lab.compat.planner.constants import (
    BWD_COMPUTE_MULTIPLIER,
    CROSS_NODE_BANDWIDTH,
    DDR_CAP,
    DDR_MEM_BW,
    HBM_CAP,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    SSD_CAP,
    SSD_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)
from recshard_lab.compat.planner.costs import DeviceHardware, Perf, Storage
from recshard_lab.sharding import Topology as OurTopology

_DEVICES = ("cpu", "cuda", "mtia")


class CollectiveType(Enum):
    """A collective, for `GeneralizedCommsBandwidth.get_bw`."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(ABC):
    """Bandwidth by collective and ranks. Subclass it and pass it as ``Topology(generalized_comms_bandwidths=)``."""

    @abstractmethod
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Bytes per ms of a collective over `world_size` ranks, `local_world_size` on each node."""

    @property
    @abstractmethod
    def intra_host_bw(self) -> float:
        """Bytes per ms inside a node."""

    @property
    @abstractmethod
    def inter_host_bw(self) -> float:
        """Bytes per ms between nodes."""


@dataclass(unsafe_hash=True, init=False)
class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """One bandwidth inside nodes and one between them, for every collective; an all-reduce uses all links of a node.

    Args:
        inter_host_bw, intra_host_bw: bytes per ms.

    >>> BasicCommsBandwidths(2.0, 8.0).get_bw(4, 8, CollectiveType.ALL_TO_ALL)
    2.0
    """

    _inter_host_bw: float
    _intra_host_bw: float

    def __init__(
        self, inter_host_bw: float = CROSS_NODE_BANDWIDTH, intra_host_bw: float = INTRA_NODE_BANDWIDTH
    ) -> None:
        self.name = "BasicCommsBandwidths"
        self._inter_host_bw, self._intra_host_bw = inter_host_bw, intra_host_bw

    def __str__(self) -> str:
        return f"{self.name}: inter_host_bw={self.inter_host_bw}, intra_host_bw={self.intra_host_bw}"

    @property
    def inter_host_bw(self) -> float:
        """Bytes per ms between nodes."""
        return self._inter_host_bw

    @property
    def intra_host_bw(self) -> float:
        """Bytes per ms inside a node."""
        return self._intra_host_bw

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Bytes per ms of a collective."""
        if collective_type is CollectiveType.ALL_REDUCE:
            return self.inter_host_bw * local_world_size
        return self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw


class CustomTopologyData:
    """Capacities that differ between ranks.

    Args:
        data: "hbm_cap", "ddr_cap" or "ssd_cap" -> bytes of each rank.
        world_size: ranks.

    Raises:
        AssertionError: another key, or a list that is not one entry per rank.

    >>> CustomTopologyData({"hbm_cap": [1, 2]}, world_size=2).get_data("hbm_cap")
    [1, 2]
    """

    supported_fields: ClassVar[list[str]] = ["ddr_cap", "hbm_cap", "ssd_cap"]

    def __init__(self, data: dict[str, list[int]], world_size: int) -> None:
        for key, values in data.items():
            self._check(key)
            if len(values) != world_size:
                raise AssertionError(
                    f"{key}={values} has {len(values)} entries for {world_size} ranks. Fix: pass one entry per rank"
                )
        self._data, self._world_size = data, world_size

    def _check(self, key: str) -> None:
        if key not in self.supported_fields:
            raise AssertionError(f"CustomTopologyData has no field {key!r}. Fix: use one of {self.supported_fields}")

    def get_data(self, key: str) -> list[int]:
        """The capacities of all ranks.

        Raises:
            AssertionError: an unknown key. KeyError: no data for it.
        """
        self._check(key)
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Whether there are capacities for `key`."""
        return key in self._data


class Topology:
    """W devices with their memories and bandwidths, as TorchRec's planner sees them.

    Args:
        world_size: ranks W.
        compute_device: "cpu", "cuda" or "mtia".
        hbm_cap, ddr_cap, ssd_cap: bytes per rank. Default: 32 GiB, 128 GiB and 2 TiB. On "cpu", hbm is 0.
        local_world_size: ranks per node. Default: all.
        pod_size: ranks that share a fast network. Default: those of a node.
        hbm_mem_bw, ddr_mem_bw, ssd_mem_bw, hbm_to_ddr_mem_bw: bytes per ms of the memories, and of a device to host
            memory.
        intra_host_bw, inter_host_bw: bytes per ms of one rank inside and between nodes.
        bwd_compute_multiplier: backward lookup / forward lookup.
        custom_topology_data: capacities that differ between ranks.
        weighted_feature_bwd_compute_multiplier: the same factor of ids with weights.
        uneven_sharding_perf_multiplier: kept for estimators of yours. The served estimator charges equal shards.
        generalized_comms_bandwidths: replaces `intra_host_bw` and `inter_host_bw`.
        created_by_factory: whether `TopologyFactory` called.

    Raises:
        AssertionError: an unknown device. ValueError: a pod larger than the world.

    >>> topology = Topology(4, "cuda", local_world_size=2)
    >>> topology.devices[3].storage.hbm == 32 * 1024**3, topology.intra_group_size
    (True, 2)
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float = HBM_MEM_BW,
        ddr_mem_bw: float = DDR_MEM_BW,
        ssd_mem_bw: float = SSD_MEM_BW,
        hbm_to_ddr_mem_bw: float = HBM_TO_DDR_MEM_BW,
        intra_host_bw: float = INTRA_NODE_BANDWIDTH,
        inter_host_bw: float = CROSS_NODE_BANDWIDTH,
        bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER,
        custom_topology_data: CustomTopologyData | None = None,
        weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
        created_by_factory: bool = False,
    ) -> None:
        if compute_device not in _DEVICES:
            raise AssertionError(f"compute_device {compute_device!r} is not supported. Fix: use one of {_DEVICES}")
        for name, value in (("world_size", world_size), ("local_world_size", local_world_size), ("pod_size", pod_size)):
            if not (value is None and name != "world_size") and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive int, got {value!r}. Fix: {name}=2")
        if pod_size is not None and pod_size > world_size:
            raise ValueError(f"pod_size {pod_size} exceeds world_size {world_size}. Fix: pod_size={world_size}")
        self.world_size, self.compute_device = world_size, compute_device
        self.local_world_size = world_size if local_world_size is None else local_world_size
        self.intra_group_size = self.local_world_size * (1 if pod_size is None else pod_size)
        self.hbm_mem_bw, self.ddr_mem_bw, self.ssd_mem_bw = hbm_mem_bw, ddr_mem_bw, ssd_mem_bw
        self.hbm_to_ddr_mem_bw = hbm_to_ddr_mem_bw
        self.comms_bandwidths = generalized_comms_bandwidths or BasicCommsBandwidths(inter_host_bw, intra_host_bw)
        self.bwd_compute_multiplier = bwd_compute_multiplier
        self.weighted_feature_bwd_compute_multiplier = weighted_feature_bwd_compute_multiplier
        self.uneven_sharding_perf_multiplier = uneven_sharding_perf_multiplier
        self.created_by_factory = created_by_factory
        self.is_uniform = custom_topology_data is None
        on_cpu = compute_device == "cpu"
        caps = []
        for key, value, default in (
            ("hbm_cap", 0 if on_cpu else hbm_cap, HBM_CAP),
            ("ddr_cap", ddr_cap, DDR_CAP),
            ("ssd_cap", ssd_cap, SSD_CAP),
        ):
            if custom_topology_data is not None and custom_topology_data.has_data(key):
                caps.append(custom_topology_data.get_data(key))
            else:
                caps.append([default if value is None else value] * world_size)
        self.devices = [
            DeviceHardware(rank, Storage(*(entries[rank] for entries in caps)), Perf(0, 0, 0, 0))
            for rank in range(world_size)
        ]
        self._given: dict[str, Any] = {
            name: value
            for name, value, default in (
                ("hbm_cap", hbm_cap, None),
                ("ddr_cap", ddr_cap, None),
                ("hbm_mem_bw", hbm_mem_bw, HBM_MEM_BW),
                ("ddr_mem_bw", ddr_mem_bw, DDR_MEM_BW),
                ("intra_host_bw", self.intra_host_bw, INTRA_NODE_BANDWIDTH),
                ("inter_host_bw", self.inter_host_bw, CROSS_NODE_BANDWIDTH),
            )
            if value != default
        }

    @property
    def intra_host_bw(self) -> float:
        """Bytes per ms inside a node."""
        return self.comms_bandwidths.intra_host_bw

    @property
    def inter_host_bw(self) -> float:
        """Bytes per ms between nodes."""
        return self.comms_bandwidths.inter_host_bw

    def ours(self) -> OurTopology:
        """This library's topology with the values that were passed; its own defaults for others.

        Raises:
            ValueError: "mtia", or a figure that this library's topology refuses.
        """
        return OurTopology(self.world_size, self.compute_device, local_world_size=self.local_world_size, **self._given)

    def __repr__(self) -> str:
        devices = "".join(f"\tdevice {device.rank} {device}\n" for device in self.devices)
        return (
            f"world_size={self.world_size} \ncompute_device={self.compute_device}\ndevices=\n{devices}"
            f"local_world_size={self.local_world_size} \nintra_group_size={self.intra_group_size} \n"
            f"{self.comms_bandwidths}\n"
        )


def ours_of(topology: Topology | OurTopology | None) -> OurTopology | None:
    """This library's topology of either class."""
    return topology.ours() if isinstance(topology, Topology) else topology


def theirs_of(topology: OurTopology) -> Topology:
    """A topology of this library with TorchRec's properties; each rank's capacity is without its reserve."""
    top = topology
    return Topology(
        top.world_size,
        top.compute_device,
        hbm_cap=top.free_memory_bytes() if top.compute_device == "cuda" else 0,
        ddr_cap=top.ddr_cap if top.compute_device == "cuda" else top.free_memory_bytes(),
        local_world_size=top.local_world_size,
        hbm_mem_bw=top.hbm_mem_bw,
        ddr_mem_bw=top.ddr_mem_bw,
        intra_host_bw=top.intra_host_bw,
        inter_host_bw=top.inter_host_bw,
    )


def link_bandwidths(topology: Topology, collective: CollectiveType) -> tuple[float, float]:
    """Bytes per ms of one rank in a collective inside a node, and over all ranks."""
    local, links = topology.local_world_size, topology.comms_bandwidths
    return links.get_bw(local, local, collective), links.get_bw(local, topology.world_size, collective)


def resolved(*candidates: Mapping[str, Any]) -> dict[str, Any]:
    """The first value that is not None for every key."""
    found: dict[str, Any] = {}
    for values in candidates:
        for key, value in values.items():
            if value is not None and key not in found:
                found[key] = value
    return found
