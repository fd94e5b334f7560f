"""The columns of the plan comparison: what each is asked for, how it began, how it reads in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.plan_comparison import Wish, named, question_of
from recshard_lab.lab.compare.question import AUTO, Question
from recshard_lab.lab.compare.question_code import imported, step_arguments, wish_code
from recshard_lab.planner import Workload
from recshard_lab.sharding import ShardingPlan, Topology

FEWEST, MOST = 2, 6
HAND, PLANNED, TORCHREC, GIVEN = "hand", "planner", "torchrec", "given"
KINDS = {
    HAND: "by hand",
    PLANNED: "by the planner",
    TORCHREC: "by the planner, with TorchRec's formulas",
    GIVEN: "in advance, not changed",
}
BEGINNING = {"mine": "Your plan", "auto": "The planner's plan"}


@dataclass
class Column:
    """One plan of the comparison, whatever the ranks, the batch and the memory.

    Args:
        key: tells it from the others, and stays when it is renamed.
        name: as a reader sees it.
        kind: who makes it, one of `KINDS`.
        wish: what it began as; ranks, batch and memory in it are not looked at.
        schemes: table -> scheme, where it is made by hand.
        allowed: schemes that the planner may use; all when empty.
    """

    key: str
    name: str
    kind: str
    wish: Question
    schemes: dict[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()

    def question(self, world_size: int, batch_size: int, memory_cap: int) -> Question:
        """What it asks for on so many ranks."""
        base = Question({}, world_size, batch_size, memory_cap)
        if self.kind == GIVEN:
            return replace(base, plan=self.wish.plan)
        options = {name: value for name, value in self.wish.options.items() if name != "cost_model"}
        if self.kind == TORCHREC:
            options["cost_model"] = "torchrec"
        base = replace(base, constraints=self.wish.constraints, options=options)
        return replace(base, schemes=dict(self.schemes)) if self.kind == HAND else replace(base, allowed=self.allowed)

    def copied(self, key: str, name: str, plan: ShardingPlan | None) -> Column:
        """A column that begins as this one; one that was given begins by hand, with the schemes of its plan."""
        made = replace(self, key=key, name=name, schemes=dict(self.schemes))
        if self.kind == GIVEN:
            made.kind, made.wish = HAND, replace(self.wish, plan=None)
            made.schemes = {} if plan is None else schemes_of(plan)
        return made


def schemes_of(plan: ShardingPlan) -> dict[str, str]:
    """Table -> scheme; a label of the reader's own stays the planner's to choose."""
    from recshard_lab.sharding import scheme_names

    known = scheme_names()
    found = {name: str(sharding.sharding_type) for name, sharding in plan.tables().items()}
    return {name: scheme if scheme in known else AUTO for name, scheme in found.items()}


def first_columns(
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    workload: Workload,
    plans: Mapping[str, Wish] | None,
    schemes: Mapping[str, str] | None,
) -> dict[str, Column]:
    """Key -> column, as a comparison begins: the plans that are given, or one by hand beside the planner's.

    Raises:
        ValueError: as `compare_plans`; fewer plans than 2 or more than 6; schemes beside plans.
    """
    if plans is None:
        wish = question_of(PLANNED, tables, topology, workload)
        mine = Column("mine", BEGINNING["mine"], HAND, wish, dict(schemes or {}))
        return {"mine": mine, "auto": Column("auto", BEGINNING["auto"], PLANNED, wish)}
    wishes = named(plans)
    if not FEWEST <= len(wishes) <= MOST:
        raise ValueError(f"a comparison shows {FEWEST} to {MOST} plans, got {len(wishes)}: {', '.join(wishes)}")
    if schemes:
        raise ValueError("schemes are those of 'Your plan': with plans, give them there, as {'my plan': {...}}")
    return {name: column_of(name, wish, tables, topology, workload) for name, wish in wishes.items()}


def column_of(
    name: str, wish: Wish, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
) -> Column:
    """The column of one of `compare_plans`'s plans.

    Raises:
        ValueError: as `compare_plans`.
    """
    asked = question_of(wish, tables, topology, workload)
    kind = GIVEN if asked.plan is not None else HAND if asked.chosen else PLANNED
    if asked.options.get("cost_model") == "torchrec":
        kind = TORCHREC
    return Column(name, name, kind, replace(asked, schemes={}), dict(asked.schemes))


def python_of_all(
    columns: Sequence[Column],
    step: tuple[int, int, int],
    topology: Topology,
    workload: Workload,
    num_tables: int,
    last: str = "",
) -> str:
    """The whole comparison in Python.

    Args:
        step: ranks, batch and memory of one rank.
        last: a further line, where the comparison is called ``found``.
    """
    lines = ["found = compare_plans(", "    tables,"]
    plans = ["    plans={"]
    for column in columns:
        first, *rest = wish_code(column.question(*step), num_tables)
        plans += [f"        {column.name!r}: {first}", *(f"        {line}" for line in rest)]
        plans[-1] += ","
    lines += [*step_arguments(Question({}, *step), topology, workload), *plans, "    },", ")", "print(found)", last]
    return imported("\n".join(lines).rstrip(), ["Topology", "Workload", "compare_plans"])
