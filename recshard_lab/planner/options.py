"""What the planner chooses from: every proposal of every allowed scheme, with the loads of its rectangles.

Shape letters: K loads, W ranks, n rectangles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.cost import CostModel
from recshard_lab.planner.loads import ACROSS, LOOKUP, MEMORY, ROUTE_NUMBERS, UPDATE, across_shares
from recshard_lab.planner.workload import Array, check_route_applies, is_pooled
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Proposal,
    Topology,
    scheme_named,
    scheme_names,
    usable_ranks,
)


@dataclass(frozen=True, eq=False)
class Option:
    """One proposal for one table.

    Attributes:
        loads: ``[K, n]`` of its rectangles.
        usable: the ranks that a rectangle may lie on.
        kernel: name of the compute kernel.
        heavy_first: positions of the rectangles, most work first.
        largest_bytes: memory of the largest rectangle.
        distinct: no rank ever holds two of the rectangles.
        route: how its rows come home.
        twins: the same with other routes.
    """

    proposal: Proposal
    loads: Array
    usable: frozenset[int]
    kernel: str
    heavy_first: tuple[int, ...]
    largest_bytes: float
    distinct: bool
    route: str = "direct"
    twins: list["Option"] = field(default_factory=list, repr=False)
    _placed: dict[tuple[int, ...], Array] = field(default_factory=dict, repr=False)

    def placed_loads(self, ranks: tuple[int, ...], topology: Topology) -> Array:
        """``[K, n]`` with the rectangles on these ranks: what two hops send on depends on who shares a node."""
        if self.route != "two_hop":
            return self.loads
        if ranks not in self._placed:
            loads = self.loads.copy()
            cols = [cols for _, cols in self.proposal.rects]
            loads[ACROSS] *= across_shares(cols, [topology.node_of(rank) for rank in ranks])
            self._placed[ranks] = loads
        return self._placed[ranks]


@dataclass(frozen=True, eq=False)
class Placement:
    """An option with its rectangles on ranks: `delta` ``[K, W]`` is what it adds."""

    option: Option
    ranks: tuple[int, ...]
    delta: Array

    def sharding(self) -> ParameterSharding:
        return self.option.proposal.placed(self.ranks, self.option.kernel, self.option.route)


class DoesNotFit(Exception):
    """No candidate of table number `table` fits beside what is placed."""

    def __init__(self, table: int) -> None:
        super().__init__(table)
        self.table = table


def options_of(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    route: str | None = None,
) -> list[list[Option]]:
    """Every proposal of every allowed scheme, under every route that may pay, per table.

    Args:
        route: the only one, for every table to which it applies and that has no wish of its own.

    Raises:
        PlanError: a table that no allowed scheme can cut under its constraints; an unknown scheme; a wish for a route
            that does not apply.
    """
    drafts: list[tuple[int, Proposal, frozenset[int], str, bool, str]] = []
    for index, table in enumerate(tables):
        wish = constraints.get(table.name)
        names = [str(getattr(n, "value", n)) for n in (wish.sharding_types if wish else None) or scheme_names()]
        kernel = str((wish.compute_kernels or ["fused"])[0]) if wish else "fused"
        usable = frozenset(usable_ranks(model.topology, wish))
        before = len(drafts)
        asked = wish.route if wish and wish.route else (route if is_pooled(table) else "direct")
        check_route_applies(table, asked or "direct")
        for name in names:
            scheme = scheme_named(name)
            for proposal in scheme.propose(table, model.topology, wish):
                if proposal.assignments is not None:
                    kept = tuple(ranks for ranks in proposal.assignments if usable.issuperset(ranks))
                    if not kept:
                        continue
                    proposal = (
                        proposal if len(kept) == len(proposal.assignments) else replace(proposal, assignments=kept)
                    )
                for name_of_route in _routes(model, table, proposal, asked, scheme.replicated):
                    drafts.append((index, proposal, usable, kernel, scheme.replicated, name_of_route))
        if len(drafts) == before:
            raise PlanError(
                f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,}) cannot be cut by "
                f"{', '.join(names)} on ranks {sorted(usable)}. Smallest fix: allow table_wise"
            )
    counts = [len(draft[1].rects) for draft in drafts]
    sizes = np.array([(r[1] - r[0], c[1] - c[0]) for draft in drafts for r, c in draft[1].rects], dtype=float)
    loads = model.rect_loads(
        np.repeat([draft[0] for draft in drafts], counts),
        sizes[:, 0],
        sizes[:, 1],
        np.repeat([float(draft[4]) for draft in drafts], counts),
        np.repeat([float(draft[3] == EmbeddingComputeKernel.DENSE) for draft in drafts], counts),
        np.repeat([ROUTE_NUMBERS[draft[5]] for draft in drafts], counts),
    )
    work, needed = (loads[LOOKUP] + loads[UPDATE]).tolist(), loads[MEMORY:].sum(axis=0).tolist()
    found: list[list[Option]] = [[] for _ in tables]
    at = 0
    for (index, proposal, usable, kernel, _, taken), count in zip(drafts, counts, strict=True):
        heavy_first = tuple(sorted(range(count), key=lambda i, at=at: -work[at + i]))  # type: ignore[misc]
        most = max(needed[at : at + count])
        listed = proposal.assignments
        distinct = count <= len(usable) if listed is None else all(len(set(ranks)) == count for ranks in listed)
        option = Option(proposal, loads[:, at : at + count], usable, kernel, heavy_first, most, distinct, taken)
        before_it = found[index][-1] if found[index] else None
        if before_it is not None and before_it.proposal is proposal:
            for twin in (before_it, *before_it.twins):
                twin.twins.append(option)
                option.twins.append(twin)
        found[index].append(option)
        at += count
    return found


def _routes(
    model: CostModel, table: BaseEmbeddingConfig, proposal: Proposal, asked: str | None, replicated: bool
) -> list[str]:
    """The routes to try: the one asked for where it applies; else those that may pay.

    Only where row stripes lie on every rank does a reduce-scatter move no more than it must, and only where they share
    a node do two hops add up anything before it crosses the network.
    """
    top, cut = model.topology, any(rows != (0, table.num_embeddings) for rows, _ in proposal.rects)
    if replicated or (asked == "reduce_scatter" and not cut):
        return ["direct"]
    if asked is not None:
        return [asked]
    found = ["direct"]
    if cut and is_pooled(table) and proposal.assignments is not None:
        if len(set(proposal.assignments[0])) == top.world_size:
            found.append("reduce_scatter")
        if top.num_nodes > 1 and len({top.node_of(r) for r in proposal.assignments[0]}) < len(proposal.rects):
            found.append("two_hop")
    return found
