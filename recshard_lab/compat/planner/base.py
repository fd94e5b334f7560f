"""The parts of a planner that a user subclasses: TorchRec's abstract classes.

`EmbeddingShardingPlanner` calls them in this order: `StorageReservation.reserve`, `Enumerator.enumerate` (with its
`ShardEstimator`), then for each proposal `Proposer.propose`, `Partitioner.partition`, `PerfModel.rate` and
`Proposer.feedback`, and at the end `Stats.log`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import nn

from recshard_lab.compat.planner.constants import BATCH_SIZE
from recshard_lab.compat.planner.constraints import ParameterConstraints
from recshard_lab.compat.planner.options import ShardingOption
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.sharding import ShardingPlan

Constraints = dict[str, ParameterConstraints]


@dataclass
class SharderData:
    """What estimators need of a sharder.

    Args:
        fused_params: its settings. qcomm_dtype_sizes: collective -> bytes of a number in messages, forward and
            backward. storage_usage_type: the kind of sharder.
    """

    fused_params: dict[str, Any]
    qcomm_dtype_sizes: dict[str, tuple[float, float]]
    storage_usage_type: Any


class StorageReservation(ABC):
    """Memory that plans leave free."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[Any],
        constraints: Constraints | None = None,
    ) -> Topology:
        """A copy of the topology without the reserved bytes."""

    @property
    @abstractmethod
    def last_reserved_topology(self) -> Topology | None:
        """The last result of `reserve`."""


class PerfModel(ABC):
    """Rates a partitioned plan."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """Less is better."""


class ShardEstimator(ABC):
    """Sets the costs of shards."""

    @abstractmethod
    def __init__(self, topology: Topology, constraints: Constraints | None = None) -> None: ...

    @abstractmethod
    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: dict[str, SharderData]) -> None:
        """Sets ``perf`` or ``storage`` of every shard of the options."""


class Enumerator(ABC):
    """Lists the options of every table."""

    @abstractmethod
    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None: ...

    @abstractmethod
    def enumerate(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        """The options of all tables in `module`, with costs."""

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Sets the costs of options."""


class Proposer(ABC):
    """Proposes one option per table, again and again."""

    @abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes the options to choose from."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Takes the result of the last proposal: whether it fits, and its rating."""

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """One option per table; None at the end."""


class Partitioner(ABC):
    """Places the shards of a proposal."""

    @abstractmethod
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """The proposal with the rank of every shard set.

        Raises:
            PlannerError: it does not fit.
        """


@dataclass
class PlanDebugStats:
    """Facts of a planner's run for `Stats.log`.

    Args:
        planner_type: name of the planner's class. timeout_seconds: its limit.
    """

    planner_type: str
    timeout_seconds: int | None


class Stats(ABC):
    """Receives the finished plan."""

    @abstractmethod
    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Constraints | None = None,
        sharders: list[Any] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = False,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Reports on a plan."""


class PlanLoader(ABC):
    """Loads a stored plan."""

    @abstractmethod
    def load(self) -> dict[int, ShardingOption] | None:
        """``ShardingOption.storage_hash`` -> option with ranks; None if there is no plan."""

    @abstractmethod
    def plan_context_hash(self) -> str | None:
        """The hash of the context of the plan; None accepts every context."""
