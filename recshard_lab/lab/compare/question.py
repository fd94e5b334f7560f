"""The question of one plan of a comparison, and its answer. No widget here.

::

    Question(schemes, world_size, batch_size, memory_cap)  --answer-->  Answer(plan, estimate, problem)

A plan that does not fit is planned again without the memory limit and estimated with it. So the reader sees by how much
it does not fit, beside the planner's refusal. `question_code.py` writes a question as Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.planner.answers.refusals import PlanDoesNotFit
from recshard_lab.planner.answers.text import gigabytes, ranks_word, usable_text
from recshard_lab.planner.answers.why import requested
from recshard_lab.planner.search.trace import SearchTrace
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology

AUTO = "auto"
UNLIMITED = 1 << 60  # bytes


@dataclass(frozen=True)
class Question:
    """One plan to compute, or an existing one to predict.

    Args:
        schemes: table -> scheme; the planner chooses for tables that are missing or "auto".
        world_size: number of ranks.
        batch_size: samples per rank.
        memory_cap: bytes per rank.
        constraints: table -> further constraints of the planner.
        allowed: the schemes that the planner may use for tables without constraints; all if empty.
        options: further arguments of `EmbeddingShardingPlanner`: solver, cost_model, route.
        plan: an existing plan, which is predicted unchanged.
    """

    schemes: Mapping[str, str]
    world_size: int
    batch_size: int
    memory_cap: int
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: ShardingPlan | None = None

    def automatic(self) -> Question:
        """The same ranks, batch and memory with every table left to the planner."""
        return Question({}, self.world_size, self.batch_size, self.memory_cap)

    @property
    def chosen(self) -> dict[str, str]:
        """The tables whose scheme is not left to the planner."""
        return {name: scheme for name, scheme in self.schemes.items() if scheme != AUTO}

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for questions with the same answer, and only for those."""
        parts = [tuple(sorted((name, repr(value)) for name, value in each.items())) for each in self._mappings]
        return (*parts, self.allowed, self.world_size, self.batch_size, self.memory_cap, id(self.plan))

    @property
    def _mappings(self) -> tuple[Mapping[str, Any], ...]:
        return self.chosen, self.constraints, self.options


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan and its prediction; ``problem`` is the reason why it does not fit or is not valid, else empty."""

    question: Question
    topology: Topology
    workload: Workload
    plan: ShardingPlan | None
    estimate: Estimate | None
    problem: str = ""
    kept: list[SearchTrace | None] = field(default_factory=list, repr=False)

    @property
    def searched(self) -> bool:
        """Whether `searched` has recorded the planner's search."""
        return bool(self.kept)

    @property
    def search(self) -> SearchTrace | None:
        """The planner's search, after `searched`; None for an existing plan."""
        return self.kept[0] if self.kept else None

    @property
    def fits(self) -> bool:
        """Whether the plan exists and fits on every rank."""
        return self.plan is not None and not self.problem


def topology_for(question: Question, base: Topology) -> Topology:
    """``base`` with the question's ranks and memory. Hosts keep their size if the ranks fill them; more GPUs than one
    host has are on further hosts."""
    world_size = question.world_size
    one_host = base.num_nodes == 1 and (base.compute_device == "cpu" or world_size <= base.world_size)
    local = world_size if one_host else base.local_world_size
    while world_size % local:
        local -= 1
    return _with_cap(replace(base, world_size=world_size, local_world_size=local), question.memory_cap)


def _with_cap(topology: Topology, cap: int) -> Topology:
    name = "hbm_cap" if topology.compute_device == "cuda" else "ddr_cap"
    return replace(topology, **{name: cap})  # type: ignore[arg-type]


def answer(question: Question, tables: Sequence[BaseEmbeddingConfig], base: Topology, workload: Workload) -> Answer:
    """Plans and predicts. A refusal is a part of the answer, not an exception."""
    topology = topology_for(question, base)
    workload = replace(workload, batch_size=question.batch_size)
    if question.plan is not None:
        return _given(question, question.plan, tables, topology, workload)
    try:
        return Answer(question, topology, workload, *_planned(question, tables, topology, workload))
    except PlanError as refusal:
        problem = str(refusal)
    try:
        plan, _ = _planned(question, tables, _with_cap(topology, UNLIMITED), workload)
        return Answer(question, topology, workload, plan, estimate(plan, tables, topology, workload), problem)
    except PlanError:
        return Answer(question, topology, workload, None, None, problem)


def _planned(
    question: Question, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
) -> tuple[ShardingPlan, Estimate]:
    planner = _planner(question, tables, topology, workload)
    plan = planner.plan_tables(tables, explain=False)
    found = plan.estimate
    if planner.cost_model != "recshard":  # chosen with other formulas, compared with the same ones
        found = estimate(plan, tables, topology, workload)
    return plan, found


def _given(
    question: Question,
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    workload: Workload,
) -> Answer:
    """Predicts an existing plan on these ranks."""
    try:
        flat = ShardingPlan({"": dict(plan.tables())})  # type: ignore[dict-item]
        full = flat.resolved(tables, topology.world_size, topology.local_world_size)
        found = estimate(full, tables, topology, workload)
    except PlanError as refusal:
        return Answer(question, topology, workload, None, None, str(refusal))
    return Answer(question, topology, workload, full, found, "" if found.fits else _too_large(found))


def _too_large(found: Estimate) -> str:
    """The ranks that need too much memory, and by how much."""
    words = []
    if over := found.overfull_ranks:
        rank = max(over, key=lambda at: float(found.held_bytes[at] - found.usable_bytes[at]))
        words += [f"rank {rank} needs {gigabytes(float(found.held_bytes[rank]))}"]
        words += [usable_text(found.usable_bytes[rank], found.capacity_bytes[rank])]
        words += [f"too full: {ranks_word(over)}"] * (len(over) > 1)
    if over := found.host_overfull_ranks:
        words += [f"{ranks_word(over)}: more in the host's memory than {gigabytes(found.host_room_bytes)} a rank"]
    return f"This plan does not fit: {', '.join(words)}."


def explained(shown: Answer, tables: Sequence[BaseEmbeddingConfig]) -> Answer:
    """The answer with the planner's full refusal, worded for a widget. Finding the fix takes up to a second, so
    `answer` omits it."""
    if not shown.problem or shown.question.plan is not None:
        return shown
    try:
        _planner(shown.question, tables, shown.topology, shown.workload).plan_tables(tables)
    except PlanDoesNotFit as refusal:
        return replace(shown, problem=refusal.worded("widget"))
    except PlanError as refusal:
        return replace(shown, problem=str(refusal))
    return shown


def searched(shown: Answer, tables: Sequence[BaseEmbeddingConfig]) -> SearchTrace | None:
    """The planner's search for an answer: planned again and recorded, once per answer."""
    if not shown.kept:
        found = None
        if shown.question.plan is None:
            planner = _planner(shown.question, tables, shown.topology, shown.workload)
            planner.keep_search = True
            try:
                found = planner.plan_tables(tables, explain=False).search
            except PlanError as refusal:
                found = refusal.search
        shown.kept.append(found)
    return shown.search


def _planner(
    question: Question, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload
) -> EmbeddingShardingPlanner:
    constraints = constraints_of(question, [table.name for table in tables])
    return EmbeddingShardingPlanner(topology, constraints=constraints, workload=workload, **question.options)


def facts_of(constraint: ParameterConstraints) -> ParameterConstraints:
    """What a constraint states about the table's lookups, without its requirements for the placement."""
    names = ("pooling_factors", "num_poolings", "batch_sizes", "is_weighted", "row_shares")
    return ParameterConstraints(**{name: getattr(constraint, name) for name in names})


def constraints_of(question: Question, tables: Sequence[str]) -> dict[str, ParameterConstraints]:
    """The planner's constraints: a chosen scheme goes before a constraint, and that before `allowed`."""
    found = dict(question.constraints)
    if question.allowed:
        for name in tables:
            own = found.get(name) or ParameterConstraints()
            if own.sharding_types is None and own.shards is None:
                found[name] = replace(own, sharding_types=list(question.allowed))
    for name, scheme in question.chosen.items():
        found[name] = requested(found.get(name) or ParameterConstraints(), scheme)
    return found
