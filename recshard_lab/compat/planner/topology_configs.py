"""TorchRec's configurations of a topology, and the factory that resolves them: trainer, hardware, kernel, default."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from recshard_lab.compat.planner.constants import BWD_COMPUTE_MULTIPLIER, WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
from recshard_lab.compat.planner.topology import GeneralizedCommsBandwidth, Topology, resolved

_CAPACITIES = ("hbm_cap_bytes", "ddr_cap_bytes", "ssd_cap_bytes")
_BANDWIDTHS = ("intra_host_bw", "inter_host_bw", "hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw", "ssd_mem_bw")


class TopologyConfigBase(ABC):
    """A configuration with further named values in `additional_params`."""

    additional_params: dict[str, Any]

    @abstractmethod
    def validate(self) -> None:
        """Raises a ValueError for an invalid configuration."""

    def get_param(self, key: str, default: Any = None) -> Any:
        """A further value, or `default`."""
        return self.additional_params.get(key, default)

    def has_param(self, key: str) -> bool:
        """Whether there is such a value."""
        return key in self.additional_params


@dataclass
class HardwareConfig(TopologyConfigBase):
    """Measured figures of the machine; None where unknown.

    Args:
        hbm_cap_bytes, ddr_cap_bytes, ssd_cap_bytes: bytes per rank.
        intra_host_bw, inter_host_bw, hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, ssd_mem_bw: bytes per ms. They take
            effect with ``KernelConfig(use_hardware_based_bandwidth=True)``.
        additional_params: further values.

    >>> HardwareConfig(hbm_cap_bytes=0).get_validation_issues("cuda")
    ['hbm_cap_bytes=0 is non-positive']
    """

    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    ssd_mem_bw: float | None = None
    additional_params: dict[str, Any] = field(default_factory=dict)

    def get_validation_issues(self, compute_device: str | None = None) -> list[str]:
        """One text for each figure that cannot be right. `compute_device` "cpu" and None have no device memory."""
        names = _CAPACITIES[compute_device in (None, "cpu") :] + _BANDWIDTHS
        figures = {name: getattr(self, name) for name in names}
        issues = [
            f"{name}={value} is non-positive" for name, value in figures.items() if value is not None and value <= 0
        ]
        inside, between = self.intra_host_bw, self.inter_host_bw
        if inside is not None and between is not None and inside < between:
            issues.append(
                f"intra_host_bw ({inside:.0f}) < inter_host_bw ({between:.0f}): nodes are slower inside than between"
            )
        return issues

    def validate(self, compute_device: str | None = None) -> None:
        """Warns of figures that cannot be right."""
        if issues := self.get_validation_issues(compute_device):
            warnings.warn(f"HardwareConfig: {'; '.join(issues)}", stacklevel=2)


@dataclass
class TrainerConfig(TopologyConfigBase):
    """The values that a job sets itself; they override the hardware's.

    Args:
        world_size, local_world_size, pod_size: ranks. `world_size` is required.
        hbm_cap_bytes, ddr_cap_bytes, ssd_cap_bytes: bytes per rank.
        is_dry_run: use the capacities `dry_run_hbm_bytes` and `dry_run_ddr_bytes` instead.
        additional_params: further values. "custom_topology_data" goes to the topology.
    """

    world_size: int | None = None
    local_world_size: int | None = None
    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    is_dry_run: bool = False
    dry_run_hbm_bytes: int | None = None
    dry_run_ddr_bytes: int | None = None
    pod_size: int | None = None
    additional_params: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raises a ValueError without `world_size`."""
        if self.world_size is None:
            raise ValueError("TrainerConfig has no world_size. Fix: TrainerConfig(world_size=8)")


@dataclass
class KernelConfig(TopologyConfigBase):
    """The device and factors of its kernels.

    Args:
        compute_device: "cpu", "cuda" or "mtia".
        bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier, uneven_sharding_perf_multiplier: as of
            `Topology`.
        use_hardware_based_bandwidth: whether `HardwareConfig`'s bandwidths replace the defaults.
        generalized_comms_bandwidths: replaces the bandwidths of collectives.
        additional_params: further values.
    """

    compute_device: str = "cuda"
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    uneven_sharding_perf_multiplier: float = 1.0
    use_hardware_based_bandwidth: bool = False
    generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None
    additional_params: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raises a ValueError for an unknown device."""
        if self.compute_device not in ("cpu", "cuda", "mtia"):
            raise ValueError(f"compute_device {self.compute_device!r} is not supported. Fix: use cpu, cuda or mtia")


class TopologyFactory:
    """Makes a `Topology` from configurations: the trainer's values first, then the hardware's, then defaults.

    >>> made = TopologyFactory.create_topology(TrainerConfig(2, hbm_cap_bytes=5), HardwareConfig(hbm_cap_bytes=7))
    >>> made.devices[0].storage.hbm
    5
    """

    @staticmethod
    def create_topology(
        trainer_config: TrainerConfig,
        hardware_config: HardwareConfig | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Topology:
        """The topology.

        Raises:
            ValueError: no `world_size`, or an unknown device.
        """
        hardware, kernel = hardware_config or HardwareConfig(), kernel_config or KernelConfig()
        for config in (trainer_config, hardware, kernel):
            config.validate()
        assert trainer_config.world_size is not None  # validate() raised
        dry = {"hbm_cap_bytes": trainer_config.dry_run_hbm_bytes, "ddr_cap_bytes": trainer_config.dry_run_ddr_bytes}
        caps = resolved(
            dry if trainer_config.is_dry_run else {},
            *({name: getattr(config, name) for name in _CAPACITIES} for config in (trainer_config, hardware)),
        )
        measured = {name: getattr(hardware, name) for name in _BANDWIDTHS if kernel.use_hardware_based_bandwidth}
        return Topology(
            trainer_config.world_size,
            kernel.compute_device,
            local_world_size=trainer_config.local_world_size,
            pod_size=trainer_config.pod_size,
            bwd_compute_multiplier=kernel.bwd_compute_multiplier,
            custom_topology_data=trainer_config.get_param("custom_topology_data"),
            weighted_feature_bwd_compute_multiplier=kernel.weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier=kernel.uneven_sharding_perf_multiplier,
            generalized_comms_bandwidths=kernel.generalized_comms_bandwidths,
            created_by_factory=True,
            **{name.removesuffix("_bytes"): value for name, value in caps.items()},
            **resolved(measured),
        )
