"""A sharding plan is a tiling: every shard of every table is a rectangle on a rank.

::

    Shard(rank=1, rows=(0, 500), cols=(0, 64))    rows [r0, r1) x columns [c0, c1) on rank 1

Table-wise is one shard, row-wise W row shards, column-wise column shards, data-parallel the whole table on every rank.
Equal shards on all ranks are replicas (`validate.py`), the only shards that may overlap. A table may replicate some
rows and split the others.

    ShardingPlan                          module path -> EmbeddingModuleShardingPlan
      EmbeddingModuleShardingPlan         table name  -> ParameterSharding
        ParameterSharding                 scheme's name, kernel, route, shards
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.plan.parameter_sharding import ParameterSharding as ParameterSharding
from recshard_lab.sharding.plan.types import PlanError as PlanError
from recshard_lab.sharding.plan.types import Shard as Shard
from recshard_lab.sharding.plan.types import ShardingType, nearest
from recshard_lab.sharding.plan.validate import check_shards, check_spans

if TYPE_CHECKING:
    from recshard_lab.planner.answers.answers import Explained, PlanDiff, WhyNot
    from recshard_lab.planner.answers.why import Planned
    from recshard_lab.planner.model.estimate import Estimate
    from recshard_lab.planner.search.trace import SearchTrace

Tables: TypeAlias = Sequence[BaseEmbeddingConfig] | Mapping[str, Sequence[BaseEmbeddingConfig]]


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The plan of one embedding collection: table name -> `ParameterSharding`.

    Raises:
        PlanError: a key that is not a string, or a value that is not a `ParameterSharding`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(f"a module's plan is table name -> ParameterSharding: {error}") from error
        for name, sharding in self.items():
            if not isinstance(name, str) or not isinstance(sharding, ParameterSharding):
                raise PlanError(
                    f"a module's plan is table name -> ParameterSharding, got {name!r}: {sharding!r}. Fix: "
                    f"{{'movies': ParameterSharding('row_wise')}}"
                )

    def __str__(self) -> str:
        return ShardingPlan({"": self}).show()


@names_wrong_arguments
@dataclass
class ShardingPlan:
    """The plan of a model: module path -> plan of that collection. The root module's path is ``""``.

    Attributes:
        planned: the planner's record of this plan, for `estimate`, `explain`, `diff` and `why_not`; None without a
            planner. It is neither compared nor written to JSON.
        search: the plans that the planner compared, if it has ``keep_search=True``. It is not pickled.

    >>> movies = ParameterSharding("row_wise", shards=[Shard(0, (0, 50), (0, 8)), Shard(1, (50, 100), (0, 8))])
    >>> plan = ShardingPlan({"ebc": EmbeddingModuleShardingPlan(movies=movies)})
    >>> print(plan)
    table   size      scheme    kernel  ranks  shards
    movies  100 x 8   row_wise  fused   0-1    2 x [50 x 8]
    >>> ShardingPlan.from_json(plan.to_json()) == plan
    True
    """

    plan: dict[str, EmbeddingModuleShardingPlan]
    planned: "Planned | None" = field(default=None, init=False, compare=False, repr=False)
    search: "SearchTrace | None" = field(default=None, init=False, compare=False, repr=False)
    _facts: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    _facts_of: list[Any] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.plan = {
            path: tables if isinstance(tables, EmbeddingModuleShardingPlan) else EmbeddingModuleShardingPlan(tables)
            for path, tables in self.plan.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "search": None, "_facts": {}, "_facts_of": []}

    @property
    def estimate(self) -> "Estimate":
        """The predicted costs: ms per rank and phase, bytes per rank, traffic. It follows changes of the plan.

        Raises:
            PlanError: no planner made this plan. Use ``rs.estimate(plan, tables, topology)``.

        >>> from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner, Topology
        >>> table = EmbeddingBagConfig(100, 8, name="movies", feature_names=["seen"])
        >>> plan = EmbeddingShardingPlanner(Topology(2)).plan_tables([table])
        >>> plan.bound_ms <= plan.estimate.step_ms, plan.estimate.fits
        (True, True)
        """
        return self._fact("estimate", lambda record: record.estimate(self))

    @property
    def bound_ms(self) -> float:
        """A lower bound: no plan within the planner's constraints has a shorter predicted step.

        It is computed on first use, from the plan and the planner's settings alone. That takes less than a second on 8
        ranks. ``plan.estimate.lower_bound`` is the weaker bound that stops the search.

        Raises:
            PlanError: as `estimate`.
        """
        return self._fact("bound_ms", lambda record: record.bound_ms(self))

    @property
    def gap(self) -> float:
        """How much longer the predicted step is than `bound_ms`, as a share: 0.02 is at most 2% from the best plan.

        Raises:
            PlanError: as `estimate`.

        >>> from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner, Topology
        >>> table = EmbeddingBagConfig(100, 8, name="movies", feature_names=["seen"])
        >>> plan = EmbeddingShardingPlanner(Topology(2), keep_search=True).plan_tables([table])
        >>> plan.gap == plan.estimate.step_ms / plan.bound_ms - 1, plan.gap < 0.05, len(plan.search.candidates) > 0
        (True, True, True)
        """
        bound_ms, step_ms = self.bound_ms, self.estimate.step_ms
        if bound_ms <= 0:
            return 0.0 if step_ms <= 0 else float("inf")
        return max(0.0, step_ms / bound_ms - 1)

    def remember(self, name: str, value: Any) -> None:
        """Stores an attribute computed elsewhere, until the plan changes."""
        self._fact(name, lambda _: value)

    def _fact(self, name: str, compute: "Callable[[Planned], Any]") -> Any:
        if self.planned is None:
            raise PlanError(
                f"this plan has no {name}: no planner made it, so its tables, topology and workload are unknown. Fix: "
                f"call rs.estimate(plan, tables, topology), or set plan.planned = planner.record(plan, tables)"
            )
        now: list[Any] = [self.planned]
        now += [part for path, tables in self.plan.items() for item in tables.items() for part in (path, *item)]
        if len(now) != len(self._facts_of) or any(a is not b for a, b in zip(now, self._facts_of, strict=True)):
            self._facts, self._facts_of = {}, now
        if name not in self._facts:
            self._facts[name] = compute(self.planned)
        return self._facts[name]

    @names_wrong_arguments
    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The plan of the collection at `module_path`, or None."""
        return self.plan.get(module_path)

    def tables(self) -> dict[str, ParameterSharding]:
        """Every table's sharding by its name.

        Raises:
            PlanError: two modules have a table of the same name; read ``plan[module_path]`` instead.
        """
        shardings: dict[str, ParameterSharding] = {}
        module_of: dict[str, str] = {}
        for path, tables in self.plan.items():
            for name, sharding in tables.items():
                if name in shardings:
                    raise PlanError(
                        f"modules {module_of[name]!r} and {path!r} both have a table {name!r}. Fix: rename one, or "
                        f"read .plan[module_path] and pass tables as {{module_path: [config, ...]}}"
                    )
                shardings[name], module_of[name] = sharding, path
        return shardings

    @property
    def world_size(self) -> int:
        """The minimum number of ranks that this plan can run on."""
        ranks = [
            rank for tables in self.plan.values() for sharding in tables.values() for rank in (sharding.ranks or [0])
        ]
        return max(ranks, default=0) + 1

    @names_wrong_arguments
    def pairs(self, tables: Tables) -> list[tuple[BaseEmbeddingConfig, ParameterSharding]]:
        """Each table beside its sharding, in the order of `tables`.

        Args:
            tables: configs, or module path -> configs if two modules have tables of the same name.

        Raises:
            PlanError: a table that the plan lacks, or an entry of the plan that is not in `tables`.
        """
        if not isinstance(tables, Mapping):
            plans, tables = {"": self.tables()}, {"": tables}
        else:
            plans = {path: dict(entries) for path, entries in self.plan.items()}
        pairs = []
        for path, configs in tables.items():
            plan, where = plans.pop(path, {}), f" of module {path!r}" if path else ""
            for config in configs:
                if config.name not in plan:
                    raise PlanError(
                        f"table {config.name!r}{where} is not in the plan (it has: {', '.join(plan) or 'nothing'}). "
                        f"Fix: add an entry for it"
                    )
                pairs.append((config, plan.pop(config.name)))
            plans = {path: rest for path, rest in plans.items() if rest} | ({path: plan} if plan else {})
        for path, plan in plans.items():
            name, known = next(iter(plan)), [config.name for configs in tables.values() for config in configs]
            raise PlanError(
                f"the plan has an entry {name!r}{f' in module {path!r}' if path else ''}, but this table does "
                f"not exist{nearest(name, known)}. Fix: remove the entry"
            )
        return pairs

    @names_wrong_arguments
    def resolved(self, tables: Tables, world_size: int, local_world_size: int | None = None) -> "ShardingPlan":
        """This plan, validated, with explicit shards for every table. Executors run the result.

        Args:
            tables: the configs, or module path -> configs.
            world_size: number of ranks W that run the plan.
            local_world_size: ranks per node, for node-aware schemes. Default: all ranks.

        Raises:
            PlanError: as `validate`.
        """
        self.pairs(tables)  # raises for unknown and missing tables
        by_module = tables if isinstance(tables, Mapping) else dict.fromkeys(self.plan, tables)
        configs = {(path, config.name): config for path, entries in by_module.items() for config in entries}
        plan = self._mapped(lambda key, sharding: sharding.resolved(configs[key], world_size, local_world_size))
        plan.validate(tables, world_size)
        return plan

    @names_wrong_arguments
    def validate(self, tables: Tables | None, world_size: int) -> None:
        """Checks that every table is tiled, on ranks that exist.

        Args:
            tables: the configs, or module path -> configs. With None, each table ends at the last row and column of
                its shards, and tables without shards are not checked.
            world_size: number of ranks W that run the plan.

        Raises:
            PlanError: the first hole, overlap, rank that does not exist, unknown or missing table, with a fix.

        >>> gap = ParameterSharding("row_wise", shards=[Shard(0, (5, 50), (0, 8)), Shard(1, (50, 100), (0, 8))])
        >>> ShardingPlan({"": {"movies": gap}}).validate(None, world_size=2)
        Traceback (most recent call last):
        recshard_lab.sharding.plan.types.PlanError: table 'movies' (100 x 8): no shard covers rows [0, 5) x cols [0, ...
        """
        for config, sharding in self._sized() if tables is None else self.pairs(tables):
            check_shards(config, sharding.shards, sharding.sharding_type == ShardingType.DATA_PARALLEL, world_size)

    def _sized(self) -> Iterator[tuple[BaseEmbeddingConfig, ParameterSharding]]:
        """Each table that has shards, with the size that they cover, beside its sharding."""
        for entries in self.plan.values():
            for name, sharding in entries.items():
                if not sharding.shards:
                    continue
                for shard in sharding.shards:
                    check_spans(shard)
                rows = max(1, *(shard.rows[1] for shard in sharding.shards))
                cols = max(1, *(shard.cols[1] for shard in sharding.shards))
                yield BaseEmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=cols), sharding

    def with_route(self, route: str) -> "ShardingPlan":
        """This plan with output path `route` for every table except the data-parallel ones, which exchange no rows.

        Raises:
            PlanError: an unknown route.

        >>> plan = ShardingPlan({"": {"movies": ParameterSharding("row_wise")}})
        >>> plan.with_route("two_hop").tables()["movies"].route
        'two_hop'
        """
        return self._mapped(lambda key, sharding: sharding.with_route(route))

    def _mapped(self, change: Callable[[tuple[str, str], ParameterSharding], ParameterSharding]) -> "ShardingPlan":
        """This plan with ``change((module path, table name), sharding)`` for every table."""
        plan = ShardingPlan(
            {
                path: EmbeddingModuleShardingPlan(
                    {name: change((path, name), sharding) for name, sharding in entries.items()}
                )
                for path, entries in self.plan.items()
            }
        )
        plan.planned = self.planned
        return plan

    @names_wrong_arguments
    def explain(self, table: str, *, planner: Any = None, tables: Tables | None = None) -> "Explained":
        """Why the planner placed `table` so: the cost of every other scheme, and the table's share of the step.

        Args:
            table: its name, or ``"module.path.name"`` if several modules have a table of this name.
            planner: an `EmbeddingShardingPlanner`. Default: the planner that made the plan.
            tables: configs, if `planner` has not planned them.

        Returns:
            `Explained`: print it, display it in a notebook, or call ``to_pandas()``. Each alternative is the best
            placement of its scheme and route while all other tables stay in place.

        Raises:
            PlanError: an unknown table; no planner made this plan, and you passed none.
        """
        return _planned(self, planner, tables).explain(self, table)

    @names_wrong_arguments
    def diff(self, other: "ShardingPlan", *, planner: Any = None, tables: Tables | None = None) -> "PlanDiff":
        """What changes from this plan to `other`: scheme, ranks and moved bytes per table; step time and memory.

        Args:
            other: a plan of the same tables. Its costs use its planner's topology and workload, or this plan's if it
                has no planner.
            planner, tables: as for `explain`.

        Raises:
            PlanError: no planner made either plan, and you passed none; a table has another size in `other`.
        """
        if not isinstance(other, ShardingPlan):
            raise PlanError(f"diff takes another ShardingPlan, got {other!r}. Fix: plan.diff(other_plan)")
        source = self if planner is not None or self.planned is not None or other.planned is None else other
        planned = _planned(source, planner, tables)
        return planned.diff(self, other, other.planned or planned)

    @names_wrong_arguments
    def why_not(self, constraints: Mapping[str, Any], *, planner: Any = None, tables: Tables | None = None) -> "WhyNot":
        """What other constraints would cost, or why no plan meets them. It plans again, which takes as long as before.

        Args:
            constraints: table -> a scheme, a list of schemes, or `ParameterConstraints`.
            planner, tables: as for `explain`.

        Raises:
            PlanError: an unknown table or scheme; no planner made this plan, and you passed none.
        """
        return _planned(self, planner, tables).why_not(self, constraints)

    def to_json(self, indent: int | None = None) -> str:
        """This plan as JSON with a format version; `from_json` returns an equal plan."""
        from recshard_lab.sharding.plan.plan_json import dumps

        return dumps(self, indent)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of what `to_json` writes, as plain data.

        >>> ShardingPlan.json_schema()["title"]
        'recshard_lab sharding plan'
        """
        from recshard_lab.sharding.plan.plan_json import plan_schema

        return plan_schema()

    @names_wrong_arguments
    def to_torchrec(
        self,
        world_size: int | None = None,
        local_world_size: int | None = None,
        device_type: str = "cpu",
        paths: Mapping[str, str] | None = None,
    ) -> Any:
        """This plan as an installed TorchRec's ``ShardingPlan``; see `recshard_lab.compat.plans.to_torchrec`.

        Raises:
            PlanError: a table whose shards TorchRec cannot run unchanged, by name, with a fix.
            ImportError: TorchRec is not installed.
        """
        from recshard_lab.compat.plans import to_torchrec

        return to_torchrec(self, world_size, local_world_size, device_type, paths)

    @names_wrong_arguments
    def to_script(self, model: str | None = None, *, planner: Any = None, tables: Tables | None = None) -> str:
        """A script for ``torchrun`` that trains under this plan, as one file to run and then edit.

        It has the planner's tables, batch size and optimizer; its batches are random.

        Args:
            model: ``package.module:factory`` or ``path/file.py:factory`` of the planned model. Default: a small
                stand-in model over the same tables.
            planner, tables: as for `explain`.

        Returns:
            The script's text.

        Raises:
            PlanError: no planner made this plan, and you passed none; a table with an ``init_fn``; a model whose
                ``forward`` has unsupported arguments.

        >>> from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner, Topology
        >>> table = EmbeddingBagConfig(100, 8, name="movies", feature_names=["seen"])
        >>> plan = EmbeddingShardingPlanner(Topology(2)).plan_tables([table])
        >>> plan.to_script().splitlines()[0][3:]
        'Trains 1 table under a plan for 2 ranks. Written by recshard_lab, to be edited.'
        """
        return _planned(self, planner, tables).script(self, model)

    @classmethod
    @names_wrong_arguments
    def from_json(cls, text: str) -> "ShardingPlan":
        """Reads `to_json`'s output.

        Raises:
            PlanError: not JSON, another schema or version, a field missing, unknown or of the wrong type, by name.
        """
        from recshard_lab.sharding.plan.plan_json import loads

        return loads(text)

    def show(self) -> str:
        """The plan as a text table of at most 100 columns."""
        from recshard_lab.sharding.export.plan_table import plan_table

        return plan_table(self).text

    def __str__(self) -> str:
        return self.show()

    def _repr_html_(self) -> str:
        from recshard_lab.sharding.export.plan_table import plan_table

        return plan_table(self).html


def _planned(plan: ShardingPlan, planner: Any, tables: Tables | None) -> "Planned":
    """The record of `planner` of a plan, or of the planner that made it.

    Raises:
        PlanError: no planner made it, and `planner` is None.
    """
    if planner is not None:
        if not callable(getattr(planner, "record", None)):
            raise PlanError(f"planner must be an EmbeddingShardingPlanner, got {planner!r}. Fix: leave it out")
        planned: Planned = planner.record(plan, tables)
        return planned
    if plan.planned is None:
        raise PlanError(
            "no planner made this plan, so its tables, topology and workload are unknown. Fix: pass "
            "planner=EmbeddingShardingPlanner(...), tables=[...]"
        )
    return plan.planned
