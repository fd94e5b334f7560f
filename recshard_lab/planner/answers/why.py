"""Computes answers about plans: `explain`, `diff`, `why_not` and `script`.

A planner attaches a `Planned` to every plan it makes: the tables, and itself with its topology, workload and
constraints. Answers are computed from the plan as it is now, so a plan that was edited by hand is explained too.

The part of a phase that one table causes is given by the cost model's linear terms (`terms.py`) for its shards on the
phase's slowest rank. The parts of all tables and the fixed costs add up to the phase.

Shape letters: K loads, W ranks, P phases.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.answers.alternatives import best_placement, could_be
from recshard_lab.planner.answers.answers import (
    Alternative,
    Explained,
    PhaseShare,
    PlanDiff,
    TableChange,
    WhyNot,
    slowest_ranks,
)
from recshard_lab.planner.answers.text import use_one_of
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.estimate import Estimate, estimate_loads, loads_by_table, plan_loads
from recshard_lab.planner.search.bounds import strong_bound
from recshard_lab.planner.search.colocated import bundled, groups_of, lie_apart
from recshard_lab.planner.search.options import Option, options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    scheme_named,
)
from recshard_lab.sharding.plan.transfers import num_moved_elements

if TYPE_CHECKING:
    from recshard_lab.planner.planner import EmbeddingShardingPlanner

Request: TypeAlias = str | Sequence[str] | ParameterConstraints
_Named: TypeAlias = dict[str, tuple[BaseEmbeddingConfig, ParameterSharding]]


@dataclass(frozen=True, eq=False)
class Planned:
    """The planner and the tables of a plan: plain data, pickled with it.

    Attributes:
        planner: the settings that the plan was made with, constraints and workload included.
        tables: module path -> configs, without functions.
        search_bound_ms: the bound that the search proved; None without a search.
    """

    planner: "EmbeddingShardingPlanner"
    tables: dict[str, list[BaseEmbeddingConfig]]
    search_bound_ms: float | None = None

    @classmethod
    def by(cls, planner: "EmbeddingShardingPlanner", tables: Mapping[str, Sequence[BaseEmbeddingConfig]]) -> "Planned":
        """A copy of the settings of `planner`: later changes to it have no effect here."""
        settings = copy(planner)
        settings.constraints, settings.debug, settings.reservation = dict(planner.constraints), False, None
        settings.keep_search, settings.reporters = False, ()
        return cls(settings, {path: [_bare(table) for table in configs] for path, configs in tables.items()})

    def estimate(self, plan: ShardingPlan) -> Estimate:
        """The predicted costs of `plan`."""
        pairs = plan.pairs(self.tables)
        model = self.planner.model([table for table, _ in pairs])
        found = estimate_loads(model, plan_loads(model, pairs), pairs, len(self.tables))
        return replace(found, lower_bound=self.search_bound_ms)

    def bound_ms(self, plan: ShardingPlan) -> float:
        """A step time in ms that no plan within the planner's constraints is below, by `strong_bound`."""
        tables = [table for _, table in self._keys]
        constraints, model = self.planner.constraints, self.planner.model(tables)
        options = options_of(model, tables, constraints, self.planner.route)
        problem = Problem(model, bundled(tables, options, groups_of(tables, constraints)))
        return max(self.search_bound_ms or 0.0, strong_bound(problem, plan.estimate.step_ms))

    def explain(self, plan: ShardingPlan, table: str) -> Explained:
        """See `ShardingPlan.explain`.

        >>> from recshard_lab.planner import EmbeddingShardingPlanner
        >>> from recshard_lab.sharding import Topology
        >>> movies = BaseEmbeddingConfig(
        ...     name="movies", num_embeddings=10**6, embedding_dim=16, feature_names=["movie"]
        ... )
        >>> plan = EmbeddingShardingPlanner(topology=Topology(2)).plan_tables([movies])
        >>> answer = plan.explain("movies")
        >>> answer.sharding == plan.tables()["movies"], all(way.more_ms > -1e-6 for way in answer.alternatives)
        (True, True)
        """
        at = self._position(table)
        model, alone, sharding, rest, own = self._apart(plan, at)
        loads = rest + own
        costs, caused = estimate_loads(model, loads, plan.pairs(self.tables)), model.caused(own, loads)  # [P, W]
        phases = tuple(
            PhaseShare(phase, rank, ms, float(caused[p, rank]))
            for p, (phase, rank, ms) in enumerate(slowest_ranks(costs))
        )
        return Explained(
            table,
            sharding,
            costs.step_ms,
            costs.fullest_bytes,
            model.usable_bytes,
            max((share for share in phases if share.phase != "dense"), key=lambda share: share.ms),
            phases,
            self._alternatives(model, alone, self._keys[at][1], sharding, rest, costs.step_ms),
            sum(shard.num_rows for shard in sharding.shards) * self._keys[at][1].index_bytes_per_row,
        )

    def diff(self, plan: ShardingPlan, other: ShardingPlan, theirs: "Planned") -> PlanDiff:
        """See `ShardingPlan.diff`.

        Args:
            theirs: the planner and the tables of `other`.
        """
        old, new = self.named(plan), theirs.named(other)
        more_ms = self._moved_ms(old, new, theirs)
        changes = []
        for name in dict.fromkeys([*old, *new]):
            (table, before), (their_table, after) = old.get(name, (None, None)), new.get(name, (None, None))
            moved = 0
            if table is not None and their_table is not None and before is not None and after is not None:
                sizes = [(t.num_embeddings, t.embedding_dim, t.data_type.name) for t in (table, their_table)]
                if sizes[0] != sizes[1]:
                    raise PlanError(
                        f"table {name!r} is {sizes[0]} in one plan and {sizes[1]} in the other. Fix: compare plans of "
                        f"the same tables"
                    )
                moved = moved_bytes(table, before.shards, after.shards, self.planner.workload.optimizer)
            changes.append(TableChange(name, before, after, _changed(before, after), moved, more_ms.get(name)))
        return PlanDiff(tuple(changes), self.estimate(plan), theirs.estimate(other))

    def _moved_ms(self, old: _Named, new: _Named, theirs: "Planned") -> dict[str, float]:
        """The difference of the step of `old` with one table placed as in `new`, for every table that both name."""
        if theirs.planner.topology.world_size != self.planner.topology.world_size:
            return {}
        model = self.planner.model([table for table, _ in old.values()])
        before = loads_by_table(model, list(old.values()))
        after = loads_by_table(model, [(table, new.get(name, (table, now))[1]) for name, (table, now) in old.items()])
        whole = before.sum(axis=0)
        step_ms = float(model.step_ms(whole))
        return {
            name: float(model.step_ms(whole - before[i] + after[i])) - step_ms if old[name][1] != new[name][1] else 0.0
            for i, name in enumerate(old)
            if name in new
        }

    def why_not(self, plan: ShardingPlan, requests: Mapping[str, Request]) -> WhyNot:
        """See `ShardingPlan.why_not`."""
        if not isinstance(requests, Mapping) or not requests:
            raise PlanError(f"why_not takes {{table: scheme, ...}}, got {requests!r}. Fix: name one table")
        planner = copy(self.planner)
        for name, request in requests.items():
            self._at(name)
            now = self.planner.constraints.get(name) or ParameterConstraints()
            planner.constraints = {**planner.constraints, name: requested(now, request)}
        words = {name: request_text(request) for name, request in requests.items()}
        made, refusal = self._moved_alone(plan, planner, list(requests)), None
        if made is None or made.plan != plan.plan:  # the plan does not meet the request already
            try:
                fresh = planner._plan(self.tables)
                if made is None or self.estimate(fresh).step_ms < self.estimate(made).step_ms:
                    made = fresh
            except PlanError as error:
                refusal = str(error)
        if made is None:
            return WhyNot(words, None, refusal, self.estimate(plan), None, None)
        diff = self.diff(plan, made, self)
        return WhyNot(words, made, None, diff.before, diff.after, diff)

    def _moved_alone(
        self, plan: ShardingPlan, planner: "EmbeddingShardingPlanner", names: Sequence[str]
    ) -> ShardingPlan | None:
        """`plan` with these tables moved, one after the other, to the cheapest place that the planner allows."""
        made = ShardingPlan({path: EmbeddingModuleShardingPlan(tables) for path, tables in plan.plan.items()})
        for at, (path, config) in enumerate(self._keys):
            if config.name not in names:
                continue
            model, alone, now, rest, _ = self._apart(made, at)
            options = options_of(alone, [config], planner.constraints, planner.route)[0]
            tried = [found for option in options if (found := best_placement(model, option, rest)) is not None]
            if not tried:
                return None
            if not any(could_be(option, now) for option in options):
                made.plan[path][config.name] = min(tried, key=lambda found: found[0])[1].sharding()
        apart = lie_apart(made, planner.constraints)
        return made if not apart and self.estimate(made).fits else None

    def script(self, plan: ShardingPlan, model: str | None = None) -> str:
        """See `ShardingPlan.to_script`."""
        from recshard_lab.sharding.export.script import Live, Step, script_of
        from recshard_lab.sources import read_source

        top, load = self.planner.topology, self.planner.workload
        features = [feature for _, table in self._keys for feature in table.feature_names]
        ids = {feature: load.pooling_factor(feature) for feature in features}
        source = None if model is None else read_source(model)
        if source is not None and {path: [t.name for t in configs] for path, configs in source.tables.items()} != {
            path: list(tables) for path, tables in plan.plan.items()
        }:
            raise PlanError(f"{model} has other tables than this plan. Fix: plan for it again")
        live, tables = None, self.tables
        if source is not None and source.module is not None:
            live, tables = Live(source.name, source.module, source.called), source.tables
        step = Step(load.batch_size, ids, load.optimizer, load.weighted, top.local_world_size)
        full = plan.resolved(tables, top.world_size, top.local_world_size)
        return script_of(full, tables, top.world_size, step, live)

    def named(self, plan: ShardingPlan) -> _Named:
        """Name -> config and shards of every table; a name that several modules use has its module's path in front."""
        top = self.planner.topology
        full = plan.resolved(self.tables, top.world_size, top.local_world_size)
        times = Counter(table.name for _, table in self._keys)
        return {
            table.name if times[table.name] == 1 else f"{path}.{table.name}": (table, full.plan[path][table.name])
            for path, table in self._keys
        }

    @property
    def _keys(self) -> list[tuple[str, BaseEmbeddingConfig]]:
        """Module path and config of every table."""
        return [(path, table) for path, configs in self.tables.items() for table in configs]

    def _apart(self, plan: ShardingPlan, at: int) -> tuple[CostModel, CostModel, ParameterSharding, Array, Array]:
        """Cost models of all tables and of number `at`, its shards, the loads ``[K, W]`` of the others and its own."""
        top, pairs = self.planner.topology, plan.pairs(self.tables)
        config, sharding = pairs[at]
        planner = copy(self.planner)
        planner.workload = planner.workload.for_tables([config])
        model, alone = self.planner.model([table for table, _ in pairs]), planner.model([config])
        alone.lookups.step_bytes = model.lookups.step_bytes[at : at + 1]  # caches hold rows of all tables
        loads = loads_by_table(model, pairs)
        now = sharding.resolved(config, top.world_size, top.local_world_size)
        return model, alone, now, np.delete(loads, at, axis=0).sum(axis=0), loads[at]

    def _at(self, name: str) -> list[int]:
        """Positions of the tables of this name, or of this path and name.

        Raises:
            PlanError: there are none.
        """
        found = [at for at, (path, table) in enumerate(self._keys) if name in (table.name, f"{path}.{table.name}")]
        if not found:
            known = [table.name for _, table in self._keys]
            raise PlanError(f"the plan has no table {name!r}{use_one_of(name, known)}")
        return found

    def _position(self, name: str) -> int:
        at, *more = self._at(name)
        if more:
            paths = " or ".join(repr(f"{path}.{name}") for path, _ in (self._keys[i] for i in (at, *more)))
            raise PlanError(f"several modules have a table {name!r}. Fix: name it {paths}")
        return at

    def _alternatives(
        self,
        model: CostModel,
        alone: CostModel,
        config: BaseEmbeddingConfig,
        now: ParameterSharding,
        rest: Array,
        step_ms: float,
    ) -> tuple[Alternative, ...]:
        """The best other placement of every scheme and output path beside the loads `rest`."""
        planner, constraint = self.planner, self.planner.constraints.get(config.name) or ParameterConstraints()
        loose = replace(constraint, shards=None, route=None, sharding_types=None, forbidden_sharding_types=None)
        allowed = by_way(options_of(alone, [config], planner.constraints, planner.route)[0])
        every = by_way(options_of(alone, [config], {config.name: loose}, None)[0])
        found = []
        for key, options in {**every, **allowed}.items():
            tried = [best for option in options if (best := best_placement(model, option, rest, now)) is not None]
            if tried:
                (too_full, first, second), placement = min(tried, key=lambda best: best[0])
                ms, held = (second, first) if too_full else (first, second)
                found.append(Alternative(placement.sharding(), ms, ms - step_ms, held, not too_full, key in allowed))
        return tuple(sorted(found, key=lambda way: (not way.fits, way.step_ms)))


def moved_bytes(table: BaseEmbeddingConfig, before: Sequence[Shard], after: Sequence[Shard], optimizer: str) -> int:
    """Bytes of a table's weights and optimizer state that move from one rank to another.

    Rows and columns that a rank holds before and after do not move. State per row is stored beside every shard of that
    row. State per table, such as a count of steps, is left out.

    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=10, embedding_dim=4)
    >>> whole, halves = [Shard(0, (0, 10), (0, 4))], [Shard(0, (0, 5), (0, 4)), Shard(1, (5, 10), (0, 4))]
    >>> moved_bytes(movies, whole, halves, "exact_sgd"), moved_bytes(movies, whole, halves, "exact_row_wise_adagrad")
    (80, 100)
    """
    if tuple(before) == tuple(after):
        return 0
    per_row, per_element = OPTIMIZER_STATE_BYTES[optimizer]
    moved = num_moved_elements(before, after) * (table.data_type.bytes_per_element + per_element)
    if per_row:
        rows = [[Shard(shard.rank, shard.rows, (0, 1)) for shard in shards] for shards in (before, after)]
        moved += num_moved_elements(*rows) * per_row
    return round(moved)


def requested(now: ParameterConstraints, request: Request) -> ParameterConstraints:
    """A table's constraint with the request in place of its schemes and ranks.

    Raises:
        PlanError: a scheme that does not exist.
    """
    if isinstance(request, ParameterConstraints):
        kept = {
            name: getattr(now, name)
            for name in ("pooling_factors", "num_poolings", "batch_sizes", "is_weighted")
            if not getattr(request, name)
        }
        return replace(request, **kept)
    names = [request] if isinstance(request, str) else request
    if not isinstance(names, Sequence) or not names:
        raise PlanError(
            f"why_not takes a scheme, a list of schemes or ParameterConstraints per table, got {request!r}. Fix: "
            f"'row_wise'"
        )
    schemes = [scheme_named(str(getattr(name, "value", name))).name for name in names]
    forbidden = [name for name in now.forbidden_sharding_types or () if name not in schemes]
    return replace(now, shards=None, sharding_types=schemes, forbidden_sharding_types=forbidden or None)


def request_text(request: Request) -> str:
    """A request in words.

    >>> request_text(["row_wise", "column_wise"]), request_text(ParameterConstraints(ranks=[0]))
    ('row_wise or column_wise', '(ranks=[0])')
    """
    if isinstance(request, ParameterConstraints):
        fields = [f"{name}={value!r}" for name, value in vars(request).items() if value not in (None, [], False)]
        return f"({', '.join(fields) or 'no constraint'})"
    return str(request) if isinstance(request, str) else " or ".join(map(str, request))


def by_way(options: Sequence[Option]) -> dict[tuple[str, str], list[Option]]:
    """(scheme, output path) -> options."""
    found: dict[tuple[str, str], list[Option]] = {}
    for option in options:
        found.setdefault((option.proposal.scheme, option.route), []).append(option)
    return found


def _changed(before: ParameterSharding | None, after: ParameterSharding | None) -> tuple[str, ...]:
    if before is None or after is None:
        return ("added",) if before is None else ("removed",)
    pairs = {
        "scheme": (before.sharding_type, after.sharding_type),
        "ranks": tuple(sorted({shard.rank for shard in side.shards}) for side in (before, after)),
        "shards": tuple(sorted(shard.rect for shard in side.shards) for side in (before, after)),
        "route": (before.route, after.route),
        "kernel": (before.compute_kernel, after.compute_kernel),
    }
    found = tuple(name for name, (old, new) in pairs.items() if old != new)
    return found or (() if sorted(before.shards) == sorted(after.shards) else ("ranks",))  # they changed places


def left_behind(weight: object) -> None:
    """Takes the place of a table's ``init_fn``, which pickle may not accept.

    Raises:
        PlanError: it is called.
    """
    raise PlanError("a plan keeps no init_fn of its tables. Fix: build the model from the tables themselves")


def _bare(table: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
    """A copy of a table with `left_behind` as its ``init_fn`` if it has one."""
    if table.init_fn is None:
        return table
    bare = copy(table)
    bare.init_fn = left_behind
    return bare
