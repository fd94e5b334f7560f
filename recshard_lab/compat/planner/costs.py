"""What a shard costs and a device has: TorchRec's `Perf`, `Storage` and `DeviceHardware`, and the planner's errors."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import Enum

from recshard_lab.sharding import PlanError


@dataclass(unsafe_hash=True)
class Perf:
    """The predicted milliseconds of one shard in one step.

    Args:
        fwd_compute, bwd_compute: lookup and update.
        fwd_comms, bwd_comms: exchange of rows and of gradients.
        input_dist_comms: exchange of ids. It is not part of `total`.
        prefetch_compute: copies of rows into the cache.

    >>> (Perf(1, 2, 3, 4) + Perf(1, 0, 0, 0, prefetch_compute=5)).total
    16.0
    """

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """The sum without `input_dist_comms`, in ms."""
        return self.fwd_compute + self.bwd_compute + self.fwd_comms + self.bwd_comms + self.prefetch_compute

    def __add__(self, other: Perf) -> Perf:
        return Perf(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(order=True, unsafe_hash=True)
class Storage:
    """Bytes in a rank's memories.

    Args:
        hbm: of the device; ddr: of the host; ssd: of storage.

    >>> Storage(3, 2).fits_in(Storage(3, 2, 1)), Storage(3, 2) - Storage(1, 1)
    (True, Storage(hbm=2, ddr=1, ssd=0))
    """

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(self.hbm + other.hbm, self.ddr + other.ddr, self.ssd + other.ssd)

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def fits_in(self, other: Storage) -> bool:
        """Whether no memory needs more bytes than `other` has."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass(unsafe_hash=True)
class DeviceHardware:
    """One rank during partitioning: its free memory, and the time of the shards placed on it.

    Args:
        rank: its number. storage: free bytes. perf: the sum of its shards' costs.
    """

    rank: int
    storage: Storage
    perf: Perf


@dataclass
class CriticalPathEstimate:
    """The predicted time of a plan's critical path.

    Args:
        comms_estimate, comp_estimate: milliseconds of collectives and of compute.
    """

    comms_estimate: float
    comp_estimate: float

    def total(self) -> float:
        """Their sum."""
        return self.comms_estimate + self.comp_estimate


class PlannerErrorType(Enum):
    """The kind of a `PlannerError`."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(PlanError):
    """A plan that cannot be made. It is also this library's `PlanError`.

    Args:
        message: its text.
        error_type: its kind.

    >>> PlannerError("no plan").error_type.value
    'other'
    """

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type = error_type

    def __reduce__(self) -> tuple[type[PlannerError], tuple[str, PlannerErrorType]]:
        return type(self), (str(self), self.error_type)
