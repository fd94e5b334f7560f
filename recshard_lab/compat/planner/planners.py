"""TorchRec's `EmbeddingShardingPlanner`: its arguments in its order.

Without parts it is this library's planner. With an enumerator, proposer, partitioner, performance model, callback, plan
loader or reservation of the user, it runs TorchRec's loop over them: enumerate, propose, partition, rate.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import inf
from typing import Any

from torch import nn

from recshard_lab.compat.planner.base import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlanLoader,
    Proposer,
    Stats,
)
from recshard_lab.compat.planner.constraints import ParameterConstraints
from recshard_lab.compat.planner.costs import PlannerError, PlannerErrorType
from recshard_lab.compat.planner.enumerators import EmbeddingEnumerator
from recshard_lab.compat.planner.hashes import hash_planner_context_inputs, hash_planner_context_inputs_str
from recshard_lab.compat.planner.offload import EmbeddingOffloadScaleupProposer
from recshard_lab.compat.planner.options import ShardingOption, reset_shard_rank
from recshard_lab.compat.planner.partitioners import GreedyPerfPartitioner
from recshard_lab.compat.planner.perf_models import NoopPerfModel
from recshard_lab.compat.planner.plans import (
    extract_plan,
    options_of_plan,
    to_sharding_plan,
    validate_compute_kernels,
    validate_rank_assignment,
)
from recshard_lab.compat.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from recshard_lab.compat.planner.reservations import HeuristicalStorageReservation
from recshard_lab.compat.planner.stats import EmbeddingStats
from recshard_lab.compat.planner.topology import Topology, ours_of, theirs_of
from recshard_lab.embedding import BaseEmbeddingConfig
from recshard_lab.planner import EmbeddingShardingPlanner as _Planner
from recshard_lab.planner import tables_of
from recshard_lab.planner.answers.why import Planned
from recshard_lab.sharding import ParameterConstraints as OurConstraints
from recshard_lab.sharding import PlanError, ShardingPlan, running_topology
from recshard_lab.sharding import Topology as OurTopology

Callback = Callable[[list[ShardingOption]], list[ShardingOption]]


class EmbeddingPlannerBase(_Planner, ABC):
    """The arguments that TorchRec's planners share. Subclass it for a planner of your own.

    Args:
        topology: TorchRec's or this library's `Topology`. Default: the running ranks.
        batch_size: samples per rank. Default: 512.
        enumerator, storage_reservation, callbacks: parts, see `EmbeddingShardingPlanner`.
        stats: one or more `Stats` that receive the plan. Default: `EmbeddingStats`.
        constraints: table name -> constraints.
        debug: print the plan and its costs.
        timeout_seconds: of the search.
        heuristical_storage_reservation_percentage: of the default reservation in TorchRec's loop.
        options: further arguments of this library's planner.

    Raises:
        AssertionError: a timeout that is not positive.
    """

    def __init__(
        self,
        topology: Topology | OurTopology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: Any = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints | OurConstraints] | None = None,
        debug: bool = False,
        callbacks: list[Callback] | None = None,
        timeout_seconds: int | None = None,
        heuristical_storage_reservation_percentage: float = 0.15,
        **options: Any,
    ) -> None:
        if timeout_seconds is not None:
            if not timeout_seconds > 0:
                raise AssertionError(f"timeout_seconds must be positive, got {timeout_seconds!r}. Fix: pass 60")
            options.setdefault("time_limit_s", timeout_seconds)
        ours = ours_of(topology) or running_topology()
        hooks = storage_reservation if hasattr(storage_reservation, "topology") else None
        super().__init__(ours, batch_size or None, debug=debug, storage_reservation=hooks, **options)
        self._settings = {"batch_size": batch_size or None, "debug": debug, "storage_reservation": hooks, **options}
        self._ours, self._batch_size = ours, self.workload.batch_size
        self._topology = topology if isinstance(topology, Topology) else theirs_of(ours)
        self._constraints: dict[str, Any] = dict(constraints or {})
        self._enumerator, self._callbacks = enumerator, list(callbacks or ())
        self._storage_reservation = storage_reservation or HeuristicalStorageReservation(
            heuristical_storage_reservation_percentage
        )
        self._stats = [EmbeddingStats()] if stats is None else list(stats) if isinstance(stats, Sequence) else [stats]
        self._debug, self._timeout_seconds = debug, timeout_seconds
        self._reserved: Topology | None = None
        self._last_call: tuple[nn.Module, list[Any]] | None = None

    @abstractmethod
    def plan(self, module: Any, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """A plan for the embedding collections inside `module`."""

    def hash_planner_context_inputs(self) -> int:
        """A hash of topology, batch size, options, reservation and constraints, as integer.

        Raises:
            AssertionError: before the first plan.
        """
        return hash_planner_context_inputs(*self._context())

    def hash_planner_context_inputs_str(self) -> str:
        """The same as text.

        Raises:
            AssertionError: before the first plan.
        """
        found: str = hash_planner_context_inputs_str(*self._context())
        return found

    def _context(self) -> tuple[Any, ...]:
        if self._enumerator is None and self._last_call is not None:
            self._enumerated(*self._last_call)
        if self._enumerator is None:
            raise AssertionError(
                "the planner's context has no hash before a plan. Fix: call planner.plan(module) first"
            )
        return self._topology, self._batch_size, self._enumerator, self._storage_reservation, self._constraints

    def _enumerated(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        """The options of all tables; keeps the enumerator and the reserved devices."""
        reserve = getattr(self._storage_reservation, "reserve", None)
        if reserve is None:  # a reservation of this library
            self._reserved = theirs_of(self._storage_reservation.topology(self._ours))
        else:
            self._reserved = reserve(
                topology=self._topology,
                batch_size=self._batch_size,
                module=module,
                sharders=sharders,
                constraints=self._constraints,
            )
        if self._enumerator is None:
            self._enumerator = EmbeddingEnumerator(
                topology=self._topology, batch_size=self._batch_size, constraints=self._constraints
            )
        return self._enumerator.enumerate(module=module, sharders=sharders)

    def _by_this_library(self, found: Mapping[str, Sequence[BaseEmbeddingConfig]]) -> _Planner:
        """This library's planner with these settings, and its constraints of the tables."""
        named = {table.name: table for tables in found.values() for table in tables}
        unknown = [name for name in self._constraints if name not in named]
        if unknown and found:
            warnings.warn(f"constraints name a table {unknown[0]!r} that the module does not have", stacklevel=4)
        try:
            limits = {
                name: limit.ours(named[name]) if isinstance(limit, ParameterConstraints) else limit
                for name, limit in self._constraints.items()
                if name in named
            }
        except PlannerError:
            raise
        except ValueError as error:
            raise PlannerError(str(error), PlannerErrorType.STRICT_CONSTRAINTS) from error
        return _Planner(self._ours, constraints=limits, **self._settings)

    def _log(
        self,
        plan: ShardingPlan,
        options: list[ShardingOption],
        counts: tuple[int, int],
        begun: float,
        sharders: list[Any],
    ) -> None:
        for stats in self._stats:
            stats.log(
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=counts[0],
                num_plans=counts[1],
                run_time=time.perf_counter() - begun,
                best_plan=options,
                constraints=self._constraints or None,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
                debug_stats=PlanDebugStats(type(self).__name__, self._timeout_seconds),
            )


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """`recshard_lab.EmbeddingShardingPlanner` with the arguments of TorchRec, in its order.

    Without parts, this library's planner makes the plan. With any part of the loop (`enumerator`, `proposer`,
    `partitioner`, `performance_model`, `callbacks`, `plan_loader`, a `StorageReservation` of yours, or a topology whose
    ranks differ), the plan is the best rated proposal that the partitioner can place, and costs are those of the
    enumerator's estimators.

    Args:
        topology, batch_size, storage_reservation, stats, constraints, debug, timeout_seconds: as of
            `EmbeddingPlannerBase`.
        enumerator: lists the options of tables. Default: `EmbeddingEnumerator`.
        proposer: one or more. Default: grid search, two greedy proposers, uniform, and offload scale-up.
        partitioner: places proposals. Default: `GreedyPerfPartitioner`.
        performance_model: rates placed proposals. Default: the slowest rank's time.
        callbacks: functions that take and return the best plan's options.
        plan_loader: loads a stored plan in place of the search.
        options: further arguments of this library's planner, without parts of the loop.

    Raises:
        AssertionError: a timeout that is not positive. ValueError: `options` with parts of the loop.

    >>> planner = EmbeddingShardingPlanner(Topology(2, "cpu"), 64, None, None, None, None, None, None, {}, False)
    >>> planner.workload.batch_size
    64
    """

    def __init__(
        self,
        topology: Topology | OurTopology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: Any = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints | OurConstraints] | None = None,
        debug: bool = False,
        callbacks: list[Callback] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            topology,
            batch_size,
            enumerator,
            storage_reservation,
            stats,
            constraints,
            debug,
            callbacks,
            timeout_seconds,
            **options,
        )
        for name, kind, part in (
            ("enumerator", Enumerator, enumerator),
            *(("proposer", Proposer, each) for each in _listed(proposer)),
            ("partitioner", Partitioner, partitioner),
            ("performance_model", PerfModel, performance_model),
            ("plan_loader", PlanLoader, plan_loader),
            *(("stats", Stats, each) for each in _listed(stats)),
        ):
            _check_part(name, kind, part)
        parts = (enumerator, proposer, partitioner, performance_model, plan_loader, *self._callbacks)
        own_reservation = storage_reservation is not None and not hasattr(storage_reservation, "topology")
        self._has_parts = any(part is not None for part in parts) or own_reservation or not self._topology.is_uniform
        if self._has_parts and options:
            raise ValueError(
                f"{', '.join(options)} are arguments of this library's search, which a part of TorchRec's loop "
                f"replaces. Fix: omit them, or the parts"
            )
        self._user_stats = stats is not None
        self._partitioner = partitioner or GreedyPerfPartitioner()
        self._perf_model = performance_model or NoopPerfModel(self._topology)
        self.plan_loader = plan_loader
        if proposer is None:
            self._proposers: list[Proposer] = [
                GridSearchProposer(),
                GreedyProposer(),
                GreedyProposer(use_depth=False),
                UniformProposer(),
                EmbeddingOffloadScaleupProposer(),
            ]
        else:
            self._proposers = _listed(proposer)
        self._counts = (0, 0)

    def plan(self, module: Any, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """A plan for every embedding collection that a sharder takes.

        Args:
            module: the model. sharders: default: those of all collections.

        Raises:
            PlannerError: the tables do not fit, or a constraint cannot be met.
        """
        begun = time.perf_counter()
        takes = _sharders(sharders)
        if not self._has_parts:
            plan = self._search(module, sharders)
            self._last_call = (module, takes)
            if self._user_stats:
                enumerator = self._context()[2]
                options = options_of_plan(plan, module, takes, self._batch_size, self._constraints)
                enumerator.populate_estimates(options)
                self._log(plan, options, (1, 1), begun, takes)
            return plan
        space = self._enumerated(module, takes)
        if not space:
            return ShardingPlan({})
        best = self._loaded(space) or self._best(space, begun)
        for callback in self._callbacks:
            best = callback(best)
        validate_compute_kernels(best)
        found = tables_of(module)
        own = {option.path: found[option.path] for option in best if option.path in found}
        plan = to_sharding_plan(best, self._topology)
        validate_rank_assignment(plan, self._topology)
        top = self._topology
        plan = plan.resolved(own, top.world_size, top.local_world_size)
        plan.validate(own, top.world_size)
        plan.planned = Planned.by(self._by_this_library(own), own)
        if self._debug:
            print(plan.show(), plan.estimate, sep="\n\n")
        self._log(plan, best, self._counts, begun, takes)
        return plan

    def plan_tables(
        self, tables: Sequence[BaseEmbeddingConfig], module_path: str = "", *, explain: bool = True
    ) -> ShardingPlan:
        """A plan of this library's search for tables that no module holds yet.

        Raises:
            PlannerError: the tables do not fit, or the planner has parts of TorchRec's loop, which need a module.
        """
        if self._has_parts:
            raise PlannerError("parts of TorchRec's loop need a module. Fix: planner.plan(module, sharders)")
        return self._by_this_library({module_path: tables}).plan_tables(tables, module_path, explain=explain)

    def _search(self, module: Any, sharders: Sequence[Any] | None) -> ShardingPlan:
        """The plan of this library's search."""
        found = tables_of(module) if callable(getattr(module, "named_modules", None)) else {}
        try:
            return self._by_this_library(found).plan(module, sharders)
        except PlannerError:
            raise
        except PlanError as error:
            fits = "not fit" not in str(error)
            kind = PlannerErrorType.STRICT_CONSTRAINTS if fits else PlannerErrorType.INSUFFICIENT_STORAGE
            raised = PlannerError(str(error), kind)
            raised.search = error.search
            raise raised from None

    def _loaded(self, space: list[ShardingOption]) -> list[ShardingOption] | None:
        """The plan of the plan loader, for these inputs."""
        stored = None if self.plan_loader is None else self.plan_loader.load()
        if self.plan_loader is None or not stored:
            return None
        context = self.plan_loader.plan_context_hash()
        if context is not None and context != self.hash_planner_context_inputs_str():
            raise PlannerError(
                f"the loaded plan was made for context {context!r:.40}, which is not this planner's. Fix: plan again, "
                f"without plan_loader",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        return extract_plan(space, stored)

    def _best(self, space: list[ShardingOption], begun: float) -> list[ShardingOption]:
        """The best rated proposal, with ranks.

        Raises:
            PlannerError: no proposal can be placed.
        """
        assert self._reserved is not None
        seen: dict[tuple[int, ...], tuple[bool, list[ShardingOption] | None, float | None]] = {}
        best: list[ShardingOption] | None = None
        least, tried, placed = inf, 0, 0
        last: PlannerError | None = None
        for proposer in self._proposers:
            proposer.load(search_space=space, enumerator=self._enumerator)
        for proposer in self._proposers:
            proposal = proposer.propose()
            while proposal is not None:
                if self._timeout_seconds is not None and time.perf_counter() - begun > self._timeout_seconds:
                    break
                key = tuple(sorted(map(hash, proposal)))
                if key not in seen:
                    tried += 1
                    devices = deepcopy(self._reserved)
                    try:
                        plan = self._partitioner.partition(proposal=proposal, storage_constraint=devices)
                        rating = self._perf_model.rate(plan=plan)
                        placed += 1
                        if rating < least:
                            best, least = deepcopy(plan), rating
                        seen[key] = (True, plan, rating)
                    except PlannerError as error:
                        last = error
                        seen[key] = (False, None, None)
                fits, plan_of, rated = seen[key]
                proposer.feedback(
                    partitionable=fits, plan=plan_of or proposal, perf_rating=rated, storage_constraint=self._reserved
                )
                reset_shard_rank(proposal)
                proposal = proposer.propose()
        self._counts = (tried, placed)
        if best is None:
            raise PlannerError(
                f"none of {tried} proposals fits on {self._topology.world_size} ranks with "
                f"{self._reserved.devices[0].storage} free each. The last reason: {last}. Fix: more ranks or memory, "
                f"or fewer constraints",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        return best


def _sharders(sharders: Sequence[Any] | None) -> list[Any]:
    """The sharders, or those of all collections."""
    if sharders is not None:
        return list(sharders)
    from recshard_lab.distributed import get_default_sharders

    return list(get_default_sharders())


def _listed(parts: Any) -> list[Any]:
    """One part, or several, as a list."""
    return list(parts) if isinstance(parts, list | tuple) else [parts]


def _check_part(name: str, kind: type, part: Any) -> None:
    """Refuses a part without the methods of its abstract class. It need not be a subclass.

    Raises:
        ValueError: names the missing methods.
    """
    methods: list[str] = sorted(getattr(kind, "__abstractmethods__") - {"__init__"})  # noqa: B009
    known = [] if isinstance(part, str) else methods  # a str has a method `partition`
    missing = [method for method in methods if method not in known or not callable(getattr(part, method, None))]
    if part is not None and missing:
        raise ValueError(
            f"{name} got {part!r:.80}, which has no method {', '.join(missing)}. Fix: pass an object of "
            f"class {kind.__name__} in torchrec.distributed.planner.types"
        )
