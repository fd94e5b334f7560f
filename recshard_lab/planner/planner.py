"""Makes plans: ``EmbeddingShardingPlanner(topology=...).plan(module)``, or ``rs.plan(tables, 8)`` in one call."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.answers.refusals import Refused, refusal
from recshard_lab.planner.answers.text import use_one_of
from recshard_lab.planner.answers.why import Planned, Request, requested
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.estimate import COST_MODELS, cost_model_named, estimate_loads
from recshard_lab.planner.model.loads import K
from recshard_lab.planner.parts import (
    PlanRequest,
    PlanSearch,
    Proposer,
    Rater,
    Reporter,
    StorageReservation,
    checked_part,
    rated,
    searched,
    within_sharder,
)
from recshard_lab.planner.search.greedy import solve
from recshard_lab.planner.search.options import DoesNotFit
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    ShardingPlan,
    Topology,
    find_collections,
    running_topology,
)
from recshard_lab.sharding.plan.sharding_plan import Tables
from recshard_lab.sharding.plan.types import check_route

SOLVERS = ("greedy", "exact")
RATED = 64  # plans at most that a rater compares


@checks_arguments
class EmbeddingShardingPlanner:
    """Chooses scheme and ranks of every table: the shortest predicted step for which every rank's memory suffices.

    The plan carries the results: ``plan.estimate``, ``plan.bound_ms``, ``plan.gap``, ``plan.explain(table)``.

    Args:
        topology: the ranks. Default: those of the running process group (1 without a group), on cuda if each can have
            a GPU.
        batch_size: samples per rank. Default: the workload's (512).
        constraints: table name -> `ParameterConstraints`.
        workload: the training step.
        local_search_passes: rounds of improvement after the greedy starts, at most 3; 0 for none.
        storage_reservation: memory to leave free. Default: ``topology.reserve_fraction``.
        debug: print every plan and its estimate.
        route: the only output path ("direct", "reduce_scatter", "two_hop") of every table to which it applies: two
            hops to pooled tables that are not replicated, a reduce-scatter to those of them with row shards. A table's
            own constraint overrides it. Default: the cheapest path per table.
        solver: "greedy" (milliseconds), or "exact": the greedy plan, then a MILP that improves it or proves its gap.
        time_limit_s: seconds for the MILP.
        cost_model: "recshard", a training step; "latency", one batch of inference: forward alone, no optimizer in
            memory; "torchrec", the formulas of TorchRec 1.8's estimator, to compare with its plans; or a subclass of
            `CostModel`.
        keep_search: keep the plans that the search compares as ``plan.search``, which ``lab.views.planner_search``
            draws. The chosen plan is the same. Under "exact", keeping them is part of the time limit.
        proposers: replace the registered schemes (`Proposer`).
        search: replaces `solver` (`PlanSearch`).
        rater: picks among the plans that the search found (`Rater`).
        reporters: receive every plan (`Reporter`).

    Raises:
        ValueError: an unknown solver or cost model, a time limit that is not positive, a part without its method.

    >>> tables = [BaseEmbeddingConfig(name="movies", num_embeddings=1000, embedding_dim=16, feature_names=["movie"])]
    >>> plan = EmbeddingShardingPlanner(topology=Topology(2)).plan_tables(tables)
    >>> plan.tables()["movies"].sharding_type in ("table_wise", "data_parallel"), plan.estimate.fits, plan.gap < 0.1
    (True, True, True)
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        *,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        workload: Workload | None = None,
        local_search_passes: int = 3,
        route: str | None = None,
        storage_reservation: StorageReservation | None = None,
        debug: bool = False,
        solver: str = "greedy",
        time_limit_s: float = 60.0,
        cost_model: str | type[CostModel] = "recshard",
        keep_search: bool = False,
        proposers: Sequence[Proposer] | None = None,
        search: PlanSearch | None = None,
        rater: Rater | None = None,
        reporters: Sequence[Reporter] = (),
    ) -> None:
        self.topology = topology or running_topology()
        self.reservation, self.debug = storage_reservation, debug
        if storage_reservation is not None:
            checked_part("storage_reservation", storage_reservation, "workload")
            self.topology = checked_part("storage_reservation", storage_reservation, "topology").topology(self.topology)
        workload = workload or Workload()
        self.workload = workload if batch_size is None else replace(workload, batch_size=batch_size)
        self.constraints = dict(constraints or {})
        self.local_search_passes = local_search_passes
        self.route = None if route is None else check_route(route)
        if solver not in SOLVERS:
            raise ValueError(f"solver {solver!r} does not exist{use_one_of(solver, SOLVERS)}")
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s must be positive, got {time_limit_s!r}. Fix: time_limit_s=60")
        self.solver, self.time_limit_s = solver, time_limit_s
        self.cost_model = cost_model
        cost_model_named(cost_model)
        self.keep_search = keep_search
        self.proposers = (
            None if proposers is None else tuple(checked_part("proposers", p, "propose") for p in proposers)
        )
        self.search = None if search is None else checked_part("search", search, "search")
        if search is not None and (solver != "greedy" or keep_search or rater is not None):
            raise ValueError(
                f"search={type(search).__name__} replaces the built-in search, so solver, keep_search and rater do not "
                f"apply. Fix: pass search= alone"
            )
        self.rater = None if rater is None else checked_part("rater", rater, "rate")
        self.reporters = tuple(checked_part("reporters", reporter, "report") for reporter in reporters)

    @names_wrong_arguments
    def plan(self, module: Any, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """A plan for every embedding collection inside `module`.

        Args:
            module: a torch module. Collections have ``embedding_bag_configs()`` or ``embedding_configs()``.
            sharders: plan only modules whose type is the `module_type` of a sharder, with the ``sharding_types`` and
                ``compute_kernels`` that it allows. The tables of a module without tables are those that the sharder
                names. Default: all collections.

        Raises:
            PlanError: no collection; the tables do not fit; a sharder and a table's constraint have nothing in common.
        """
        if not callable(getattr(module, "named_modules", None)):
            raise PlanError(f"plan takes a torch module, got {module!r}. Fix: plan_tables for table configs")
        able = [sharder for sharder in sharders or () if getattr(sharder, "module_type", None) is not None]
        modules = [one for one in find_collections(module, able or None) if one.tables]
        found = {one.path: one.tables for one in modules}
        if not found:
            raise PlanError(
                f"{type(module).__name__} holds no embedding collection to shard. Fix: pass a module with "
                f"an EmbeddingBagCollection or EmbeddingCollection in it"
            )
        settings, constraints = copy(self), dict(self.constraints)
        if able:  # the workload may describe all tables of the module
            self.workload.check_names(_flat({**tables_of(module), **found}))
            settings.workload = self.workload.for_tables(_flat(found))
        for _, part, sharder, tables, _ in modules:
            if getattr(part, "is_weighted", bool)():
                weighted = {t.name: constraints.get(t.name) or ParameterConstraints() for t in tables}
                constraints |= {name: replace(entry, is_weighted=True) for name, entry in weighted.items()}
            if sharder is not None:
                constraints = within_sharder(sharder, tables, constraints, self.topology.compute_device)
            if getattr(sharder, "use_index_dedup", False):
                settings.workload = replace(settings.workload, index_dedup=True)
        if self.reservation is not None:
            settings.workload = self.reservation.workload(settings.workload, module, found)
        settings.constraints = constraints
        return settings._plan(found)

    def collective_plan(self, module: Any, sharders: Sequence[Any] | None = None, pg: Any = None) -> ShardingPlan:
        """`plan` on the first rank of `pg`, the same plan on every rank. Collective.

        Raises:
            PlanError: on every rank, if `plan` raised any error on the first.
        """
        dist: Any = sys.modules.get("torch.distributed")  # a running group has loaded it
        if dist is None or not (dist.is_available() and dist.is_initialized()):
            return self.plan(module, sharders)
        box: list[Any] = [None]
        cause: Exception | None = None
        mine: ShardingPlan | None = None
        if dist.get_rank(pg) == 0:
            try:
                box[0] = mine = self.plan(module, sharders)
            except PlanError as error:
                box[0] = error
            except Exception as error:
                cause, box[0] = error, PlanError(f"planning failed on rank 0: {type(error).__name__}: {error}")
        dist.broadcast_object_list(box, src=dist.get_global_rank(pg, 0) if pg is not None else 0, group=pg)
        if isinstance(box[0], PlanError):
            raise box[0] from cause
        plan: ShardingPlan = mine or box[0]  # the first rank's has the search
        return plan

    @names_wrong_arguments
    def record(self, plan: ShardingPlan, tables: Tables | None = None) -> Planned:
        """This planner's settings and the tables of a plan, which another planner may have made.

        Set it as ``plan.planned`` to give a plan from a file an estimate and explanations.

        Args:
            tables: configs, or module path -> configs. Default: those that `plan` was made for.

        Raises:
            PlanError: no planner made `plan`, and `tables` is None.
        """
        if tables is None:
            if plan.planned is None:
                raise PlanError(
                    "no planner made this plan, so its tables are unknown. Fix: pass tables=[...] beside planner="
                )
            tables = plan.planned.tables
        if not isinstance(tables, Mapping):
            path_of = {name: path for path, entries in plan.plan.items() for name in entries}
            grouped: dict[str, list[BaseEmbeddingConfig]] = {}
            for table in tables:
                grouped.setdefault(path_of.get(table.name, ""), []).append(table)
            tables = grouped
        return Planned.by(self, tables)

    @names_wrong_arguments
    def plan_tables(
        self, tables: Sequence[BaseEmbeddingConfig], module_path: str = "", *, explain: bool = True
    ) -> ShardingPlan:
        """A plan for tables that no module holds yet.

        Args:
            tables: their configs.
            module_path: path of the collection that will hold them.
            explain: whether a refusal names changes that help, for which several plans are tried (up to a second).
                With False it names only the table that does not fit.

        Raises:
            PlanError: the tables do not fit, or a constraint names an unknown table.
        """
        return self._plan({module_path: list(tables)}, explain)

    def model(self, tables: Sequence[BaseEmbeddingConfig]) -> CostModel:
        """The cost model of `tables` under this planner's settings."""
        made: Any = cost_model_named(self.cost_model)(tables, self.topology, self.workload, self.constraints)
        if not isinstance(made, CostModel):
            raise PlanError(
                f"cost_model={self.cost_model!r:.80} returned a {type(made).__name__}. Fix: pass a subclass of "
                f"CostModel, or one of {', '.join(COST_MODELS)}"
            )
        made.proposers = self.proposers
        return made

    def _plan(self, found: Mapping[str, Sequence[BaseEmbeddingConfig]], explain: bool = True) -> ShardingPlan:
        begun = perf_counter()
        owners = [(path, table) for path, tables in found.items() for table in tables]
        tables = [table for _, table in owners]
        _check_names(found, self.constraints)
        planned, model = Planned.by(self, found), self.model(tables)
        if self.search is not None:
            request = PlanRequest(tuple(tables), self.topology, self.workload, self.constraints, model, self.route)
            plan = _plan_of(owners, searched(self.search, request), self.topology)
            plan.validate(found, self.topology.world_size)
            plan.planned = planned
        else:
            plan = self._solved(model, owners, planned, explain)
        if self.debug:
            print(plan.show(), plan.estimate, sep="\n\n")
        for reporter in self.reporters:
            reporter.report(plan, perf_counter() - begun)
        return plan

    def _solved(
        self, model: CostModel, owners: list[tuple[str, BaseEmbeddingConfig]], planned: Planned, explain: bool
    ) -> ShardingPlan:
        """The built-in search's plan."""
        tables = [table for _, table in owners]
        record = None
        if self.keep_search or self.rater is not None:
            from recshard_lab.planner.search.record import Recorder  # loaded only if required

            record = Recorder()
        names = [(path, table.name) for path, table in owners]
        exact_s = self.time_limit_s if self.solver == "exact" else None
        try:
            solution = solve(model, tables, self.constraints, self.local_search_passes, self.route, exact_s, record)
        except (DoesNotFit, PlanError) as stuck:
            error: Any = stuck
            if isinstance(stuck, DoesNotFit):
                error = refusal(Refused(self, tables, stuck.table, stuck.host), explain)
            if record is not None and record.begun and self.keep_search:
                error.search = record.trace(model, names)
            raise error from None
        trace = None if record is None else record.trace(model, names, solution.placements, solution.bound_ms)
        shardings = [placed.sharding() for placed in solution.placements]
        plan = _plan_of(owners, shardings, self.topology)
        plan.validate(planned.tables, self.topology.world_size)  # proposals of a custom scheme may have holes
        plan.planned = replace(planned, search_bound_ms=solution.bound_ms)
        if self.rater is not None and trace is not None:
            others = sorted((one for one in trace.candidates if one.fits), key=lambda one: one.step_ms)[:RATED]
            plans = [plan, *(trace.plan(one) for one in (*others, *trace.single_schemes.values()) if one.fits)]
            for other in plans[1:]:
                other.planned = plan.planned
            plan = rated(self.rater, plans)
        else:
            loads = np.zeros((K, self.topology.world_size))  # the search's own, which takes less time than from shards
            for placement in solution.placements:
                loads += placement.loads(self.topology)
            found = estimate_loads(model, loads, list(zip(tables, shardings, strict=True)), len(planned.tables))
            plan.remember("estimate", replace(found, lower_bound=solution.bound_ms))
        if self.keep_search and trace is not None:
            plan.search = replace(trace, lower_bound=plan.bound_ms)
        return plan


@names_wrong_arguments
def plan(
    tables: Any,
    topology: Topology | str | int | None = None,
    /,
    *,
    workload: Workload | None = None,
    constraints: Mapping[str, Request] | None = None,
    cost_model: str | type[CostModel] = "recshard",
    **schemes: Request,
) -> ShardingPlan:
    """Plans tables in one call: ``rs.plan(tables, "h100x64", movies="row_wise")``.

    Args:
        tables: configs; module path -> configs; a torch module; or a source for `read_source` ("tables.yaml",
            "package.module:factory").
        topology: a `Topology`, a preset's name ("h100x64"), or a number of CPU ranks. Default: the running ranks.
        workload: the training step. Default: the source's own figures.
        constraints: table -> a scheme, a list of schemes, or `ParameterConstraints`; for table names that a keyword
            cannot have.
        cost_model: as of `EmbeddingShardingPlanner`: "latency" plans for inference.
        schemes: the same as keyword arguments. The planner chooses the ranks: ``movies="row_wise"`` may split the rows
            over a half or a quarter of them if that costs less. For all four ranks, as in TorchRec, pass
            ``movies=ParameterConstraints(["row_wise"], ranks=range(4))``.

    Returns:
        The plan; ``plan.estimate`` has its costs. `EmbeddingShardingPlanner` has more options.

    Raises:
        PlanError: an unknown table or scheme, or tables that do not fit. ValueError: an unknown topology or source.

    >>> from recshard_lab import EmbeddingBagConfig
    >>> sizes = {"movies": 40_000, "users": 20_000}
    >>> tables = [EmbeddingBagConfig(n, 64, name=name, feature_names=[name]) for name, n in sizes.items()]
    >>> print(plan(tables, 2, movies="row_wise", users=["table_wise", "column_wise"]).tables()["movies"].sharding_type)
    row_wise
    """
    module, source = None, None
    if isinstance(tables, str) or hasattr(tables, "__fspath__"):
        from recshard_lab.sources import read_source

        source = read_source(tables)
        module, tables = source.module, source.tables
        workload = source.workload() if workload is None else workload
    elif callable(getattr(tables, "named_modules", None)):
        module, tables = tables, tables_of(tables)
    else:
        grouped = tables if isinstance(tables, Mapping) else {"": tables}
        for configs in grouped.values():
            if not isinstance(configs, Sequence) or not all(isinstance(each, BaseEmbeddingConfig) for each in configs):
                raise PlanError(
                    f"plan takes table configs, a torch module or a source such as 'tables.yaml', got {tables!r:.80}. "
                    f"Fix: pass [EmbeddingBagConfig(...), ...]"
                )
        tables = {path: list(configs) for path, configs in grouped.items()}
    names = [table.name for configs in tables.values() for table in configs]
    limits: dict[str, ParameterConstraints] = {}
    for name, request in [*(constraints or {}).items(), *schemes.items()]:
        if name not in names:
            raise PlanError(
                f"plan got {name}={request!r:.60}, but table {name!r} does not exist{use_one_of(name, names)}"
            )
        if name in limits:
            raise PlanError(f"table {name!r} is in constraints= and a keyword argument. Fix: pass it once")
        limits[name] = requested(ParameterConstraints(), request)
    planner = EmbeddingShardingPlanner(
        _topology_of(topology), constraints=limits, workload=workload, cost_model=cost_model
    )
    return planner.plan(module) if module is not None else planner._plan(tables)


def tables_of(module: Any) -> dict[str, list[BaseEmbeddingConfig]]:
    """Module path -> tables of every embedding collection inside a torch module. The root's path is ``""``.

    Paths in a `DistributedModelParallel` are those of the model inside it.
    """
    return {one.path: one.tables for one in find_collections(module)}


def _flat(found: Mapping[str, Sequence[BaseEmbeddingConfig]]) -> list[BaseEmbeddingConfig]:
    """The tables of all modules."""
    return [table for tables in found.values() for table in tables]


def _topology_of(topology: Topology | str | int | None) -> Topology | None:
    if isinstance(topology, str):
        return Topology.preset(topology)
    if isinstance(topology, int) and not isinstance(topology, bool):
        return Topology(topology)
    if topology is None or isinstance(topology, Topology):
        return topology
    raise ValueError(
        f"topology must be a Topology, a preset's name or a number of ranks, got {topology!r:.80}. Fix: pass topology=8"
    )


def _check_names(
    found: Mapping[str, Sequence[BaseEmbeddingConfig]], constraints: Mapping[str, ParameterConstraints]
) -> None:
    """Raises a `PlanError` for two tables of one name in a module, and for constraints of unknown tables."""
    for path, tables in found.items():
        twice = [name for name, count in Counter(table.name for table in tables).items() if count > 1]
        if twice:
            where = f" of module {path!r}" if path else ""
            raise PlanError(f"two tables{where} are named {twice[0]!r}: plans refer to tables by name. Fix: rename one")
    names = [table.name for table in _flat(found)]
    for name in constraints:
        if name not in names:
            raise PlanError(f"constraints name a table {name!r} that does not exist{use_one_of(name, names)}")


def _plan_of(
    owners: Sequence[tuple[str, BaseEmbeddingConfig]], shardings: Sequence[ParameterSharding], topology: Topology
) -> ShardingPlan:
    plan: dict[str, EmbeddingModuleShardingPlan] = {path: EmbeddingModuleShardingPlan() for path, _ in owners}
    for (path, table), sharding in zip(owners, shardings, strict=True):
        plan[path][table.name] = sharding.on_devices(topology.compute_device, topology.local_world_size)
    return ShardingPlan(plan)
