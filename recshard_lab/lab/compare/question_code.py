"""A question of the plan comparison as Python to copy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from keyword import iskeyword
from typing import Any

from recshard_lab.lab.compare.question import Question, constraints_of, topology_for
from recshard_lab.planner import Workload
from recshard_lab.sharding import ParameterConstraints, Topology

_ARGUMENTS = ("workload", "constraints", "cost_model")  # of rs.plan: no table's name as a keyword
_LAST = "plan.estimate.step_ms, plan.estimate.fits"
_COLUMNS = 88  # of the Python shown
_IN_ROOMS = {"CacheParams": "sharding.CacheParams", "RowShares": "sharding.RowShares"}
_CALLED = re.compile(
    r"(?<![\w.])(CacheParams|EmbeddingShardingPlanner|ParameterConstraints|RowShares|Shard|ShardingPlan|Topology|Workload"
    r"|compare_plans|estimate)(?=\(|\.\w+\()"
)
LONGEST_JSON = 20_000  # letters of a plan; a longer one is the reader's variable `given`


def python_for(question: Question, base: Topology, workload: Workload, num_tables: int = 0) -> str:
    """A question in Python with the variables ``tables`` (the configs), ``access`` (the workload's profiles, if any)
    and ``given`` (a plan too long to show).

    Args:
        question: the question.
        base: the topology of the comparison.
        workload: its step.
        num_tables: number of tables; if all have one scheme, one line sets it.

    >>> print(python_for(Question({"movies": "row_wise"}, 4, 512, 10**9), Topology(2, ddr_cap=1), Workload()))
    import recshard_lab as rs
    <BLANKLINE>
    plan = rs.plan(
        tables,
        rs.Topology(world_size=4, ddr_cap=1000000000),
        workload=rs.Workload(batch_size=512),
        movies="row_wise",
    )
    plan.estimate.step_ms, plan.estimate.fits
    """
    step = step_arguments(question, base, workload)
    if question.plan is not None:
        return _given(question, step)
    if not question.options:
        step[0] = step[0].replace("topology=", "", 1)
        schemes = _scheme_lines(question, num_tables)
        return imported("\n".join(["plan = rs.plan(", "    tables,", *step, *schemes, ")", _LAST]))
    constraints = _constraint_lines(question, num_tables)
    own_formulas = question.options.get("cost_model", "recshard") == "recshard"
    last = _LAST
    if not own_formulas:
        last = "found = estimate(plan, tables, planner.topology, planner.workload)\nfound.step_ms, found.fits"
    more = [f"    {_arguments({name: value})}," for name, value in question.options.items()]
    body = [
        "planner = EmbeddingShardingPlanner(",
        *step,
        *constraints,
        *more,
        ")",
        "plan = planner.plan_tables(tables)",
        last,
    ]
    return imported("\n".join(body))


def imported(body: str) -> str:
    """`body` with the library's names after ``rs.``, below the import.

    >>> print(imported('plan.estimate; Topology.preset("h100x8"), RowShares(8)'))
    import recshard_lab as rs
    <BLANKLINE>
    plan.estimate; rs.Topology.preset("h100x8"), rs.sharding.RowShares(8)
    """
    named = _CALLED.sub(lambda match: f"rs.{_IN_ROOMS.get(match[1], match[1])}", body)
    return f"import recshard_lab as rs\n\n{named}"


def step_arguments(question: Question, base: Topology, workload: Workload) -> list[str]:
    """``topology=Topology(...)`` and ``workload=Workload(...)`` as lines, without default values."""
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
    """``workload=Workload(...)`` as lines; `access` is the expression for its profiles, if any."""
    load: dict[str, Any] = {"batch_size": workload.batch_size}
    load |= _differences(workload, Workload(**load))
    if "access" in load:
        load["access"] = _Name(access)
    return _call("workload=Workload", load)


def spec_code(question: Question, num_tables: int = 0) -> list[str]:
    """A question as a value of ``plans`` of `compare_plans`, as lines without indentation."""
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
    constraints = [line[4:] for line in _constraint_lines(question, num_tables)]
    if not question.options:
        return "\n".join(constraints).removeprefix("constraints=").removesuffix(",").split("\n")
    more = [f"    {_arguments({name: value})}," for name, value in question.options.items()]
    return ["EmbeddingShardingPlanner(", *(f"    {line}" for line in constraints), *more, ")"]


def _given(question: Question, step: Sequence[str]) -> str:
    """An existing plan, predicted."""
    assert question.plan is not None
    text = question.plan.to_json()
    source = f"ShardingPlan.from_json({text!r})" if len(text) <= LONGEST_JSON else "given  # the plan of this column"
    body = [
        f"plan = {source}",
        "found = estimate(",
        "    plan,",
        "    tables,",
        *step,
        ")",
        "found.step_ms, found.fits",
    ]
    return imported("\n".join(body))


def _scheme_lines(question: Question, num_tables: int) -> list[str]:
    """Arguments of ``rs.plan``: ``table="scheme"`` if the question chooses schemes alone, else constraints."""
    chosen = question.chosen
    if question.constraints or question.allowed or not chosen:
        return _constraint_lines(question, num_tables)
    if len(chosen) == num_tables > 1 and len(set(chosen.values())) == 1:
        return [f'    constraints={{table.name: "{next(iter(chosen.values()))}" for table in tables}},']
    if all(name.isidentifier() and not iskeyword(name) and name not in _ARGUMENTS for name in chosen):
        return [f'    {name}="{scheme}",' for name, scheme in chosen.items()]
    return ["    constraints={", *_entries({name: f'"{scheme}"' for name, scheme in chosen.items()}), "    },"]


def _constraint_lines(question: Question, num_tables: int) -> list[str]:
    """The planner's constraints as lines."""
    chosen = question.chosen
    if len(chosen) == num_tables > 1 and len(set(chosen.values())) == 1 and not question.constraints:
        every = f'ParameterConstraints(sharding_types=["{next(iter(chosen.values()))}"])'
        return [f"    constraints={{table.name: {every} for table in tables}},"]
    named = {name: _constraint(question, name) for name in dict.fromkeys([*question.constraints, *chosen])}
    if question.allowed:
        every = f"table.name: {_constraint(question, '')} for table in tables"
        if not named:
            line = f"    constraints={{{every}}},"
            return [line] if len(line) <= _COLUMNS else ["    constraints={", f"        {every}", "    },"]
        return ["    constraints={", f"        **{{{every}}},", *_entries(named), "    },"]
    return ["    constraints={", *_entries(named), "    },"] if named else []


def _entries(named: Mapping[str, str]) -> list[str]:
    return [f'        "{name}": {text},' for name, text in named.items()]


def _constraint(question: Question, table: str) -> str:
    """The constraint of one table; for an unknown name, that of tables without constraints."""
    made = constraints_of(question, [table])[table]
    return f"ParameterConstraints({_arguments(_differences(made, ParameterConstraints()))})"


class _Name(str):
    """A variable in place of a value too long to show."""

    __repr__ = str.__str__


def _device(name: str) -> dict[str, str]:
    return {} if name == "cpu" else {"compute_device": name}


def _differences(made: Any, default: Any) -> dict[str, Any]:
    """The fields of ``made`` that differ from ``default``."""
    pairs = ((f.name, getattr(made, f.name), getattr(default, f.name)) for f in fields(made))
    return {name: value for name, value, other in pairs if value != other}


def _call(name: str, given: Mapping[str, Any]) -> list[str]:
    """An argument that is a call, on one line if it fits 88 columns."""
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
