"""Plans tables that must share their ranks as one: the i-th shards of all of them are placed on one rank.

A bundle combines one option of each table. The options have equally many shards and may use the same ranks. The loads
of a bundle are the sums of its options' loads, so solvers and bounds treat it as one option.

Shape letters: K loads, n shards, c sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.search.options import Option, Placement
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology
from recshard_lab.sharding.plan.types import nearest

MOST_MIXED = 64  # combinations of one number of rectangles up to which schemes and routes are mixed


@dataclass(frozen=True, eq=False)
class Bundle(Option):
    """One option of each of several tables; `parts` are those."""

    parts: tuple[Option, ...] = ()

    def placed_loads(self, ranks: Sequence[int], topology: Topology) -> Array:
        """``[K, n]`` with the i-th rectangle of every part on the i-th rank."""
        return np.asarray(sum(part.placed_loads(ranks, topology) for part in self.parts))


def groups_of(
    tables: Sequence[BaseEmbeddingConfig], constraints: Mapping[str, ParameterConstraints]
) -> list[list[int]]:
    """Positions of the tables that share their ranks, in the order of the tables; one alone is a group.

    Raises:
        PlanError: a constraint that names a table that does not exist, or its own.

    >>> tables = [BaseEmbeddingConfig(name=n, num_embeddings=9, embedding_dim=4) for n in "abc"]
    >>> groups_of(tables, {"c": ParameterConstraints(colocate_with=["a"])})
    [[0, 2], [1]]
    """
    place = {table.name: at for at, table in enumerate(tables)}
    first = list(range(len(tables)))
    for name, wish in constraints.items():
        for other in wish.colocate_with or ():
            if other not in place or other == name:
                why = "is that table itself" if other == name else f"does not exist{nearest(other, place)}"
                raise PlanError(f"table {name!r}: colocate_with names {other!r}, which {why}. Fix: leave it out")
            one, another = sorted((first[place[name]], first[place[other]]))
            first = [one if at == another else at for at in first]
    groups: dict[int, list[int]] = {}
    for at, leader in enumerate(first):
        groups.setdefault(leader, []).append(at)
    return list(groups.values())


def bundled(
    tables: Sequence[BaseEmbeddingConfig], options: Sequence[Sequence[Option]], groups: Sequence[Sequence[int]]
) -> list[list[Option]]:
    """What each group may become.

    Raises:
        PlanError: tables that have no way to share their ranks.
    """
    return [
        list(options[group[0]])
        if len(group) == 1
        else _bundles([tables[at] for at in group], [options[at] for at in group])
        for group in groups
    ]


def unbundled(placements: Sequence[Placement], groups: Sequence[Sequence[int]]) -> list[Placement]:
    """The placement of every table, in their order."""
    found: dict[int, Placement] = {}
    for placement, group in zip(placements, groups, strict=True):
        option = placement.option
        parts = option.parts if isinstance(option, Bundle) else (option,)
        found |= {at: Placement(part, placement.ranks) for at, part in zip(group, parts, strict=True)}
    return [found[at] for at in range(len(found))]


def lie_apart(plan: ShardingPlan, constraints: Mapping[str, ParameterConstraints]) -> bool:
    """Whether any tables that are to share their ranks do not."""
    wishes = {name: wish.colocate_with for name, wish in constraints.items() if wish.colocate_with}
    if not wishes:
        return False
    ranks = {name: {shard.rank for shard in sharding.shards} for name, sharding in plan.tables().items()}
    return any(ranks[name] != ranks[other] for name, others in wishes.items() for other in others)


def _bundles(tables: Sequence[BaseEmbeddingConfig], options: Sequence[Sequence[Option]]) -> list[Option]:
    by_count: list[dict[int, list[Option]]] = []
    for choices in options:
        own: dict[int, list[Option]] = {}
        for option in choices:
            own.setdefault(len(option.of), []).append(option)
        by_count.append(own)
    found: list[Option] = []
    for count in by_count[0]:
        lists = [own.get(count, []) for own in by_count]
        mixed = np.prod([len(choices) for choices in lists]) <= MOST_MIXED
        for parts in product(*lists) if mixed else _alike(lists):
            bundle = _bundle(parts)
            if bundle is not None:
                found.append(bundle)
    if not found:
        raise PlanError(_why_not(tables, options))
    return found


def _alike(lists: Sequence[Sequence[Option]]) -> list[tuple[Option, ...]]:
    """One option of each list, all of one scheme and route."""
    by_kind = [{(option.proposal.scheme, option.route): option for option in reversed(choices)} for choices in lists]
    return [tuple(own[kind] for own in by_kind) for kind in by_kind[0] if all(kind in own for own in by_kind)]


def _bundle(parts: tuple[Option, ...]) -> Bundle | None:
    """The bundle of these options; None if they cannot share ranks."""
    usable = frozenset.intersection(*(part.usable for part in parts))
    listed: tuple[tuple[int, ...], ...] | None = None
    for part in parts:
        own = part.proposal.assignments
        if own is not None:
            listed = own if listed is None else tuple(ranks for ranks in listed if ranks in set(own))
    if listed is not None:
        listed = tuple(ranks for ranks in listed if usable.issuperset(ranks))
    if not usable or listed == ():
        return None
    together, of = np.unique(np.stack([part.of for part in parts]), axis=1, return_inverse=True)  # [parts, c], [n]
    of = of.ravel()
    sizes = list(zip(parts, together, strict=True))
    distinct = len(of) <= len(usable) if listed is None else all(len(set(ranks)) == len(of) for ranks in listed)
    return Bundle(
        replace(parts[0].proposal, assignments=listed),
        np.asarray(sum(part.kinds[:, size] for part, size in sizes)),
        np.bincount(of, minlength=together.shape[1]).astype(float),
        of,
        usable,
        parts[0].kernel,
        distinct,
        "two_hop" if any(part.route == "two_hop" for part in parts) else parts[0].route,
        np.asarray(sum(part.alone[:, size] for part, size in sizes)),
        parts=parts,
    )


def _why_not(tables: Sequence[BaseEmbeddingConfig], options: Sequence[Sequence[Option]]) -> str:
    names = " and ".join(repr(table.name) for table in tables)
    ways = []
    for table, choices in zip(tables, options, strict=True):
        counts = sorted({len(option.of) for option in choices})
        ranks = sorted(frozenset.union(*(option.usable for option in choices)))
        ways.append(f"{table.name!r} in {', '.join(map(str, counts))} pieces on ranks {ranks}")
    if not frozenset.intersection(*(choices[0].usable for choices in options)):
        fix = "constrain them to ranks that they have in common"
    else:
        fix = "allow table_wise for all of them"
    return f"tables {names} are to share their ranks but cannot: {'; '.join(ways)}. Fix: {fix}"
