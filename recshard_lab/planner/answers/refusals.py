"""Errors if no plan fits: the table that does not fit, the missing bytes, and the smallest changes that help."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.model.loads import MEMORY
from recshard_lab.planner.search.colocated import groups_of
from recshard_lab.planner.search.greedy import Solution, solve
from recshard_lab.planner.search.options import DoesNotFit, allowed_schemes, options_of
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology, scheme_names

if TYPE_CHECKING:
    from recshard_lab.planner.planner import EmbeddingShardingPlanner

TRIES = 8  # doublings of the step in the search for the first value that fits
MOST_MEMORY = 1_800  # position on the grid of `_grid`: 10 ** 21 bytes
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
        python: the change as Python code or in words.
        command_line, widget: the same as an option of ``recshard plan make`` and as a control; None if there is none.
    """

    python: str
    command_line: str | None = None
    widget: str | None = None


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
        planner: the settings, workload and constraints included.
        tables: to place.
        stuck: index of the table that fits on no rank.
        host: as in `DoesNotFit`.
    """

    planner: "EmbeddingShardingPlanner"
    tables: Sequence[BaseEmbeddingConfig]
    stuck: int
    host: tuple[int, float] | None = None

    @property
    def table(self) -> BaseEmbeddingConfig:
        return self.tables[self.stuck]

    @property
    def topology(self) -> Topology:
        return self.planner.topology

    @property
    def constraints(self) -> Mapping[str, ParameterConstraints]:
        return self.planner.constraints

    @property
    def together(self) -> list[BaseEmbeddingConfig]:
        """The other tables that must be on the same ranks."""
        (group,) = (group for group in groups_of(self.tables, self.constraints) if self.stuck in group)
        return [self.tables[at] for at in group if at != self.stuck]

    def solved(self) -> Solution | None:
        """The first solution that the search finds; None if there is none."""
        by = self.planner
        try:
            model = by.model(self.tables)
            return solve(model, self.tables, by.constraints, by.local_search_passes, by.route, any_plan=True)
        except (DoesNotFit, PlanError):
            return None

    @property
    def fits(self) -> bool:
        """Whether the planner finds a plan."""
        return self.solved() is not None

    def under(self, **settings: Any) -> "Refused":
        """The same tables with other settings of the planner."""
        planner = copy(self.planner)
        vars(planner).update(settings)
        return replace(self, planner=planner)

    def on(self, **figures: Any) -> "Refused":
        """The same tables on another topology."""
        return self.under(topology=replace(self.topology, **figures))

    def with_constraint(self, name: str, constraint: ParameterConstraints) -> "Refused":
        """The same tables with another constraint of one of them."""
        return self.under(constraints={**self.constraints, name: constraint})


def refusal(refused: Refused, explain: bool = True) -> PlanDoesNotFit:
    """The error for a problem. With `explain`, it also has the missing memory and fixes, each tried by planning."""
    what = _stuck_text(refused)
    if not explain:
        return PlanDoesNotFit(what)
    if refused.host is not None:
        needed = _least_memory(refused, "ddr_cap", refused.topology.ddr_cap)
        return PlanDoesNotFit(what, [] if needed is None else [Change(f"Topology(ddr_cap={needed:_})")])
    words = [_allow_more(refused), *_loosened(refused), _half(refused)]
    changes: list[Change | None] = [Change(text, text, text) for text in words if text is not None]
    changes += [*_more_memory(refused), _fewest_ranks(refused)]
    return PlanDoesNotFit(what + _missing_text(refused), [change for change in changes if change is not None])


def _stuck_text(refused: Refused) -> str:
    if refused.host is not None:
        rank, held = refused.host
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


def _allow_more(refused: Refused) -> str | None:
    """A fix: a scheme that the table's constraint does not list."""
    name = refused.table.name
    constraint = refused.constraints.get(name)
    if constraint is None or constraint.sharding_types is None:
        return None
    for scheme in scheme_names():
        if scheme in [*constraint.sharding_types, *(constraint.forbidden_sharding_types or ())]:
            continue
        more = replace(constraint, sharding_types=[*constraint.sharding_types, scheme])
        if (found := refused.with_constraint(name, more).solved()) is not None:
            ranks = len(set(found.placements[refused.stuck].ranks))
            return f"allow {scheme} on {ranks} rank{'s' * (ranks > 1)}"
    return None


def _loosened(refused: Refused) -> list[str]:
    """Fixes: constraints of the table without which the planner finds a plan."""
    name, found = refused.table.name, []
    shared, constraint = refused.together, refused.constraints.get(name)
    if shared:
        apart = dict(refused.constraints)
        for each in {name, *(each.name for each in shared)} & apart.keys():
            apart[each] = replace(apart[each], colocate_with=None)
        if refused.under(constraints=apart).fits:
            found.append(f"remove colocate_with= of {name!r} and its partners")
    if constraint is None:
        return found
    for field, text in LOOSER.items():
        if getattr(constraint, field) is not None:
            without = copy(constraint)
            setattr(without, field, None)
            if refused.with_constraint(name, without).fits:
                found.append(text.format(getattr(constraint, field)))
    least = constraint.min_partition or 1

    def fits(less: int) -> bool:
        return refused.with_constraint(name, replace(constraint, min_partition=least - less)).fits

    less = _first(0, least - 1, fits)
    return found if less is None else [*found, f"min_partition={least - less} for {name!r}"]


def _half(refused: Refused) -> str | None:
    table = refused.table
    if table.data_type is not DataType.FP32:
        return None
    halved = [replace(t, data_type=DataType.FP16) if t is table else t for t in refused.tables]
    return f"fp16 weights for {table.name!r}" if replace(refused, tables=halved).fits else None


def _more_memory(refused: Refused) -> list[Change]:
    """The smallest memory of a rank with which a plan is found, to two digits, and the largest smaller reserve."""
    top = refused.topology
    name = "hbm_cap" if top.compute_device == "cuda" else "ddr_cap"
    least = sum(_least_bytes(refused)) / (1 - top.reserve_fraction)
    memory = _least_memory(refused, name, max(top.memory_cap_bytes, least))
    if memory is None:
        return []
    widget = f"Memory per rank: {gigabytes(memory)} or more"
    changes = [Change(f"Topology({name}={memory:_})", f"--memory-gb {memory / 1e9:g}", widget)]
    if top.memory_cap_bytes:  # in tenths of a percent, down to the share that leaves as much free as that memory
        high = math.ceil(1000 * top.reserve_fraction) - 1
        enough = math.floor(1000 * (1 - memory * (1 - top.reserve_fraction) / top.memory_cap_bytes))
        less = _first(-1, high - max(0, enough), lambda less: refused.on(reserve_fraction=(high - less) / 1000).fits)
        changes += [Change(f"Topology(reserve_fraction={(high - less) / 1000:g})")] if less is not None else []
    return changes


def _least_memory(refused: Refused, name: str, low: float) -> int | None:
    """The least value of `hbm_cap` or `ddr_cap` above `low` with which a plan is found, to two digits."""
    found = _first(_grid(max(low, 10.0)), MOST_MEMORY, lambda at: refused.on(**{name: _value(at)}).fits)
    while found is not None and refused.on(**{name: int(0.9 * _value(found))}).fits:  # a search is not quite monotone
        found = _grid(0.9 * _value(found))
    return None if found is None else _value(found)


def _fewest_ranks(refused: Refused) -> Change | None:
    """The fewest ranks, in whole hosts, with which the planner finds a plan."""
    top = refused.topology
    step = 1 if top.num_nodes == 1 else top.local_world_size
    hosts, free = top.world_size // step, _free(top)
    if not free or any(constraint.shards is not None for constraint in refused.constraints.values()):
        return None

    def fits(count: int) -> bool:
        size = count * step
        return refused.on(world_size=size, local_world_size=size if top.num_nodes == 1 else step).fits

    held = _least_bytes(refused)[0] * top.world_size
    low = max(hosts, math.ceil(held / free / step) - 1)
    found = _first(low, MOST_MORE_RANKS // len(refused.tables) // step, fits)
    if found is None:
        return None
    ranks = found * step
    return Change(f"Topology(world_size={ranks})", f"--ranks {ranks}", f"Ranks: {ranks} or more")


def _least_bytes(refused: Refused) -> tuple[float, float, float]:
    """Bytes per rank, on average, that every plan needs: weights and optimizer state, buffers, dense layers."""
    model, ranks = refused.planner.model(refused.tables), refused.topology.world_size
    options = options_of(model, refused.tables, refused.constraints, refused.planner.route)
    best = [min((option.loads[MEMORY:].sum(axis=1) for option in own), key=lambda each: each.sum()) for own in options]
    held = sum(float(each[:2].sum()) for each in best) / ranks
    buffers = sum(float(each[2:].sum()) for each in best) / ranks
    dense = float(model.fixed_memory[2])
    return held, buffers + float(model.fixed_memory.sum()) - dense, dense


def _first(low: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """The least integer above `low`, up to `most`, that fits; None if `TRIES` steps, each twice as long, find none."""
    for n in range(TRIES):
        high = min(low + 2**n, most)
        if high <= low:
            return None
        if fits(high):
            return low + 1 + bisect_left(range(low + 1, high), True, key=fits)
        low = high
    return None


def _grid(value: float) -> int:
    """The position of the largest number of two significant digits that is at most `value`, from 10 up.

    >>> [_value(_grid(x)) for x in (10, 10.9, 99.9, 100, 449_999)]
    [10, 10, 99, 100, 440000]
    """
    digits = str(int(value))
    return 90 * (len(digits) - 2) + int(digits[:2]) - 10


def _value(at: int) -> int:
    return (10 + at % 90) * 10 ** (at // 90)
