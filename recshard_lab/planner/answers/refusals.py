"""Errors if no plan fits: the table that does not fit, the missing bytes, and the smallest changes that help."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.estimate import cost_model_named
from recshard_lab.planner.model.loads import MEMORY
from recshard_lab.planner.search.colocated import groups_of
from recshard_lab.planner.search.greedy import solve, solve_in_host
from recshard_lab.planner.search.options import DoesNotFit, Placement, allowed_schemes, options_of
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology, scheme_names

TRIES = 8  # doublings of the step in the search for the first value that fits
MOST_MORE_RANKS = 2_500  # tables x ranks up to which larger numbers of ranks are tried
LOOSER = {
    "shards": "remove its shards=",
    "ranks": "allow more ranks than {}",
    "forbidden_ranks": "allow a rank of forbidden_ranks={}",
    "forbidden_sharding_types": "allow a scheme of forbidden_sharding_types={}",
    "device_group": "allow ranks outside device_group {!r}",
}
"""Field of a constraint -> the fix, if the table fits without it."""


@dataclass(frozen=True)
class Change:
    """One change with which the planner finds a plan. With 10% less of it, the planner finds none.

    Attributes:
        kind: "memory", "host_memory", "reserve", "ranks" or "constraint".
        python: the change as Python code or in words.
        command_line, widget: the same as an option of ``recshard plan`` and as a control; None if there is none.
    """

    kind: str
    python: str
    command_line: str | None = None
    widget: str | None = None


def memory_change(argument: str, num_bytes: int) -> Change:
    """A larger memory of each rank.

    >>> memory_change("hbm_cap", 16 * 10**9)
    Change(kind='memory', python='Topology(hbm_cap=16_000_000_000)', command_line='--memory-gb 16', widget='Memory per \
rank: 16.0 GB or more')
    """
    option = f"--memory-gb {_rounded_up(num_bytes / 1e9, 3):g}"
    widget = f"Memory per rank: {gigabytes(num_bytes)} or more"
    return Change("memory", f"Topology({argument}={num_bytes:_})", option, widget)


def constraint_change(words: str) -> Change:
    """A change of constraints or tables, in the same words everywhere."""
    return Change("constraint", words, words, words)


class PlanDoesNotFit(PlanError):
    """No plan fits. `str` names fixes as Python arguments, `worded` as options of other places.

    Attributes:
        what: the table that does not fit, and the missing memory.
        changes: fixes, the most likely first. The planner found a plan with each of them. None if none were tried.
    """

    def __init__(self, what: str, changes: Sequence[Change] | None = None) -> None:
        super().__init__(what, changes)
        self.what, self.changes = what, changes

    def worded(self, place: str) -> str:
        """The message with fixes for "python", "command_line" or "widget"."""
        if self.changes is None:
            return self.what
        words = [text for change in self.changes if (text := getattr(change, place)) is not None]
        words = words or [change.python for change in self.changes]
        return f"{self.what} Fix: {', or '.join(words) or 'use more ranks, more memory or smaller tables'}."

    def __str__(self) -> str:
        return self.worded("python")


@dataclass(frozen=True)
class Refused:
    """A planning problem without a solution.

    Attributes:
        stuck: index of the table that fits on no rank.
        host: as in `DoesNotFit`.
    """

    tables: Sequence[BaseEmbeddingConfig]
    stuck: int
    topology: Topology
    workload: Workload
    constraints: Mapping[str, ParameterConstraints]
    route: str | None = None
    cost_model: Any = "recshard"
    passes: int = 3
    host: tuple[int, float, float] | None = None

    @property
    def table(self) -> BaseEmbeddingConfig:
        return self.tables[self.stuck]

    @property
    def together(self) -> list[BaseEmbeddingConfig]:
        """The other tables that must be on the same ranks."""
        (group,) = (group for group in groups_of(self.tables, self.constraints) if self.stuck in group)
        return [self.tables[at] for at in group if at != self.stuck]

    def model(self) -> CostModel:
        return cost_model_named(self.cost_model)(self.tables, self.topology, self.workload, self.constraints)

    def placements(self) -> list[Placement] | None:
        """Placements found without local search; None if there are none."""
        try:
            return solve(self.model(), self.tables, self.constraints, passes=0, route=self.route).placements
        except (DoesNotFit, PlanError):
            return None

    @property
    def fits(self) -> bool:
        """Whether the planner finds a plan."""
        try:
            solve_in_host(self.model(), self.tables, self.constraints, self.passes, self.route, any_plan=True)
        except (DoesNotFit, PlanError):
            return False
        return True

    def on(self, **figures: object) -> "Refused":
        """The same tables on another topology."""
        return replace(self, topology=replace(self.topology, **figures))  # type: ignore[arg-type]


def refusal(refused: Refused, explain: bool = True) -> PlanDoesNotFit:
    """The error for a problem. With `explain`, it also has the missing memory and fixes, each tried by planning."""
    if not explain:
        return PlanDoesNotFit(_stuck_text(refused))
    changes: list[Change | None]
    if refused.host is not None:  # ddr_cap does not change the plans that are tried
        needed = _value(_grid(refused.host[2] / (1 - refused.topology.reserve_fraction)) + 1)
        changes = [Change("host_memory", f"Topology(ddr_cap={needed:_})")]
    else:
        memory = _smallest_memory(refused)
        changes = [_allow_more(refused), *_loosened(refused), _half(refused)]
        changes += [memory_change(*memory), _largest_reserve(refused, memory[1])] if memory is not None else []
        changes += [_fewest_ranks(refused)]
    what = _stuck_text(refused) + _missing_text(refused)
    return PlanDoesNotFit(what, [change for change in changes if change is not None])


def _stuck_text(refused: Refused) -> str:
    if refused.host is not None:
        rank, held, _ = refused.host
        room = refused.topology.ddr_cap * (1 - refused.topology.reserve_fraction)
        return (
            f"rank {rank} would hold {gigabytes(held)} in host memory: it has {gigabytes(room)} there (ddr_cap less "
            f"the reserve)."
        )
    table, constraint = refused.table, refused.constraints.get(refused.table.name)
    schemes = allowed_schemes(table, constraint)
    where = f"on any rank with {', '.join(schemes)}" if len(schemes) < 4 else "on any rank with any scheme"
    if constraint is not None and constraint.shards is not None:
        where = "on the ranks of its constraint"
    size = f"{table.num_embeddings:,} x {table.embedding_dim:,}, {gigabytes(table.weight_bytes)}"
    count = len(refused.tables) - 1
    others = f" beside the other {count:,} table{'s' * (count > 1)}" if count else ""
    shared, named = refused.together, ""
    if shared:
        total = gigabytes(sum(each.weight_bytes for each in (table, *shared)))
        named = f", with {', '.join(repr(each.name) for each in shared)} on the same ranks ({total} together),"
    return (
        f"table {table.name!r} ({size}){named} does not fit {where}{others}: "
        f"a rank has {gigabytes(_free(refused.topology))} free after the reserve."
    )


def _missing_text(refused: Refused) -> str:
    """The missing bytes of all ranks together, and what needs memory; empty if the ranks have enough in total."""
    if refused.host is not None:
        return ""
    ranks = refused.topology.world_size
    held, buffers, dense = (each * ranks for each in _least_bytes(refused))
    needed, limit = held + buffers + dense, float(_free(refused.topology)) * ranks
    if needed <= limit:
        return ""
    parts = [f"{gigabytes(held)} of weights and optimizer state", f"{gigabytes(buffers)} of buffers"]
    parts += [f"{gigabytes(dense)} of dense layers"] if dense else []
    return (
        f" All tables need at least {gigabytes(needed)} ({', '.join(parts)}); {ranks:,} rank{'s' * (ranks > 1)} "
        f"{'have' if ranks > 1 else 'has'} {gigabytes(limit)}: {gigabytes(needed - limit)} too little."
    )


def _free(topology: Topology) -> int:
    return max(0, topology.free_memory_bytes())


def _allow_more(refused: Refused) -> Change | None:
    name = refused.table.name
    constraint = refused.constraints.get(name)
    if constraint is None or constraint.sharding_types is None:
        return None
    for scheme in scheme_names():
        if scheme in [*constraint.sharding_types, *(constraint.forbidden_sharding_types or ())]:
            continue
        more = {**refused.constraints, name: replace(constraint, sharding_types=[*constraint.sharding_types, scheme])}
        found = replace(refused, constraints=more).placements()
        if found is not None:
            ranks = len(set(found[refused.stuck].ranks))
            return constraint_change(f"allow {scheme} on {ranks} rank{'s' * (ranks > 1)}")
    return None


def _loosened(refused: Refused) -> list[Change]:
    """Fixes: constraints of the table without which the planner finds a plan."""
    name, found = refused.table.name, []
    constraint = refused.constraints.get(name)
    shared = refused.together
    if shared:
        apart = dict(refused.constraints)
        for each in {name, *(each.name for each in shared)} & apart.keys():
            apart[each] = replace(apart[each], colocate_with=None)
        if replace(refused, constraints=apart).fits:
            found.append(f"remove colocate_with= of {name!r} and its partners")
    for field, text in LOOSER.items():
        if constraint is not None and getattr(constraint, field) is not None:
            without = copy(constraint)
            setattr(without, field, None)
            if replace(refused, constraints={**refused.constraints, name: without}).fits:
                found.append(text.format(getattr(constraint, field)))
    if constraint is not None and constraint.min_partition is not None and constraint.min_partition > 1:

        def with_partition(columns: int) -> Refused:
            looser = {**refused.constraints, name: replace(constraint, min_partition=columns)}
            return replace(refused, constraints=looser)

        most = _largest(1, constraint.min_partition - 1, lambda columns: with_partition(columns).fits)
        if most is not None:
            found.append(f"min_partition={most} for {name!r}")
    return [constraint_change(text) for text in found]


def _half(refused: Refused) -> Change | None:
    table = refused.table
    if table.data_type is not DataType.FP32:
        return None
    halved = [replace(t, data_type=DataType.FP16) if t is table else t for t in refused.tables]
    return constraint_change(f"fp16 weights for {table.name!r}") if replace(refused, tables=halved).fits else None


def _smallest_memory(refused: Refused) -> tuple[str, int] | None:
    """The smallest memory of a rank with which a plan is found: argument of `Topology`, bytes to two digits."""
    top = refused.topology
    name = "hbm_cap" if top.compute_device == "cuda" else "ddr_cap"
    least = sum(_least_bytes(refused)) / (1 - top.reserve_fraction)
    found = _first(_grid(max(top.memory_cap_bytes, least, 10.0)), lambda at: refused.on(**{name: _value(at)}).fits)
    while found is not None and refused.on(**{name: int(0.9 * _value(found))}).fits:  # a search is not quite monotone
        found = _grid(0.9 * _value(found))
    return None if found is None else (name, _value(found))


def _largest_reserve(refused: Refused, memory: int) -> Change | None:
    """The largest smaller reserve, to a tenth of a percent, with which the planner finds a plan.

    Args:
        memory: bytes of a rank with which it finds one: the start of this search.
    """
    top = refused.topology
    if not top.memory_cap_bytes:
        return None
    enough = 1 - memory * (1 - top.reserve_fraction) / top.memory_cap_bytes
    low, high = math.floor(1000 * enough), math.ceil(1000 * top.reserve_fraction) - 1
    most = _largest(max(0, low), high, lambda share: refused.on(reserve_fraction=share / 1000).fits)
    return None if most is None else Change("reserve", f"Topology(reserve_fraction={most / 1000:g})")


def _fewest_ranks(refused: Refused) -> Change | None:
    """The fewest ranks, in whole hosts, with which the planner finds a plan."""
    top = refused.topology
    step = 1 if top.num_nodes == 1 else top.local_world_size
    hosts, free = top.world_size // step, _free(top)
    if not free or any(constraint.shards is not None for constraint in refused.constraints.values()):
        return None

    def fits(count: int) -> bool:
        size = count * step
        local = size if top.num_nodes == 1 else step
        more = replace(top, world_size=size, local_world_size=local, device_groups=top.device_groups)
        return replace(refused, topology=more).fits

    held = _least_bytes(refused)[0] * top.world_size
    low = max(hosts, math.ceil(held / free / step) - 1)
    high = MOST_MORE_RANKS // len(refused.tables) // step
    found = _first(low, fits, high) if low < high else None
    if found is None:
        return None
    ranks = found * step
    return Change("ranks", f"Topology(world_size={ranks})", f"--ranks {ranks}", f"Ranks: {ranks} or more")


def _least_bytes(refused: Refused) -> tuple[float, float, float]:
    """Bytes per rank, on average, that every plan needs: weights and optimizer state, buffers, dense layers."""
    model, ranks = refused.model(), refused.topology.world_size
    options = options_of(model, refused.tables, refused.constraints, refused.route)
    best = [
        min((option.loads[MEMORY:].sum(axis=1) for option in choices), key=lambda each: each.sum())
        for choices in options
    ]
    held = sum(float(each[:2].sum()) for each in best) / ranks
    buffers = sum(float(each[2:].sum()) for each in best) / ranks
    dense = float(model.fixed_memory[2])
    return held, buffers + float(model.fixed_memory.sum()) - dense, dense


def _first(low: int, fits: Callable[[int], bool], most: float = math.inf) -> int | None:
    """The least integer above `low` that fits, if `low` does not; None if none was found up to `most`."""
    high, step = low + 1, 1
    for _ in range(TRIES):
        if high > most:
            return None
        if fits(high):
            break
        low, high, step = high, high + 2 * step, 2 * step
    else:
        return None
    return low + 1 + bisect_left(range(low + 1, high), True, key=fits)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest integer from `low` to `high` that fits; None if `low` does not."""
    if high < low or not fits(low):
        return None
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda at: not fits(at))


def _grid(value: float) -> int:
    """The position of the largest number of two significant digits that is at most `value`, from 10 up.

    >>> [_value(_grid(x)) for x in (10, 10.9, 99.9, 100, 449_999)]
    [10, 10, 99, 100, 440000]
    """
    exponent = 0
    while value >= 100 * 10**exponent:
        exponent += 1
    return 90 * exponent + max(10, int(value // 10**exponent)) - 10


def _value(at: int) -> int:
    return (10 + at % 90) * 10 ** (at // 90)


def _rounded_up(value: float, digits: int) -> float:
    """`value` to so many significant digits, never less.

    >>> _rounded_up(14.9012, 3)
    15.0
    """
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale - 1e-9) / scale
