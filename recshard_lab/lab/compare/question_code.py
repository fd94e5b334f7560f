"""A question of the plan comparison as Python, ready to be copied."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from recshard_lab.lab.compare.question import Question, constraints_of, topology_for
from recshard_lab.planner import Workload
from recshard_lab.sharding import ParameterConstraints, Topology

_COLUMNS = 88  # of the Python shown
_MENTIONED = ("EmbeddingShardingPlanner", "ParameterConstraints", "RowShares", "Shard", "ShardingPlan")
LONGEST_JSON = 20_000  # letters of a plan; a longer one is the reader's variable `given`


def python_for(question: Question, base: Topology, workload: Workload, num_tables: int = 0) -> str:
    """The same question in Python; ``tables`` is the reader's list of configs, ``access`` the workload's, where it has
    one, and ``given`` a plan too long to show.

    Args:
        question: what is asked.
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
    plan.estimate.step_ms, plan.estimate.fits
    """
    step = step_arguments(question, base, workload)
    if question.plan is not None:
        return _given(question, step)
    wishes = _wishes(question, num_tables)
    own_formulas = question.options.get("cost_model", "recshard") == "recshard"
    last = "plan.estimate.step_ms, plan.estimate.fits"
    if not own_formulas:
        last = "found = estimate(plan, tables, planner.topology, planner.workload)\nfound.step_ms, found.fits"
    more = [f"    {_arguments({name: value})}," for name, value in question.options.items()]
    body = [
        "planner = EmbeddingShardingPlanner(",
        *step,
        *wishes,
        *more,
        ")",
        "plan = planner.plan_tables(tables)",
        last,
    ]
    names = ["EmbeddingShardingPlanner", "Topology", "Workload", *([] if own_formulas else ["estimate"])]
    return imported("\n".join(body), names)


def imported(body: str, names: Sequence[str]) -> str:
    """`body` below the import of `names`, and of what else of the library's it mentions."""
    mentioned = [name for name in _MENTIONED if re.search(rf"\b{name}\b", body)]
    return f"from recshard_lab import {', '.join(sorted({*names, *mentioned}))}\n\n{body}"


def step_arguments(question: Question, base: Topology, workload: Workload) -> list[str]:
    """``topology=Topology(...)`` and ``workload=Workload(...)`` as lines, without what they have anyway."""
    own = workload_argument(replace(workload, batch_size=question.batch_size))
    return [*topology_argument(question, base), *own]


def topology_argument(question: Question, base: Topology) -> list[str]:
    """``topology=Topology(...)`` as lines."""
    topology = topology_for(question, base)
    device = topology.compute_device
    cap = {"hbm_cap": topology.hbm_cap} if device == "cuda" else {"ddr_cap": topology.ddr_cap}
    local = {} if topology.num_nodes == 1 else {"local_world_size": topology.local_world_size}
    given: dict[str, Any] = {"world_size": question.world_size, **_device(device), **cap, **local}
    given |= _differences(topology, Topology(**given))
    return _call("topology=Topology", given)


def workload_argument(workload: Workload, access: str = "access") -> list[str]:
    """``workload=Workload(...)`` as lines; `access` stands for its profiles, where it has some."""
    load: dict[str, Any] = {"batch_size": workload.batch_size}
    load |= _differences(workload, Workload(**load))
    if "access" in load:
        load["access"] = _Name(access)
    return _call("workload=Workload", load)


def wish_code(question: Question, num_tables: int = 0) -> list[str]:
    """What one plan is asked for as a value of `compare_plans`'s ``plans``, as lines without indentation."""
    if question.plan is not None:
        text = question.plan.to_json()
        return [f"ShardingPlan.from_json({text!r})" if len(text) <= LONGEST_JSON else "given"]
    chosen = question.chosen
    if not (question.constraints or question.allowed or question.options):
        if not chosen:
            return ['"planner"']
        if len(chosen) == num_tables and len(set(chosen.values())) == 1:
            return [f'"{next(iter(chosen.values()))}"']
        return ["{", *(f'    "{name}": "{scheme}",' for name, scheme in chosen.items()), "}"]
    wishes = [line[4:] for line in _wishes(question, num_tables)]
    if not question.options:
        return "\n".join(wishes).removeprefix("constraints=").removesuffix(",").split("\n")
    more = [f"    {_arguments({name: value})}," for name, value in question.options.items()]
    return ["EmbeddingShardingPlanner(", *(f"    {line}" for line in wishes), *more, ")"]


def _given(question: Question, step: Sequence[str]) -> str:
    """A plan that is there already, predicted."""
    assert question.plan is not None
    text = question.plan.to_json()
    told = f"ShardingPlan.from_json({text!r})" if len(text) <= LONGEST_JSON else "given  # the plan of this column"
    body = [f"plan = {told}", "found = estimate(", "    plan,", "    tables,", *step, ")", "found.step_ms, found.fits"]
    return imported("\n".join(body), ["Topology", "Workload", "estimate"])


def _wishes(question: Question, num_tables: int) -> list[str]:
    """The planner's constraints as lines."""
    chosen = question.chosen
    if len(chosen) == num_tables > 1 and len(set(chosen.values())) == 1 and not question.constraints:
        wish = f'ParameterConstraints(sharding_types=["{next(iter(chosen.values()))}"])'
        return [f"    constraints={{table.name: {wish} for table in tables}},"]
    named = {name: _constraint(question, name) for name in dict.fromkeys([*question.constraints, *chosen])}
    if question.allowed:
        every = f"table.name: {_constraint(question, '')} for table in tables"
        if not named:
            line = f"    constraints={{{every}}},"
            return [line] if len(line) <= _COLUMNS else ["    constraints={", f"        {every}", "    },"]
        return ["    constraints={", f"        **{{{every}}},", *_entries(named), "    },"]
    return ["    constraints={", *_entries(named), "    },"] if named else []


def _entries(named: Mapping[str, str]) -> list[str]:
    return [f'        "{name}": {wish},' for name, wish in named.items()]


def _constraint(question: Question, table: str) -> str:
    """The constraint of one table, of any that nothing is said of where there is none of that name."""
    made = constraints_of(question, [table])[table]
    return f"ParameterConstraints({_arguments(_differences(made, ParameterConstraints()))})"


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
    """An argument that is a call, on one line where it fits 88 columns."""
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
