"""The planner that TorchRec users call: ``EmbeddingShardingPlanner(topology=..., constraints=...).plan(module)``."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.allowed import within
from recshard_lab.planner.answers.refusals import Refused, refusal
from recshard_lab.planner.answers.why import Planned
from recshard_lab.planner.model.cost_models import cost_model_named
from recshard_lab.planner.model.estimate import Estimate, estimate_loads
from recshard_lab.planner.model.loads import K
from recshard_lab.planner.reservations import FixedPercentageStorageReservation
from recshard_lab.planner.search.greedy import solve_in_host
from recshard_lab.planner.search.options import DoesNotFit
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    Topology,
    configs_of,
    running_topology,
)
from recshard_lab.sharding.plan.sharding_plan import Tables
from recshard_lab.sharding.plan.types import check_route, nearest

if TYPE_CHECKING:
    from recshard_lab.planner.search.record import Recorder
    from recshard_lab.planner.search.trace import SearchTrace

SOLVERS = ("greedy", "exact")


@checks_arguments
class EmbeddingShardingPlanner:
    """Chooses scheme and ranks of every table so that the predicted step is short and every rank fits.

    Args:
        topology: the ranks; left out, as many as the running process group has (1 where none runs), on cuda where
            there is a GPU.
        batch_size: samples of one rank; the workload's (512) when left out.
        constraints: table name -> `ParameterConstraints`.
        workload: the step to plan for.
        local_search_passes: rounds of improvement after the greedy starts, at most 3; 0 for none.
        storage_reservation: memory to leave free; ``topology.reserve_fraction`` when left out.
        debug: print every plan made, with its estimate.
        route: the only route ("direct", "reduce_scatter", "two_hop") for every table to which it applies: two hops for
            pooled tables that are not replicated, a reduce-scatter for those of them whose rows are cut. A table's own
            constraint wins. Left out, each table's is the cheapest.
        solver: "greedy" (milliseconds), or "exact": the greedy plan, then a MILP that improves it or proves how near
            the best it is.
        time_limit_s: seconds for the MILP.
        cost_model: what a plan is scored by: "recshard", or "torchrec", the formulas of TorchRec 1.8's own estimator
            (see `planner/model/torchrec_cost.py`), for comparison with its plans.
        keep_search: keep every plan that is looked at as `last_search`, which ``lab.views.planner_search`` draws. The
            plan chosen is the same; under "exact" keeping is part of the time limit.

    Attributes:
        last_estimate: `Estimate` of the last plan made, None before; its `lower_bound` and `gap` say how far from the
            best of all placements the plan can be.
        last_planned: what it knows of the last plan made, which `ShardingPlan.explain` reads; None before.
        last_search: `SearchTrace` of the last plan asked for, made or refused; None without `keep_search`, and on all
            ranks but the first of a `collective_plan`.

    Raises:
        ValueError: a solver or a cost model that does not exist; a time limit that is not positive.

    >>> tables = [BaseEmbeddingConfig(name="movies", num_embeddings=1000, embedding_dim=16, feature_names=["movie"])]
    >>> planner = EmbeddingShardingPlanner(topology=Topology(2))
    >>> planner.plan_tables(tables).tables()["movies"].sharding_type in ("table_wise", "data_parallel")
    True
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        workload: Workload | None = None,
        *,
        local_search_passes: int = 3,
        route: str | None = None,
        storage_reservation: FixedPercentageStorageReservation | None = None,
        debug: bool = False,
        solver: str = "greedy",
        time_limit_s: float = 60.0,
        cost_model: str = "recshard",
        keep_search: bool = False,
    ) -> None:
        self.topology = topology or running_topology()
        self.reservation, self.debug = storage_reservation, debug
        if storage_reservation is not None:
            self.topology = storage_reservation.topology(self.topology)
        workload = workload or Workload()
        self.workload = workload if batch_size is None else replace(workload, batch_size=batch_size)
        self.constraints = dict(constraints or {})
        self.local_search_passes = local_search_passes
        self.route = None if route is None else check_route(route)
        if solver not in SOLVERS:
            raise ValueError(f"solver {solver!r} does not exist{nearest(solver, SOLVERS)}; known: {', '.join(SOLVERS)}")
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s must be positive, got {time_limit_s!r}")
        self.solver, self.time_limit_s = solver, time_limit_s
        self.cost_model = cost_model_named(cost_model).name
        self.last_estimate: Estimate | None = None
        self.last_planned: Planned | None = None
        self.keep_search = keep_search
        self.last_search: SearchTrace | None = None

    @names_wrong_arguments
    def plan(self, module: Any, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """A plan for every embedding collection inside `module`.

        Args:
            module: a torch module; collections are found by ``embedding_bag_configs()``/``embedding_configs()``.
            sharders: where given, only collections are planned whose type is the `module_type` of one of them, within
                the ``sharding_types`` and ``compute_kernels`` that it allows.

        Raises:
            PlanError: there is no collection, the tables do not fit, or a sharder allows nothing of what a table's
                constraint does.
        """
        if not callable(getattr(module, "named_modules", None)):
            raise PlanError(f"plan takes a torch module, got {module!r}. Fix: plan_tables for table configs")
        found, submodules = tables_of(module), dict(module.named_modules())
        kinds = tuple(s.module_type for s in sharders or () if getattr(s, "module_type", None) is not None)
        if kinds:
            found = {path: tables for path, tables in found.items() if isinstance(submodules[path], kinds)}
        if not found:
            raise PlanError(
                f"{type(module).__name__} holds no embedding collection to shard. Fix: pass a module with "
                f"an EmbeddingBagCollection or EmbeddingCollection in it"
            )
        constraints, workload = dict(self.constraints), self.workload
        for path, tables in found.items():
            if getattr(submodules[path], "is_weighted", bool)():
                weighted = {t.name: constraints.get(t.name) or ParameterConstraints() for t in tables}
                constraints |= {name: replace(own, is_weighted=True) for name, own in weighted.items()}
        if kinds:
            able = [s for s in sharders or () if getattr(s, "module_type", None) is not None]
            for path, tables in found.items():
                sharder = next(s for s in able if isinstance(submodules[path], s.module_type))
                constraints = within(sharder, tables, constraints, self.topology.compute_device)
                if getattr(sharder, "use_index_dedup", False):
                    workload = replace(workload, index_dedup=True)
        if self.reservation is not None:
            workload = self.reservation.workload(workload, module, found)
        return self._plan(found, constraints, workload)

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
        if dist.get_rank(pg) == 0:
            try:
                box[0] = (self.plan(module, sharders), self.last_estimate)
            except PlanError as error:
                box[0] = error
            except Exception as error:
                cause, box[0] = error, PlanError(f"planning failed on rank 0: {type(error).__name__}: {error}")
        dist.broadcast_object_list(box, src=dist.get_global_rank(pg, 0) if pg is not None else 0, group=pg)
        if isinstance(box[0], PlanError):
            raise box[0] from cause
        plan, self.last_estimate = box[0]
        self.last_planned = plan.planned
        return plan

    @names_wrong_arguments
    def knows(self, plan: ShardingPlan, tables: Tables | None = None) -> Planned:
        """What this planner knows of a plan that need not be its own, for `ShardingPlan.explain`.

        Args:
            tables: their configs, or module path -> configs; those it planned last when left out.

        Raises:
            PlanError: it has planned nothing yet, and there are no `tables`.
        """
        if tables is None:
            if self.last_planned is None:
                raise PlanError(
                    "this planner has planned nothing yet, so it knows no tables. Fix: pass tables=[...] too"
                )
            return self.last_planned
        if not isinstance(tables, Mapping):
            home = {name: path for path, own in plan.plan.items() for name in own}
            grouped: dict[str, list[BaseEmbeddingConfig]] = {}
            for table in tables:
                grouped.setdefault(home.get(table.name, ""), []).append(table)
            tables = grouped
        return Planned.by(self, tables, self.workload, self.constraints)

    @names_wrong_arguments
    def plan_tables(
        self, tables: Sequence[BaseEmbeddingConfig], module_path: str = "", *, explain: bool = True
    ) -> ShardingPlan:
        """A plan for tables that no module holds yet.

        Args:
            tables: their configs.
            module_path: of the collection that will hold them.
            explain: whether a refusal says what would fit, for which several plans are tried (up to a second);
                False only says what does not fit, in the time of a plan.

        Raises:
            PlanError: they do not fit, or a constraint names an unknown table.
        """
        return self._plan({module_path: list(tables)}, self.constraints, self.workload, explain)

    def _plan(
        self,
        found: Mapping[str, Sequence[BaseEmbeddingConfig]],
        constraints: Mapping[str, ParameterConstraints],
        workload: Workload,
        explain: bool = True,
    ) -> ShardingPlan:
        owners = [(path, table) for path, tables in found.items() for table in tables]
        tables = [table for _, table in owners]
        names = [table.name for table in tables]
        for path, own in found.items():
            twice = [name for name, count in Counter(table.name for table in own).items() if count > 1]
            if twice:
                where = f" of module {path!r}" if path else ""
                raise PlanError(f"two tables{where} are named {twice[0]!r}: plans know tables by name. Fix: rename one")
        for name in constraints:
            if name not in names:
                listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
                raise PlanError(
                    f"constraints name a table {name!r} that does not exist{nearest(name, names)}. Fix: use one of "
                    f"{listed}"
                )
        model = cost_model_named(self.cost_model)(tables, self.topology, workload, constraints)
        record = self._recorder()
        owned = [(path, table.name) for path, table in owners]
        exact_s = self.time_limit_s if self.solver == "exact" else None
        try:
            solution = solve_in_host(model, tables, constraints, self.local_search_passes, self.route, exact_s, record)
        except (DoesNotFit, PlanError) as stuck:
            if record is not None and record.begun:
                self.last_search = record.trace(model, owned)
            if isinstance(stuck, PlanError):
                raise
            request = (self.topology, workload, constraints, self.route, self.cost_model, self.local_search_passes)
            raise refusal(Refused(tables, stuck.table, *request, stuck.host), explain) from None
        if record is not None:
            self.last_search = record.trace(model, owned, solution.placements, solution.bound_ms)
        plan: dict[str, EmbeddingModuleShardingPlan] = {path: EmbeddingModuleShardingPlan() for path in found}
        pairs = [(table, placed.sharding()) for table, placed in zip(tables, solution.placements, strict=True)]
        for (path, table), (_, sharding) in zip(owners, pairs, strict=True):
            plan[path][table.name] = sharding
        loads = np.zeros((K, self.topology.world_size))
        for placement in solution.placements:
            loads += placement.loads(self.topology)
        self.last_estimate = replace(estimate_loads(model, loads, pairs, len(found)), lower_bound=solution.bound_ms)
        made = ShardingPlan(plan)
        made.validate(found, self.topology.world_size)  # a registered scheme may propose what is no tiling
        made.planned = self.last_planned = Planned.by(self, found, workload, constraints)
        if self.debug:
            print(made.show(), self.last_estimate, sep="\n\n")
        return made

    def _recorder(self) -> "Recorder | None":
        self.last_search = None
        if not self.keep_search:
            return None
        from recshard_lab.planner.search.record import Recorder  # not even loaded where it is not asked for

        return Recorder()


def tables_of(module: Any) -> dict[str, list[BaseEmbeddingConfig]]:
    """Module path -> tables, of every embedding collection inside a torch module (the root's path is ``""``)."""
    found: dict[str, list[BaseEmbeddingConfig]] = {}
    for path, part in module.named_modules():
        inside_another = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        tables = None if inside_another else configs_of(part)
        if tables:
            found[path] = tables
    return found
