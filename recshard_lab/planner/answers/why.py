"""Answers about plans: why a table lies where it does, what differs between two plans, what a wish would cost.

A planner attaches a `Planned` to every plan it makes: the tables, and itself with its topology, workload and
constraints. All answers come from the plan as it stands, so one that was edited by hand is explained too.

What a table causes of a phase is what the cost model's linear terms (`terms.py`) give for its rectangles on the
phase's slowest rank; what all tables cause, and what is paid once whatever they are, add up to the phase.

Shape letters: K loads, W ranks, P phases, C candidates, n rectangles.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.answers.alternatives import best_placement, could_be
from recshard_lab.planner.answers.answers import Alternative, Explained, PhaseShare, PlanDiff, TableChange, WhyNot
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.cost_models import cost_model_named
from recshard_lab.planner.model.estimate import Estimate, estimate_loads, loads_by_table, plan_loads
from recshard_lab.planner.search.colocated import lie_apart
from recshard_lab.planner.search.options import Option, options_of
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array, Workload
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
from recshard_lab.sharding.plan.types import nearest

if TYPE_CHECKING:
    from recshard_lab.planner.planner import EmbeddingShardingPlanner

Wish: TypeAlias = str | Sequence[str] | ParameterConstraints
_Named: TypeAlias = dict[str, tuple[BaseEmbeddingConfig, ParameterSharding]]


@dataclass(frozen=True, eq=False)
class Planned:
    """What is known of a plan: plain data, which travels with it.

    Attributes:
        planner: the settings it was made under; its constraints and workload are those that were used.
        tables: module path -> configs, without functions.
    """

    planner: "EmbeddingShardingPlanner"
    tables: dict[str, list[BaseEmbeddingConfig]]

    @classmethod
    def by(
        cls,
        planner: "EmbeddingShardingPlanner",
        tables: Mapping[str, Sequence[BaseEmbeddingConfig]],
        workload: Workload,
        constraints: Mapping[str, ParameterConstraints],
    ) -> "Planned":
        """What `planner` knows of `tables`; what it is set to later does not show."""
        settings = copy(planner)
        settings.constraints, settings.debug, settings.reservation = dict(constraints), False, None
        settings.workload = workload
        settings.last_estimate = settings.last_planned = settings.last_search = None
        settings.keep_search = False
        return cls(settings, {path: [_bare(table) for table in own] for path, own in tables.items()})

    def estimate(self, plan: ShardingPlan) -> Estimate:
        """What `plan` is predicted to cost."""
        pairs = plan.pairs(self.tables)
        model = self._model([table for table, _ in pairs])
        return estimate_loads(model, plan_loads(model, pairs), pairs, len(self.tables))

    def explain(self, plan: ShardingPlan, table: str) -> Explained:
        """See `ShardingPlan.explain`.

        >>> from recshard_lab.planner import EmbeddingShardingPlanner
        >>> from recshard_lab.sharding import Topology
        >>> movies = BaseEmbeddingConfig(
        ...     name="movies", num_embeddings=10**6, embedding_dim=16, feature_names=["movie"]
        ... )
        >>> plan = EmbeddingShardingPlanner(topology=Topology(2)).plan_tables([movies])
        >>> found = plan.explain("movies")
        >>> found.sharding == plan.tables()["movies"], all(way.more_ms > -1e-6 for way in found.alternatives)
        (True, True)
        """
        path, config = self._position(table)
        model, alone, sharding, rest, own = self._without(plan, path, config)
        ms, step_ms = self._shares(model, rest + own, own)
        used = float(model.memory_total(rest + own).max())
        ways = self._alternatives(model, alone, config, sharding, rest, step_ms)
        critical = max((share for share in ms if share.phase != "dense"), key=lambda share: share.ms)
        return Explained(table, sharding, step_ms, used, model.usable_bytes, critical, ms, ways)

    def diff(self, plan: ShardingPlan, other: ShardingPlan, theirs: "Planned") -> PlanDiff:
        """See `ShardingPlan.diff`.

        Args:
            theirs: what is known of `other`.
        """
        old, new = self.named(plan), theirs.named(other)
        optimizer = self.planner.workload.optimizer
        changes = []
        for name in dict.fromkeys([*old, *new]):
            (table, before), (grown, after) = old.get(name, (None, None)), new.get(name, (None, None))
            moved = 0
            if table is not None and grown is not None and before is not None and after is not None:
                sizes = [(each.num_embeddings, each.embedding_dim, each.data_type.name) for each in (table, grown)]
                if sizes[0] != sizes[1]:
                    raise PlanError(f"table {name!r} is {sizes[0]} in one plan and {sizes[1]} in the other")
                moved = moved_bytes(table, before.shards, after.shards, optimizer)
            changes.append(TableChange(name, before, after, _changed(before, after), moved))
        alone = self._moved_ms(old, new, theirs)
        told = tuple(replace(change, more_ms=alone.get(change.table)) for change in changes)
        return PlanDiff(told, self.estimate(plan), theirs.estimate(other))

    def _moved_ms(self, old: _Named, new: _Named, theirs: "Planned") -> dict[str, float]:
        """How much longer the step of `old` is with one table as in `new`, for every table that both name."""
        if theirs.planner.topology.world_size != self.planner.topology.world_size:
            return {}
        model = self._model([table for table, _ in old.values()])
        before = loads_by_table(model, list(old.values()))
        after = loads_by_table(model, [(own[0], new.get(name, own)[1]) for name, own in old.items()])
        whole = before.sum(axis=0)
        now = float(model.step_ms(whole))
        moved = [(i, name) for i, name in enumerate(old) if name in new and old[name][1] != new[name][1]]
        return {name: float(model.step_ms(whole - before[i] + after[i])) - now for i, name in moved}

    def why_not(self, plan: ShardingPlan, wishes: Mapping[str, Wish]) -> WhyNot:
        """See `ShardingPlan.why_not`."""
        if not isinstance(wishes, Mapping) or not wishes:
            raise PlanError(f"why_not takes {{table: scheme, ...}}, got {wishes!r}. Fix: name one table")
        planner = copy(self.planner)
        names = [table.name for own in self.tables.values() for table in own]
        said: dict[str, str] = {}
        for name, wish in wishes.items():
            if name not in names:
                raise PlanError(f"there is no table {name!r}{nearest(str(name), names)}; tables: {', '.join(names)}")
            own = self.planner.constraints.get(name) or ParameterConstraints()
            planner.constraints = {**planner.constraints, name: wished(own, wish)}
            said[name] = wish_text(wish)
        made, refusal = self._moved_alone(plan, planner, list(wishes)), None
        if made is not None and made.plan == plan.plan:  # it is as asked
            before = self.estimate(plan)
            return WhyNot(said, made, None, before, before, self.diff(plan, made, self))
        try:
            fresh = planner._plan(self.tables, planner.constraints, planner.workload)
            if made is None or self.estimate(fresh).step_ms < self.estimate(made).step_ms:
                made = fresh
        except PlanError as error:
            refusal = str(error)
        if made is None:
            return WhyNot(said, None, refusal, self.estimate(plan), None, None)
        diff = self.diff(plan, made, self)
        return WhyNot(said, made, None, diff.before, diff.after, diff)

    def _moved_alone(
        self, plan: ShardingPlan, planner: "EmbeddingShardingPlanner", names: Sequence[str]
    ) -> ShardingPlan | None:
        """`plan` with these tables, one after the other, where they cost least under the planner's constraints."""
        made = ShardingPlan({path: EmbeddingModuleShardingPlan(own) for path, own in plan.plan.items()})
        for path, own in self.tables.items():
            for config in (table for table in own if table.name in names):
                model, alone, now, rest, _ = self._without(made, path, config)
                options = options_of(alone, [config], planner.constraints, planner.route)[0]
                tried = [each for option in options if (each := best_placement(model, option, rest)) is not None]
                if not tried:
                    return None
                if not any(could_be(option, now) for option in options):
                    made.plan[path][config.name] = min(tried, key=lambda each: each[0])[1].sharding()
        apart = lie_apart(made, planner.constraints)
        return made if not apart and self.estimate(made).fits else None

    def script(self, plan: ShardingPlan, model: str | None = None) -> str:
        """See `ShardingPlan.to_script`."""
        from recshard_lab.sharding.export.script import Live, Step, script_of
        from recshard_lab.sources import read_source

        top, load = self.planner.topology, self.planner.workload
        features = [feature for own in self.tables.values() for table in own for feature in table.feature_names]
        ids = {feature: load.pooling_factor(feature) for feature in features}
        source = None if model is None else read_source(model)
        if source is not None and {path: [t.name for t in own] for path, own in source.tables.items()} != {
            path: list(own) for path, own in plan.plan.items()
        }:
            raise PlanError(f"{model} has other tables than this plan. Fix: plan for it again")
        live = None
        tables = self.tables
        if source is not None and source.module is not None:
            live, tables = Live(source.name, source.module, source.called), source.tables
        step = Step(load.batch_size, ids, load.optimizer, load.weighted, top.local_world_size)
        return script_of(
            plan.resolved(tables, top.world_size, top.local_world_size), tables, top.world_size, step, live
        )

    def named(self, plan: ShardingPlan) -> _Named:
        """Every table of `plan` with its rectangles, by its name, with its module's path where several have it."""
        top = self.planner.topology
        full = plan.resolved(self.tables, top.world_size, top.local_world_size)
        keys = [(path, table) for path, own in self.tables.items() for table in own]
        times = Counter(table.name for _, table in keys)
        return {
            table.name if times[table.name] == 1 else f"{path}.{table.name}": (table, full.plan[path][table.name])
            for path, table in keys
        }

    def _model(self, tables: Sequence[BaseEmbeddingConfig]) -> CostModel:
        made_by = cost_model_named(self.planner.cost_model)
        return made_by(tables, self.planner.topology, self.planner.workload, self.planner.constraints)

    def _without(
        self, plan: ShardingPlan, path: str, config: BaseEmbeddingConfig
    ) -> tuple[CostModel, CostModel, ParameterSharding, Array, Array]:
        """Costs of the plan's tables and of this one, where it lies, and the loads ``[K, W]`` of the others and its."""
        top = self.planner.topology
        pairs, now = plan.pairs(self.tables), plan.plan[path][config.name]
        homes = [home for home, own in self.tables.items() for _ in own]
        others = [pair for home, pair in zip(homes, pairs, strict=True) if home != path or pair[0] is not config]
        model, alone = self._model([table for table, _ in pairs]), self._model([config])
        rest = plan_loads(self._model([table for table, _ in others]), others) if others else None
        now = now.resolved(config, top.world_size, top.local_world_size)
        own = plan_loads(alone, [(config, now)])
        return model, alone, now, np.zeros_like(own) if rest is None else rest, own

    def _position(self, table: str) -> tuple[str, BaseEmbeddingConfig]:
        """Module and config of a table that is named alone, or with its module's path where another has its name."""
        keys = [(path, config) for path, own in self.tables.items() for config in own]
        found = [key for key in keys if table in (key[1].name, f"{key[0]}.{key[1].name}")]
        if len(found) == 1:
            return found[0]
        names = [config.name for _, config in keys]
        if found:
            spelled = " or ".join(repr(f"{path}.{config.name}") for path, config in found)
            raise PlanError(f"several modules have a table {table!r}. Fix: name it {spelled}")
        raise PlanError(f"there is no table {table!r}{nearest(str(table), names)}; tables: {', '.join(names)}")

    def _shares(self, model: CostModel, loads: Array, own: Array) -> tuple[tuple[PhaseShare, ...], float]:
        """Each phase's slowest rank and what the loads `own` cause there; and the step."""
        ms, caused = model.phases(loads), model.caused(own, loads)  # [P, W]
        slowest = ms.argmax(axis=1) if model.waits else np.full(len(ms), ms.sum(axis=0).argmax())
        shares = tuple(
            PhaseShare(phase, rank, float(ms[p, rank]), float(caused[p, rank]))
            for p, (phase, rank) in enumerate(zip(model.phase_names, slowest.tolist(), strict=True))
        )
        return shares, float(model.step_ms(loads))

    def _alternatives(
        self,
        model: CostModel,
        alone: CostModel,
        config: BaseEmbeddingConfig,
        now: ParameterSharding,
        rest: Array,
        step_ms: float,
    ) -> tuple[Alternative, ...]:
        """The best other placement of every scheme and route beside the loads `rest`."""
        planner, wish = self.planner, self.planner.constraints.get(config.name)
        may = options_of(alone, [config], planner.constraints, planner.route)[0]
        allowed = {(option.proposal.scheme, option.route) for option in may}
        loose = replace(
            wish or ParameterConstraints(), shards=None, route=None, sharding_types=None, forbidden_sharding_types=None
        )
        ways: dict[tuple[str, str], list[Option]] = {}
        for option in options_of(alone, [config], {config.name: loose}, None)[0]:
            ways.setdefault((option.proposal.scheme, option.route), []).append(option)
        for key in allowed - ways.keys():
            ways[key] = [option for option in may if (option.proposal.scheme, option.route) == key]
        found = []
        for key, options in ways.items():
            tried = [best_placement(model, option, rest, now) for option in options]
            best = min((each for each in tried if each is not None), key=lambda each: each[0], default=None)
            if best is not None:
                (late, first, second), placement = best
                ms, held = (second, first) if late else (first, second)
                found.append(Alternative(placement.sharding(), ms, ms - step_ms, held, not late, key in allowed))
        return tuple(sorted(found, key=lambda way: (not way.fits, way.step_ms)))


def moved_bytes(table: BaseEmbeddingConfig, before: Sequence[Shard], after: Sequence[Shard], optimizer: str) -> int:
    """Bytes of a table's weights and optimizer state that go from one rank to another.

    What a rank's old rectangles hold of its new ones stays; state that a row has once lies beside every piece of it.
    A number that a table has once, such as a count of steps, is left out.

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


def wished(own: ParameterConstraints, wish: Wish) -> ParameterConstraints:
    """A table's constraint with a wish in place of what it says of where the table lies.

    Raises:
        PlanError: a scheme that does not exist.
    """
    if isinstance(wish, ParameterConstraints):
        kept = {
            name: getattr(own, name)
            for name in ("pooling_factors", "num_poolings", "batch_sizes", "is_weighted")
            if not getattr(wish, name)
        }
        return replace(wish, **kept)
    names = [wish] if isinstance(wish, str) else wish
    if not isinstance(names, Sequence) or not names:
        raise PlanError(f"a wish is a scheme, a list of schemes or ParameterConstraints, got {wish!r}")
    schemes = [scheme_named(str(getattr(name, "value", name))).name for name in names]
    forbidden = [name for name in own.forbidden_sharding_types or () if name not in schemes]
    return replace(own, shards=None, sharding_types=schemes, forbidden_sharding_types=forbidden or None)


def wish_text(wish: Wish) -> str:
    """A wish in words.

    >>> wish_text(["row_wise", "column_wise"]), wish_text(ParameterConstraints(ranks=[0]))
    ('row_wise or column_wise', '(ranks=[0])')
    """
    if isinstance(wish, ParameterConstraints):
        said = [f"{name}={value!r}" for name, value in vars(wish).items() if value not in (None, [], False)]
        return f"({', '.join(said) or 'no constraint'})"
    return str(wish) if isinstance(wish, str) else " or ".join(map(str, wish))


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
    """Stands in a plan for a table's ``init_fn``, which may not travel.

    Raises:
        PlanError: it is called.
    """
    raise PlanError("a plan keeps no init_fn of its tables. Fix: build the model from the tables themselves")


def _bare(table: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
    """A table without its function, but still known to have one."""
    if table.init_fn is None:
        return table
    bare = copy(table)
    bare.init_fn = left_behind
    return bare
