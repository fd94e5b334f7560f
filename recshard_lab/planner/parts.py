"""The parts of a planner that you can replace, as small protocols, and the parts that the library has.

Any object with the right method fits. Pass it to `EmbeddingShardingPlanner`::

    proposers=[...]           Proposer            ways to split one table (default: the registered schemes)
    cost_model=...            a CostModel class   the formulas that a plan is scored by
    search=...                PlanSearch          chooses shards and ranks of all tables
    rater=...                 Rater               picks one of the search's finished plans
    storage_reservation=...   StorageReservation  memory that plans leave free
    reporters=[...]           Reporter            receives every finished plan
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.estimate import Estimate, estimate_loads, plan_loads
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Proposal,
    ShardingPlan,
    Topology,
    scheme_names,
)


class Proposer(Protocol):
    """Proposes ways to split one table. Every registered scheme is a proposer.

    >>> from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner
    >>> class Halves:
    ...     def propose(self, table, topology, constraints=None):
    ...         middle, cols = table.num_embeddings // 2, (0, table.embedding_dim)
    ...         yield Proposal("halves", (((0, middle), cols), ((middle, table.num_embeddings), cols)))
    >>> movies = EmbeddingBagConfig(1000, 16, name="movies", feature_names=["seen"])
    >>> print(EmbeddingShardingPlanner(Topology(4), proposers=[Halves()]).plan_tables([movies]))
    table   size        scheme  kernel  ranks  shards
    movies  1,000 x 16  halves  fused   0-1    2 x [500 x 16]
    """

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterable[Proposal]:
        """Ways to split `table`; empty if there are none."""


class PlanSearch(Protocol):
    """Chooses shards and ranks of all tables.

    >>> from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner
    >>> class FirstRank:
    ...     def search(self, request):
    ...         whole = [next(p for p in request.proposals(t) if len(p.rects) == 1) for t in request.tables]
    ...         return [proposal.placed([0]) for proposal in whole]
    >>> movies = EmbeddingBagConfig(1000, 16, name="movies", feature_names=["seen"])
    >>> EmbeddingShardingPlanner(Topology(4), search=FirstRank()).plan_tables([movies]).tables()["movies"].ranks
    [0]
    """

    def search(self, request: "PlanRequest") -> Sequence[ParameterSharding]:
        """One sharding per table, in the order of ``request.tables``. Raise `PlanError` if no plan fits."""


class Rater(Protocol):
    """Rates a finished plan. The planner returns the plan with the lowest rating among those that its search found."""

    def rate(self, plan: ShardingPlan) -> float:
        """Less is better. ``plan.estimate`` has the predicted costs."""


class Reporter(Protocol):
    """Receives every plan that a planner makes, for logs and statistics."""

    def report(self, plan: ShardingPlan, seconds: float) -> None:
        """Called once per plan.

        Args:
            plan: the plan. ``plan.estimate`` has its costs; ``plan.planned`` its tables and the planner's settings.
            seconds: of the planning.
        """


class StorageReservation(Protocol):
    """Memory that plans leave free."""

    def topology(self, topology: Topology) -> Topology:
        """The ranks to plan for, for example with another `reserve_fraction`."""

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The training step to plan for. `tables` are the paths of the embedding collections inside `module`."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The input of a `PlanSearch`.

    Attributes:
        tables: T configs.
        topology: the ranks.
        workload: the training step.
        constraints: table name -> constraints.
        model: the cost model of `tables`.
        route: the only output path for all tables, or None.
    """

    tables: tuple[BaseEmbeddingConfig, ...]
    topology: Topology
    workload: Workload
    constraints: Mapping[str, ParameterConstraints]
    model: CostModel
    route: str | None = None

    @cached_property
    def _proposals(self) -> list[list[Proposal]]:
        from recshard_lab.planner.search.options import options_of

        options = options_of(self.model, self.tables, self.constraints, self.route)
        return [list({id(option.proposal): option.proposal for option in own}.values()) for own in options]

    def proposals(self, table: BaseEmbeddingConfig) -> list[Proposal]:
        """The ways to split `table` that its constraints allow.

        Raises:
            PlanError: a table that cannot be split under its constraints.
        """
        return self._proposals[next(at for at, config in enumerate(self.tables) if config is table)]

    def estimate(self, shardings: Sequence[ParameterSharding]) -> Estimate:
        """The predicted costs of one sharding per table."""
        pairs = list(zip(self.tables, shardings, strict=True))
        return estimate_loads(self.model, plan_loads(self.model, pairs), pairs)


def checked_part(argument: str, part: Any, method: str) -> Any:
    """`part`, an instance with this method.

    Raises:
        ValueError: a class, or an object without the method.

    >>> checked_part("search", "greedy", "search")
    Traceback (most recent call last):
    ValueError: search='greedy' has no method search(...). Fix: pass an object that has it; see recshard_lab/planner...
    """
    if isinstance(part, type):
        raise ValueError(f"{argument}={part.__name__} is a class. Fix: pass an instance, {argument}={part.__name__}()")
    if not callable(getattr(part, method, None)):
        raise ValueError(
            f"{argument}={part!r:.80} has no method {method}(...). Fix: pass an object that has it; see "
            f"recshard_lab/planner/parts.py"
        )
    return part


def searched(search: PlanSearch, request: PlanRequest) -> list[ParameterSharding]:
    """The result of a custom search, checked: one sharding per table that fits in memory.

    Raises:
        PlanError: another result, or a plan that exceeds a rank's memory. The error names the search.
    """
    name = type(search).__name__
    shardings = search.search(request)
    if not isinstance(shardings, Sequence) or not all(isinstance(entry, ParameterSharding) for entry in shardings):
        raise PlanError(
            f"{name}.search returned {shardings!r:.80}, expected a list of ParameterSharding. Fix: return one per table"
        )
    if len(shardings) != len(request.tables):
        raise PlanError(
            f"{name}.search returned {len(shardings)} shardings for {len(request.tables)} tables. Fix: return one per "
            f"table, in the order of request.tables"
        )
    top = request.topology
    full = [
        sharding.resolved(table, top.world_size, top.local_world_size)
        for table, sharding in zip(request.tables, shardings, strict=True)
    ]
    found = request.estimate(full)
    if not found.fits:
        rank = int((found.held_bytes - found.usable_bytes).argmax())
        raise PlanError(
            f"{name}.search returned a plan that does not fit: rank {rank} holds {found.held_bytes[rank] / 1e9:.3g} GB "
            f"and {found.usable_bytes[rank] / 1e9:.3g} GB are usable. Fix: return only plans for which "
            f"request.estimate(shardings).fits is True"
        )
    return full


def rated(rater: Rater, plans: Sequence[ShardingPlan]) -> ShardingPlan:
    """The plan with the lowest rating; the first of equals.

    Raises:
        ValueError: a rating that is not a number.
    """
    best, least = plans[0], float("inf")
    for plan in plans:
        rating = rater.rate(plan)
        if not isinstance(rating, int | float) or rating != rating:
            raise ValueError(
                f"{type(rater).__name__}.rate returned {rating!r:.80}. Fix: return a number, less is better"
            )
        if rating < least:
            best, least = plan, rating
    return best


@dataclass(frozen=True)
class FixedPercentageStorageReservation:
    """Reserves a share of every rank's memory.

    Args:
        percentage: the share, from 0 to below 1. It replaces ``Topology.reserve_fraction``.

    Raises:
        ValueError: a share outside [0, 1).

    >>> FixedPercentageStorageReservation(0.25).topology(Topology(2, ddr_cap=400)).free_memory_bytes()
    300
    """

    percentage: float

    def __post_init__(self) -> None:
        if not 0 <= self.percentage < 1:
            raise ValueError(f"percentage must be in [0, 1), got {self.percentage!r}. Fix: 0.15 for 15 percent")

    def topology(self, topology: Topology) -> Topology:
        """The same ranks with that share reserved."""
        return replace(topology, reserve_fraction=self.percentage)

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The same step."""
        return workload


@dataclass(frozen=True)
class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """Reserves a share of every rank's memory, and memory for the model's dense parameters.

    The planner counts the buffers of ids and rows itself; they need no reservation.

    Args:
        percentage: the share.
        parameter_multiplier: bytes reserved per byte of dense parameters (weight, gradient, optimizer state).
        dense_tensor_estimate: bytes of dense parameters. Default: counted in the module.
    """

    parameter_multiplier: float = 6.0
    dense_tensor_estimate: int | None = None

    def workload(self, workload: Workload, module: Any, tables: Collection[str]) -> Workload:
        """The same step with the dense parameters of `module`: all parameters outside the paths `tables`."""
        if self.dense_tensor_estimate is not None:
            count = self.dense_tensor_estimate // 4
        else:
            within = tuple(f"{path}." if path else "" for path in tables)
            count = sum(p.numel() for name, p in module.named_parameters() if not name.startswith(within))
        return replace(workload, dense_parameters=count, dense_bytes_per_parameter=4 * self.parameter_multiplier)


def within_sharder(
    sharder: Any,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    compute_device: str,
) -> dict[str, ParameterConstraints]:
    """`constraints`, with those of `tables` narrowed to the schemes and kernels that a sharder allows.

    Args:
        sharder: may have ``sharding_types(compute_device)`` and ``compute_kernels(sharding_type, compute_device)``.
            A method that returns every value does not narrow.
        tables: the tables of the sharder's module.
        constraints: table name -> constraints.
        compute_device: "cpu" or "cuda".

    Raises:
        PlanError: a table's constraint and the sharder have no value in common.
    """
    types = _listed(getattr(sharder, "sharding_types", None), compute_device)
    types = [] if set(types) >= set(scheme_names()) else types
    first = types[0] if types else scheme_names()[0]
    kernels = _listed(getattr(sharder, "compute_kernels", None), first, compute_device)
    kernels = [] if set(kernels) >= {str(kernel) for kernel in EmbeddingComputeKernel} else kernels
    narrowed = dict(constraints)
    for table in tables if types or kernels else ():
        constraint = narrowed.get(table.name) or ParameterConstraints()
        narrowed[table.name] = replace(
            constraint,
            sharding_types=_common(constraint.sharding_types, types, "sharding_types", table, sharder),
            compute_kernels=_common(constraint.compute_kernels, kernels, "compute_kernels", table, sharder),
        )
    return narrowed


def _listed(method: Any, *args: str) -> list[str]:
    return [str(getattr(entry, "value", entry)) for entry in method(*args)] if callable(method) else []


def _common(
    required: Sequence[str] | None, allowed: list[str], what: str, table: BaseEmbeddingConfig, sharder: Any
) -> list[str] | None:
    if not allowed:
        return None if required is None else list(required)
    common = [entry for entry in (allowed if required is None else required) if entry in allowed]
    if not common:
        raise PlanError(
            f"table {table.name!r} is constrained to {what} {list(required or ())}, but {type(sharder).__name__} "
            f"allows {allowed}. Fix: an entry that both have"
        )
    return common
