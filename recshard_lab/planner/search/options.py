"""What the planner chooses from: every proposal of every allowed scheme, with the loads of its rectangles.

Shape letters: K loads, W ranks, n rectangles, c sizes of rectangles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import (
    ACROSS_BOTH,
    BY_NODE,
    HOST,
    LOOKUP,
    ROUTE_NUMBERS,
    SCATTER_BOTH,
    UPDATE,
    Rects,
    across_shares,
)
from recshard_lab.planner.search.rect_kinds import RectKinds, rect_kinds, summed_rows
from recshard_lab.planner.search.tier_splits import tier_splits
from recshard_lab.planner.workload import Array, check_route_applies, is_pooled
from recshard_lab.sharding import (
    CacheParams,
    EmbeddingComputeKernel,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Proposal,
    Shard,
    Topology,
    scheme_named,
    scheme_names,
    usable_ranks,
)
from recshard_lab.sharding.plan.types import DDR, DISTINCT_ROWS
from recshard_lab.sharding.plan.validate import check_shards, replica_flags
from recshard_lab.sharding.schemes.column_wise import unit_of
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

LISTED = 16  # ranks that a message lists

_Draft = tuple[int, Proposal, frozenset[int], str, bool, str]
"""Table, proposal, usable ranks, kernel, whether it is replicated, route."""

MOST_SPELLED = 256  # rectangles of all assignments of one proposal, up to which each is looked at


@dataclass(frozen=True, eq=False)
class Option:
    """One proposal for one table, under one kernel and route.

    Attributes:
        kinds: ``[K, c]`` loads of a rectangle of each size that occurs; under two hops ACROSS is the least it can be,
            with as many rectangles on one node as the proposal allows.
        counts: ``[c]`` how many there are.
        of: ``[n]`` the size of each rectangle.
        usable: the ranks that may store a shard.
        kernel: name of the compute kernel.
        distinct: no rank ever holds two of the rectangles.
        route: the output path.
        alone: ``[2, c]`` ACROSS of a rectangle alone on its node, and its rows.
        twins: the same with other routes.
        cache_params: of kernel "fused_uvm_caching".
    """

    proposal: Proposal
    kinds: Array
    counts: Array
    of: NDArray[np.intp]
    usable: frozenset[int]
    kernel: str
    distinct: bool
    route: str
    alone: Array
    twins: list["Option"] = field(default_factory=list, repr=False)
    cache_params: CacheParams | None = None

    @property
    def loads(self) -> Array:
        """``[K, n]`` of its rectangles, each alone on its node."""
        loads = self.kinds[:, self.of]
        loads[ACROSS_BOTH] = self.alone[:, self.of]
        return loads

    @cached_property
    def heavy_first(self) -> NDArray[np.intp]:
        """``[n]`` positions of the rectangles, most work first."""
        work = self.kinds[LOOKUP] + self.kinds[UPDATE]
        return np.argsort(-work[self.of], kind="stable")

    def placed_loads(self, ranks: Sequence[int], topology: Topology) -> Array:
        """``[K, n]`` with the rectangles on these ranks: what two hops send on depends on who shares a node."""
        loads = self.loads
        if self.route == "two_hop":
            loads[ACROSS_BOTH] *= _shares(self.proposal, ranks, topology)
        return loads


@dataclass(frozen=True, eq=False)
class Placement:
    """An option with its i-th rectangle on ``ranks[i]``."""

    option: Option
    ranks: tuple[int, ...]

    def loads(self, topology: Topology) -> Array:
        """``[K, W]`` what it adds to each rank."""
        rects = self.option.placed_loads(self.ranks, topology)
        return np.stack([np.bincount(self.ranks, weights=row, minlength=topology.world_size) for row in rects])

    def sharding(self) -> ParameterSharding:
        option = self.option
        return option.proposal.placed(self.ranks, option.kernel, option.route, option.cache_params)


_CACHING = str(EmbeddingComputeKernel.FUSED_UVM_CACHING)
_IN_HOST = (str(EmbeddingComputeKernel.FUSED_UVM), _CACHING)


def _cache(
    constraints: Mapping[str, ParameterConstraints], table: BaseEmbeddingConfig, kernel: str
) -> tuple[CacheParams | None, float]:
    """The cache of a table under a kernel, and the share of the rows in it: None and 0 for other kernels."""
    if kernel != _CACHING:
        return None, 0.0
    limits = constraints.get(table.name)
    params = (limits.cache_params if limits is not None else None) or CacheParams()
    return params, params.load_factor


class DoesNotFit(Exception):
    """No candidate of table number `table` fits beside what is placed.

    Attributes:
        host: the rank that has too little host memory, and the bytes that it would hold there; None if device memory
            is what is missing.
    """

    def __init__(self, table: int, host: tuple[int, float] | None = None) -> None:
        super().__init__(table, host)
        self.table, self.host = table, host


def options_of(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    route: str | None = None,
) -> list[list[Option]]:
    """Every proposal of every allowed scheme, under every route that may pay, per table.

    Args:
        route: the only output path, where it applies, of tables without a route constraint.

    Raises:
        PlanError: a table that no allowed scheme can cut under its constraints; an unknown scheme; a requested route
            that does not apply.
    """
    drafts: list[_Draft] = []
    rivals: list[tuple[int, int]] = []  # of replicated rows
    splits = tier_splits(model, tables, constraints)
    for index, table in enumerate(tables):
        limits = constraints.get(table.name)
        curve = model.row_shares[index]
        if curve is not None and (limits is None or limits.row_shares is None):
            limits = replace(limits or ParameterConstraints(), row_shares=curve)
        names = (
            allowed_schemes(table, limits) if model.proposers is None else [type(p).__name__ for p in model.proposers]
        )
        kernels = kernels_for(model, table, limits)
        usable = _as_set(_usable(table, model.topology, limits))
        dedup = _may_dedup(model, index, table, limits)
        before = len(drafts)
        asked = limits.route if limits and limits.route else (route if is_pooled(table) else "direct")
        check_route_applies(table, asked or "direct")
        if limits is not None and limits.shards is not None:
            pinned = _pinned(table, limits.shards, model.topology)
            outside = sorted({shard.rank for shard in limits.shards} - usable)
            if outside:
                raise PlanError(
                    f"table {table.name!r}: its shards are on ranks {outside}, outside device_group "
                    f"{limits.device_group!r} (ranks {sorted(usable)}). Fix: leave device_group out"
                )
            for name_of_route in _routes(model, table, pinned, asked, False, dedup):
                drafts.append((index, pinned, usable, kernels[0], False, name_of_route))
            continue
        earlier, hots = _Earlier(model), list[int]()
        one_node = model.topology.num_nodes == 1 and not model.prices_nodes
        for scheme in map(scheme_named, names) if model.proposers is None else model.proposers:
            if one_node and getattr(scheme, "on_one_node", None) in names:
                continue
            replicated = bool(getattr(scheme, "replicated", False))
            for proposal in filter(model.takes, scheme.propose(table, model.topology, limits)):
                if model.proposers is not None and not _allows(limits, proposal.scheme):
                    continue
                if table.dynamic and (replicated or not _has_whole_units(proposal, table)):
                    continue
                if proposal.assignments is not None and len(usable) < model.topology.world_size:
                    kept = tuple(ranks for ranks in proposal.assignments if usable.issuperset(ranks))
                    if not kept:
                        continue
                    proposal = (
                        proposal if len(kept) == len(proposal.assignments) else replace(proposal, assignments=kept)
                    )
                if not one_node and earlier.cover(proposal, replicated):
                    continue
                if kernels[0] == _CACHING and (replicated or any(replica_flags(tuple(proposal.rects)))):
                    continue
                ways = _routes(model, table, proposal, asked, replicated, dedup)
                own = kernels if proposal.tiers is None else [str(EmbeddingComputeKernel.FUSED)]
                made = [(index, proposal, usable, k, replicated, way) for k in own for way in ways]
                if isinstance(proposal.rects, EvenTiling) and proposal.rects.copies > 1:
                    hots += range(len(drafts), len(drafts) + len(made))
                drafts += made
        for split in splits:
            if index in split:
                proposal = split[index]
                for way in _routes(model, table, proposal, asked, False, dedup):
                    drafts.append((index, proposal, usable, str(EmbeddingComputeKernel.FUSED), False, way))
        rivals += [(hot, other) for hot in hots for other in range(before, len(drafts)) if _is_rival(*drafts[other])]
        if len(drafts) == before:
            raise PlanError(
                f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,}) cannot be split by "
                f"{', '.join(names)} on {_ranks_text(sorted(usable))}. Fix: "
                f"{_narrower(table, limits, len(usable))}allow table_wise"
            )
    cuts: dict[int, RectKinds] = {}  # twins share a proposal
    for index, proposal, _, _, replicated, _ in drafts:
        if id(proposal) not in cuts:
            by_place = model.row_shares[index] is not None
            cuts[id(proposal)] = rect_kinds(proposal.rects, replicated, by_place, proposal.tiers)
    sizes = [cuts[id(draft[1])] for draft in drafts]
    counts = [len(own.kinds) for own in sizes]
    first, rows, cols, copies, host = np.array([kind for own in sizes for kind in own.kinds], dtype=float).T.copy()
    rects = Rects(
        np.repeat([draft[0] for draft in drafts], counts),
        rows,
        cols,
        copies,
        np.repeat([float(draft[3] == EmbeddingComputeKernel.DENSE) for draft in drafts], counts),
        np.repeat([ROUTE_NUMBERS[draft[5]] for draft in drafts], counts),
        np.repeat([float(draft[1].scheme in BY_NODE) for draft in drafts], counts),
        first,
        np.maximum(host, np.repeat([float(draft[3] in _IN_HOST) for draft in drafts], counts)),
        np.repeat([_cache(constraints, tables[draft[0]], draft[3])[1] for draft in drafts], counts),
    )
    loads = model.rect_loads(rects)
    found: list[list[Option]] = [[] for _ in tables]
    known = _Known(model.topology)
    firsts = np.cumsum([0, *counts]).tolist()
    beaten = _beaten(model, drafts, sizes, firsts, loads, rivals)
    for number, (index, proposal, usable, kernel, _, taken) in enumerate(drafts):
        if number in beaten:
            continue
        of, count = sizes[number].of, counts[number]
        distinct = known.distinct(proposal.assignments, len(of), len(usable))
        kinds = loads[:, firsts[number] : firsts[number + 1]]
        if taken == "reduce_scatter" and not (isinstance(proposal.rects, EvenTiling) and not proposal.rects.copies):
            kinds = kinds.copy()
            kinds[SCATTER_BOTH] /= max(1e-9, summed_rows(proposal.rects, tables[index].num_embeddings))
        alone = kinds[ACROSS_BOTH]  # a copy
        if taken == "two_hop":
            kinds = kinds.copy()
            kinds[ACROSS_BOTH] *= known.least_shares(proposal, of, count, len(usable))
        cache_params, _ = _cache(constraints, tables[index], kernel)
        option = Option(
            proposal, kinds, sizes[number].counts, of, usable, kernel, distinct, taken, alone, cache_params=cache_params
        )
        before_it = found[index][-1] if found[index] else None
        if before_it is not None and before_it.proposal is proposal and before_it.kernel == kernel:
            for twin in (before_it, *before_it.twins):
                twin.twins.append(option)
                option.twins.append(twin)
        found[index].append(option)
    return found


def _is_rival(_: int, proposal: Proposal, usable: frozenset[int], kernel: str, replicated: bool, route: str) -> bool:
    """Whether a draft leaves at most one shard, a whole row shard or a replica, on each rank."""
    if proposal.assignments is None or proposal.tiers is not None:
        return False
    tiles = proposal.rects
    return replicated or (isinstance(tiles, EvenTiling) and not tiles.copies and len(tiles.widths) == 1)


def _beaten(
    model: CostModel,
    drafts: Sequence[_Draft],
    sizes: Sequence[RectKinds],
    firsts: Sequence[int],
    loads: Array,
    rivals: Sequence[tuple[int, int]],
) -> set[int]:
    """The drafts of replicated rows (`FlexShard`) that a rival beats in every plan.

    The rival turns on no further switch. What it takes on its slowest rank, in ms over all phases and in bytes of
    either memory, is no more than what the replicas with the smallest of their row shards take.

    Args:
        firsts: ``[O]`` position of each draft in `loads` ``[K, kinds]``.
        rivals: pairs of a draft of replicated rows, and one of the same table with `_is_rival`.
    """
    if not rivals:
        return set()
    terms, used = model.terms, sorted({number for pair in rivals for number in pair})
    mine = loads[:, [at for number in used for at in range(firsts[number], firsts[number + 1])]]
    starts = np.cumsum([0, *(firsts[number + 1] - firsts[number] for number in used[:-1])])
    own, hops = np.append(terms.own @ mine, mine[[HOST]], axis=0), [drafts[number][5] == "two_hop" for number in used]
    if any(hops):  # the row shards on a node are one message
        own[:-1] += (terms.node @ mine) * np.repeat(hops, np.diff(np.append(starts, mine.shape[1])))
    totals = np.add.reduceat(mine * np.concatenate([sizes[number].counts for number in used]), starts, axis=1)
    flags, shared = terms.flags(totals), terms.everyone @ totals
    for bit, switch in enumerate(terms.switches):
        if switch.everyone is not None:
            shared += (flags >> bit & 1) * (switch.everyone @ totals)
    most, least = np.maximum.reduceat(own, starts, axis=1), own[:, starts]
    most[:-1] += shared
    least[:-1] += shared
    everywhere = [len(sizes[number].of) == 2 * model.topology.world_size for number in used]
    own[:, starts] = np.inf
    least += np.where(everywhere, np.minimum.reduceat(own, starts, axis=1), 0.0)
    this, other = np.searchsorted(used, np.array(rivals).T)
    kernels = np.array([drafts[number][3] for number in used])
    found = (flags[other] & ~flags[this] == 0) & (kernels[other] == kernels[this])
    found &= (most[-2:, other] <= least[-2:, this]).all(axis=0)
    found &= most[:-2].sum(axis=0)[other] <= least[:-2].sum(axis=0)[this]
    return {used[number] for number in this[found].tolist()}


class _Earlier:
    """The proposals of one table so far."""

    def __init__(self, model: CostModel) -> None:
        self._by_node, self._local = model.prices_nodes, model.topology.local_world_size
        self._seen: dict[Any, list[tuple[tuple[int, ...], ...] | None]] = {}

    def cover(self, proposal: Proposal, replicated: bool) -> bool:
        """Whether an earlier proposal of equal loads has all placements and routes of this one."""
        rects, listed = proposal.rects, proposal.assignments
        even = rects if isinstance(rects, EvenTiling) else None
        key = (even.key if even else tuple(rects)), proposal.tiers, replicated
        seen = self._seen.setdefault((*key, self._by_node and proposal.scheme in BY_NODE), [])
        # listed row shards may have a route that others have not; the search fills nodes only with listed shards
        anywhere = even and even.num_row_slices == 1 and len(even) < max(2, self._local)
        for other in seen:
            if other is listed or (listed is not None and (anywhere if other is None else set(listed) <= set(other))):
                return True
        seen.append(listed)
        return False


def _usable(table: BaseEmbeddingConfig, topology: Topology, limits: ParameterConstraints | None) -> tuple[int, ...]:
    try:
        return usable_ranks(topology, limits)
    except PlanError as error:
        raise PlanError(f"table {table.name!r}: {error}") from None


def kernels_for(model: CostModel, table: BaseEmbeddingConfig, limits: ParameterConstraints | None) -> list[str]:
    """The kernels to choose among: the best of those allowed, and both memories of a rank where both are allowed.

    A cache ("fused_uvm_caching") is never compared with other kernels: it must be the first one allowed.

    Raises:
        PlanError: only the host's memory is allowed, and the cost model knows none; a dynamic table on kernel "dense".
    """
    named = [
        str(getattr(kernel, "value", kernel)) for kernel in (limits.compute_kernels if limits else None) or ["fused"]
    ]
    tiers = [str(EmbeddingComputeKernel.FUSED), str(EmbeddingComputeKernel.FUSED_UVM)]
    if table.dynamic:
        named = [kernel for kernel in named if kernel in tiers]
        if not named:
            raise PlanError(
                f"table {table.name!r} is dynamic, and its optimizer runs in backward. Fix: allow kernel 'fused'"
            )
    if not model.has_tiers and named[0] in _IN_HOST:
        first, *named = named
        if not named:
            raise PlanError(
                f"table {table.name!r} may only be on kernel {first!r}, for which cost_model={model.name!r} has no "
                f"formulas here. Fix: allow 'fused' too"
            )
    if named[0] not in tiers or not model.has_tiers or not model.topology.has_tiers:
        return named[:1]
    return [kernel for kernel in named if kernel in tiers]


@lru_cache(maxsize=64)
def _as_set(ranks: tuple[int, ...]) -> frozenset[int]:
    return frozenset(ranks)


@lru_cache(maxsize=512)
def _nodes(ranks: tuple[int, ...], local: int) -> int:
    """On how many nodes these ranks are."""
    return len({rank // local for rank in ranks})


def _shares(proposal: Proposal, ranks: Sequence[int], topology: Topology) -> Array:
    """``[n]`` the share of its columns that the node of each rectangle sends on for it."""
    nodes = np.asarray(ranks, dtype=np.intp) // topology.local_world_size
    if isinstance(proposal.rects, EvenTiling):  # row shards of one column shard that share a node become one message
        copies = proposal.rects.copies
        cell = proposal.rects.column_slices() * topology.num_nodes + nodes[copies:]
        return np.append(np.ones(copies), 1.0 / np.bincount(cell)[cell])
    flags = np.array(replica_flags(proposal.rects))
    found = np.ones(len(flags))
    cold = [cols for (_, cols), copy in zip(proposal.rects, flags, strict=True) if not copy]
    found[~flags] = across_shares(cold, nodes[~flags].tolist())
    return found


class _Known:
    """What listed assignments, which schemes share among tables, have been computed to be."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._distinct: dict[tuple[int, int], bool] = {}
        self._shares: dict[tuple[int, int, int], Array] = {}

    def distinct(self, listed: tuple[tuple[int, ...], ...] | None, count: int, usable: int) -> bool:
        """Whether no assignment of `count` shards names a rank twice; None: there are enough usable ranks."""
        if listed is None:
            return count <= usable
        key = id(listed), count
        if key not in self._distinct:
            self._distinct[key] = all(len(set(ranks)) == count for ranks in listed)
        return self._distinct[key]

    def least_shares(self, proposal: Proposal, of: NDArray[np.intp], count: int, usable: int) -> Array:
        """``[count]`` the least `_shares` of a shard of each size, wherever the proposal may be placed."""
        listed, rects, local = proposal.assignments, proposal.rects, self.topology.local_world_size
        even = isinstance(rects, EvenTiling)
        if listed is None or len(of) * len(listed) > MOST_SPELLED:
            most = local if self.distinct(listed, len(of), usable) else len(of)
            rows = rects.num_row_slices if isinstance(rects, EvenTiling) else len(of)
            return np.full(count, 1.0 / min(rows, most))
        key = id(listed), len(rects.widths) if isinstance(rects, EvenTiling) else 0, len(of)
        shares = self._shares.get(key) if even else None
        if shares is None:
            shares = np.min([_shares(proposal, ranks, self.topology) for ranks in listed], axis=0)
            self._shares[key] = shares
        least = np.ones(count)
        np.minimum.at(least, of, shares)
        return least


def _cuts_rows(proposal: Proposal, table: BaseEmbeddingConfig) -> bool:
    if isinstance(proposal.rects, EvenTiling):
        return proposal.rects.num_row_slices > 1 or proposal.rects.copies > 0
    return any(rows != (0, table.num_embeddings) for rows, _ in proposal.rects)


def _has_whole_units(proposal: Proposal, table: BaseEmbeddingConfig) -> bool:
    """Whether all row shards have whole units of the table (`row_unit`, `least_equal_rows`), and none is a replica."""
    if any(replica_flags(list(proposal.rects))):
        return False
    if table.least_equal_rows:
        sizes = {end - first for (first, end), _ in proposal.rects}
        return len(sizes) == 1 and min(sizes) >= table.least_equal_rows
    return not any(edge % table.row_unit for rows, _ in proposal.rects for edge in rows)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"ranks {list(ranks)}" if len(ranks) <= LISTED else f"{len(ranks):,} ranks"


def _narrower(table: BaseEmbeddingConfig, limits: ParameterConstraints | None, ranks: int) -> str:
    """The widest `min_partition` with which the columns are split in two, where a wider one is what prevents it."""
    widest = table.embedding_dim // 2 // unit_of(table.embedding_dim) * unit_of(table.embedding_dim)
    if limits is None or limits.min_partition is None or limits.min_partition <= widest or not widest or ranks < 2:
        return ""
    return f"min_partition={widest}, or "


def _allows(limits: ParameterConstraints | None, scheme: str) -> bool:
    """Whether constraints allow a custom proposer's scheme, which need not be registered."""
    if limits is None:
        return True
    allowed, forbidden = limits.sharding_types or (scheme,), limits.forbidden_sharding_types or ()
    return scheme in map(str, allowed) and scheme not in map(str, forbidden)


def allowed_schemes(table: BaseEmbeddingConfig, limits: ParameterConstraints | None) -> list[str]:
    """Names of the schemes that a table may use.

    Raises:
        PlanError: all are forbidden.
    """
    named = [str(getattr(n, "value", n)) for n in (limits.sharding_types if limits else None) or scheme_names()]
    forbidden = [str(getattr(n, "value", n)) for n in (limits.forbidden_sharding_types if limits else None) or ()]
    for name in forbidden:
        scheme_named(name)
    allowed = [name for name in named if name not in forbidden]
    if not allowed:
        raise PlanError(
            f"table {table.name!r}: every scheme that is allowed ({', '.join(named)}) is forbidden. Fix: "
            f"leave {named[0]} out of forbidden_sharding_types"
        )
    return allowed


def _pinned(table: BaseEmbeddingConfig, shards: Sequence[Shard], topology: Topology) -> Proposal:
    """The one proposal of a table whose shards are given."""
    check_shards(table, shards, False, topology.world_size)
    tiers = tuple(shard.tier for shard in shards)
    rects, ranks = tuple(shard.rect for shard in shards), tuple(shard.rank for shard in shards)
    return Proposal("custom", rects, (ranks,), tiers if DDR in tiers else None)


def _may_dedup(model: CostModel, index: int, table: BaseEmbeddingConfig, limits: ParameterConstraints | None) -> bool:
    """Whether to try route "distinct_rows": it carries no per-sample weights, variable batches or dynamic tables' ids.

    Its cost is known only if the workload states how often ids repeat, and the topology what finding and adding them up
    costs.
    """
    top = model.topology
    varies = limits is not None and (limits.num_poolings is not None or limits.batch_sizes is not None)
    return (
        min(top.sort_ns_per_id, top.sum_ns_per_number, top.world_size - 1) > 0
        and is_pooled(table)
        and model.workload.knows_repeats(table.name)
        and not model.tables.weighted[index]
        and not varies
        and not table.dynamic
    )


def _routes(
    model: CostModel, table: BaseEmbeddingConfig, proposal: Proposal, asked: str | None, replicated: bool, dedup: bool
) -> list[str]:
    """The routes to try: the one asked for where it applies; else those that may pay.

    A reduce-scatter only pays if every rank has a row shard. Two hops only pay if row shards share a node, which adds
    them up before they cross the network. Rows in a format that cannot be added are not summed on the way.
    """
    top, cut = model.topology, _cuts_rows(proposal, table)
    if replicated or (asked == "reduce_scatter" and not cut):
        return ["direct"]
    if asked is not None:
        return [asked]
    found = ["direct"]
    if not model.has_routes:
        return found
    if dedup:
        found.append(DISTINCT_ROWS)
    if cut and is_pooled(table) and proposal.assignments is None and top.num_nodes > 1:
        found.append("two_hop")
    if cut and is_pooled(table) and proposal.assignments is not None:
        everywhere = len(proposal.rects) >= top.world_size and len(set(proposal.assignments[0])) == top.world_size
        if everywhere and model.routes.forward.adds:
            found.append("reduce_scatter")
        if top.num_nodes > 1 and _nodes(proposal.assignments[0], top.local_world_size) < len(proposal.rects):
            found.append("two_hop")
    return found
