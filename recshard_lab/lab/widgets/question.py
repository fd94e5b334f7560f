"""What a reader asks with the controls of the plan comparison, and the answer. No widget here: plain functions.

::

    Question(schemes, world_size, batch_size, memory_cap)  --answer-->  Answer(plan, estimate, problem)

A plan that does not fit is planned again without a limit and estimated with it, so that the reader sees *how* it does
not fit; the planner's refusal stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology

AUTO = "auto"
UNLIMITED = 1 << 60  # bytes


@dataclass(frozen=True)
class Question:
    """The state of the controls.

    Args:
        schemes: table -> scheme; tables that are not named, and those with "auto", are the planner's to choose.
        world_size: ranks.
        batch_size: samples of one rank.
        memory_cap: bytes of one rank.
    """

    schemes: Mapping[str, str]
    world_size: int
    batch_size: int
    memory_cap: int

    def automatic(self) -> Question:
        """The same question with every table left to the planner."""
        return replace(self, schemes={})

    @property
    def chosen(self) -> dict[str, str]:
        """Only the tables whose scheme the reader chose."""
        return {name: scheme for name, scheme in self.schemes.items() if scheme != AUTO}


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan and its prediction; ``problem`` is the planner's refusal, empty where the plan fits."""

    question: Question
    topology: Topology
    workload: Workload
    plan: ShardingPlan | None
    estimate: Estimate | None
    problem: str = ""


def topology_for(question: Question, base: Topology) -> Topology:
    """``base`` with the question's ranks and memory; hosts keep their size where the ranks fill them, and GPUs that
    are more than a host's are in further hosts."""
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
    """Plans and predicts; a refusal becomes part of the answer, never an exception."""
    topology = topology_for(question, base)
    workload = replace(workload, batch_size=question.batch_size)
    planner = EmbeddingShardingPlanner(topology, constraints=_constraints(question), workload=workload)
    try:
        plan = planner.plan_tables(tables, explain=False)
    except PlanError as refusal:
        problem = str(refusal)
    else:
        return Answer(question, topology, workload, plan, planner.last_estimate)
    roomy = EmbeddingShardingPlanner(
        _with_cap(topology, UNLIMITED), constraints=_constraints(question), workload=workload
    )
    try:
        plan = roomy.plan_tables(tables, explain=False)
        return Answer(question, topology, workload, plan, estimate(plan, tables, topology, workload), problem)
    except PlanError:
        return Answer(question, topology, workload, None, None, problem)


def explained(shown: Answer, tables: Sequence[BaseEmbeddingConfig]) -> Answer:
    """The answer with the planner's full refusal, which tries what would help: up to a second, so not in `answer`."""
    if not shown.problem:
        return shown
    planner = EmbeddingShardingPlanner(
        shown.topology, constraints=_constraints(shown.question), workload=shown.workload
    )
    try:
        planner.plan_tables(tables)
    except PlanError as refusal:
        return replace(shown, problem=str(refusal))
    return shown


def _constraints(question: Question) -> dict[str, ParameterConstraints]:
    return {name: ParameterConstraints(sharding_types=[scheme]) for name, scheme in question.chosen.items()}


_COLUMNS = 88  # of the Python shown


def python_for(question: Question, base: Topology, workload: Workload, num_tables: int = 0) -> str:
    """The same question in Python, ready to be copied; ``tables`` is the reader's list of configs, and
    ``access`` the workload's, where it has one.

    Args:
        question: what the controls ask.
        base: the topology the comparison was made with.
        workload: the step it was made with.
        num_tables: how many there are; one line says that all of them share a scheme.

    >>> print(python_for(Question({"movies": "row_wise"}, 4, 512, 10**9), Topology(2, ddr_cap=1), Workload()))
    from recshard_lab import EmbeddingShardingPlanner, ParameterConstraints, Topology, Workload
    <BLANKLINE>
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=4, ddr_cap=1000000000),
        workload=Workload(batch_size=512),
        constraints={
            "movies": ParameterConstraints(sharding_types=["row_wise"]),
        },
    )
    plan = planner.plan_tables(tables)
    planner.last_estimate.step_ms, planner.last_estimate.fits
    """
    topology = topology_for(question, base)
    device = topology.compute_device
    cap = {"hbm_cap": topology.hbm_cap} if device == "cuda" else {"ddr_cap": topology.ddr_cap}
    local = {} if topology.num_nodes == 1 else {"local_world_size": topology.local_world_size}
    given: dict[str, Any] = {"world_size": question.world_size, **_device(device), **cap, **local}
    given |= _differences(topology, Topology(**given))
    load: dict[str, Any] = {"batch_size": question.batch_size}
    load |= _differences(replace(workload, batch_size=question.batch_size), Workload(**load))
    if "access" in load:
        load["access"] = _Name("access")
    chosen = question.chosen
    names = ["EmbeddingShardingPlanner", *(["ParameterConstraints"] if chosen else []), "Topology", "Workload"]
    lines = [
        f"from recshard_lab import {', '.join(names)}",
        "",
        "planner = EmbeddingShardingPlanner(",
        *_call("topology=Topology", given),
        *_call("workload=Workload", load),
    ]
    if len(chosen) == num_tables > 1 and len(set(chosen.values())) == 1:
        wish = f'ParameterConstraints(sharding_types=["{next(iter(chosen.values()))}"])'
        lines.append(f"    constraints={{table.name: {wish} for table in tables}},")
    elif chosen:
        lines.append("    constraints={")
        lines += [f'        "{n}": ParameterConstraints(sharding_types=["{scheme}"]),' for n, scheme in chosen.items()]
        lines.append("    },")
    return "\n".join(
        [
            *lines,
            ")",
            "plan = planner.plan_tables(tables)",
            "planner.last_estimate.step_ms, planner.last_estimate.fits",
        ]
    )


class _Name(str):
    """A variable of the reader's, in place of a value too long to show."""

    __repr__ = str.__str__


def _device(name: str) -> dict[str, str]:
    return {} if name == "cpu" else {"compute_device": name}


def _differences(made: Any, default: Any) -> dict[str, Any]:
    """The fields of ``made`` that ``default`` has otherwise."""
    pairs = ((f.name, getattr(made, f.name), getattr(default, f.name)) for f in fields(made))
    return {name: value for name, value, other in pairs if value != other}


def _call(name: str, given: Mapping[str, Any]) -> list[str]:
    """An argument of the planner that is a call, on one line where it fits 88 columns."""
    line = f"    {name}({_arguments(given)}),"
    if len(line) <= _COLUMNS:
        return [line]
    lines = []
    for key, value in given.items():
        entry = f"        {_arguments({key: value})},"
        if len(entry) <= _COLUMNS or not isinstance(value, Mapping):
            lines.append(entry)
            continue
        parts = [f"{name!r}: {part!r}".replace("'", '"') for name, part in value.items()]
        lines += [f"        {key}={{", *_wrapped(parts), "        },"]
    return [f"    {name}(", *lines, "    ),"]


def _wrapped(parts: Sequence[str], indent: int = 12) -> list[str]:
    """Entries of a dictionary on lines of at most 88 columns.

    >>> _wrapped(['"a": 1', '"b": 2'], indent=4)
    ['    "a": 1, "b": 2,']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= _COLUMNS:
            lines[-1] += f" {part},"
        else:
            lines.append(f"{' ' * indent}{part},")
    return lines


def _arguments(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()).replace("'", '"')
