"""What the planner chooses from: every proposal of every allowed scheme, with the loads of its rectangles.

Shape letters: K loads, W ranks, n rectangles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.cost import LOOKUP, MEMORY, UPDATE, CostModel
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Proposal,
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
    """

    proposal: Proposal
    loads: Array
    usable: frozenset[int]
    kernel: str
    heavy_first: tuple[int, ...]
    largest_bytes: float
    distinct: bool


@dataclass(frozen=True, eq=False)
class Placement:
    """An option with its rectangles on ranks: `delta` ``[K, W]`` is what it adds."""

    option: Option
    ranks: tuple[int, ...]
    delta: Array

    def sharding(self) -> ParameterSharding:
        return self.option.proposal.placed(self.ranks, self.option.kernel)


class DoesNotFit(Exception):
    """No candidate of table number `table` fits beside what is placed."""

    def __init__(self, table: int) -> None:
        super().__init__(table)
        self.table = table


def options_of(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
) -> list[list[Option]]:
    """Every proposal of every allowed scheme, per table.

    Raises:
        PlanError: a table that no allowed scheme can cut under its constraints; an unknown scheme.
    """
    drafts: list[tuple[int, Proposal, frozenset[int], str, bool]] = []
    for index, table in enumerate(tables):
        wish = constraints.get(table.name)
        names = [str(getattr(n, "value", n)) for n in (wish.sharding_types if wish else None) or scheme_names()]
        kernel = str((wish.compute_kernels or ["fused"])[0]) if wish else "fused"
        usable = frozenset(usable_ranks(model.topology, wish))
        before = len(drafts)
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
                drafts.append((index, proposal, usable, kernel, scheme.replicated))
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
    )
    work, needed = (loads[LOOKUP] + loads[UPDATE]).tolist(), loads[MEMORY:].sum(axis=0).tolist()
    found: list[list[Option]] = [[] for _ in tables]
    at = 0
    for (index, proposal, usable, kernel, _), count in zip(drafts, counts, strict=True):
        heavy_first = tuple(sorted(range(count), key=lambda i, at=at: -work[at + i]))  # type: ignore[misc]
        most = max(needed[at : at + count])
        listed = proposal.assignments
        distinct = count <= len(usable) if listed is None else all(len(set(ranks)) == count for ranks in listed)
        found[index].append(Option(proposal, loads[:, at : at + count], usable, kernel, heavy_first, most, distinct))
        at += count
    return found
