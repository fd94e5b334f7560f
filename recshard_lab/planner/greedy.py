"""Greedy planning: choose scheme and ranks of every table together, then improve one and two tables at a time.

1. Every registered scheme that the constraints allow proposes rectangles; each rectangle's loads are computed once,
   for all tables in one go.
2. Tables are placed from the largest down. All ways to place one table are scored in one array operation against
   what is already placed. While a phase is below its fair share nothing is gained by balancing it, so the score
   charges only what passes that share, plus a little for the total: early tables are not cut without need.
3. Local search on the true step time: take a table out, put it back in the best way; then exchange two tables.

A table that fits nowhere sends the planner back to the start with memory first: largest bytes first, on the emptiest
ranks. The result depends on the input alone (no clock, no dice).

Shape letters: K loads, W ranks, P phases, C candidates, n rectangles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.cost import BACK, IN, LOOKUP, MEMORY, OUT, UPDATE, CostModel, K
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

MOST_SINGLE = 24  # of a piece that may go anywhere, only this many least loaded ranks are tried
_TIE = 0.02  # weight of the balance term that tells plans of equal step time apart


@dataclass(frozen=True, eq=False)
class Option:
    """One proposal for one table: `loads` ``[K, n]`` of its rectangles, the ranks they may use, the kernel."""

    proposal: Proposal
    loads: Array
    usable: Array
    kernel: str
    replicated: bool

    @property
    def num_rects(self) -> int:
        return int(self.loads.shape[1])


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
    drafts: list[tuple[int, Proposal, Array, str, bool]] = []
    for index, table in enumerate(tables):
        wish = constraints.get(table.name)
        names = [str(getattr(n, "value", n)) for n in (wish.sharding_types if wish else None) or scheme_names()]
        kernel = str((wish.compute_kernels or ["fused"])[0]) if wish else "fused"
        usable = np.array(usable_ranks(model.topology, wish))
        before = len(drafts)
        for name in names:
            scheme = scheme_named(name)
            for proposal in scheme.propose(table, model.topology, wish):
                drafts.append((index, proposal, usable, kernel, scheme.replicated))
        if len(drafts) == before:
            raise PlanError(
                f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,}) cannot be cut by "
                f"{', '.join(names)} on ranks {usable.tolist()}. Smallest fix: allow table_wise"
            )
    rects = np.array([rect for draft in drafts for rect in draft[1].rects], dtype=float)  # [n, 2, 2]
    counts = [len(draft[1].rects) for draft in drafts]
    sizes = rects[:, :, 1] - rects[:, :, 0]
    loads = model.rect_loads(
        np.repeat([draft[0] for draft in drafts], counts),
        sizes[:, 0],
        sizes[:, 1],
        np.repeat([float(draft[4]) for draft in drafts], counts),
        np.repeat([float(draft[3] == EmbeddingComputeKernel.DENSE) for draft in drafts], counts),
    )
    found: list[list[Option]] = [[] for _ in tables]
    at = 0
    for (index, proposal, usable, kernel, replicated), count in zip(drafts, counts, strict=True):
        found[index].append(Option(proposal, loads[:, at : at + count], usable, kernel, replicated))
        at += count
    return found


class Greedy:
    """One planning problem. `solve` gives one placement per table.

    Args:
        passes: rounds of local search.
    """

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]], passes: int = 4) -> None:
        self.model, self.options, self.passes = model, options, passes
        self.num_ranks = model.topology.world_size
        top = model.topology
        link = top.intra_host_bw if top.num_nodes == 1 else top.inter_host_bw
        self.byte_ms = self.num_ranks / link
        self.base = np.zeros((K, self.num_ranks))
        self.placed: list[Placement | None] = [None] * len(options)
        cheapest = [min(table, key=self._work_of) for table in options]
        self.work = np.array([self._work_of(option) for option in cheapest])
        self.bytes = np.array([option.loads[MEMORY:].sum() for option in cheapest])
        spread = sum((o.loads.sum(axis=1) for o in cheapest), np.zeros(K)) / self.num_ranks
        fair = model.phases(np.repeat(spread[:, None], self.num_ranks, axis=1)).max(axis=-1)
        self.fair = fair if self.num_ranks > 1 else fair * 0.0

    def solve(self) -> list[Placement]:
        """Places every table.

        Raises:
            DoesNotFit: no order tried has room for every table.
        """
        best: list[Placement] | None = None
        stuck: DoesNotFit | None = None
        for order, memory_first in ((np.argsort(-self.work, kind="stable"), False), (np.argsort(-self.bytes), True)):
            if memory_first and best is not None:
                break
            self.base = np.zeros((K, self.num_ranks))
            try:
                for table in order:
                    self._put(int(table), self._best(int(table), self.fair, memory_first))
            except DoesNotFit as error:
                stuck = error
                continue
            self._search()
            best = [placement for placement in self.placed if placement is not None]
        if best is None:
            assert stuck is not None
            raise stuck
        return best

    def score(self, loads: Array, fair: Array | None = None) -> Array:
        """Milliseconds ``[...]`` of loads ``[K, ..., W]``, plus a little for imbalance and total work."""
        ms = self.model.phases(loads)
        slowest = ms.max(axis=-1)
        if fair is not None:
            slowest = np.maximum(slowest, fair.reshape(-1, *[1] * (slowest.ndim - 1)))
        spread = np.sqrt(np.einsum("p...w,p...w->p...", ms, ms) / self.num_ranks)
        return np.asarray((slowest + (_TIE if fair is None else 0.3) * spread).sum(axis=0))

    # -- candidates ---------------------------------------------------------------------------------------------

    def candidates(self, table: int) -> tuple[list[tuple[Option, tuple[int, ...]]], Array]:
        """Ways to place `table` beside `base`: (option, ranks) pairs, and what each adds ``[K, C, W]``."""
        room = self.model.capacity - self.model.memory_total(self.base)
        busy = self.base[LOOKUP] + self.base[UPDATE] + self.base[[IN, OUT, BACK]].sum(axis=0) * self.byte_ms
        found: list[tuple[Option, tuple[int, ...]]] = []
        for option in self.options[table]:
            for ranks in self._assignments(option, busy, room):
                found.append((option, ranks))
        delta = np.zeros((K, len(found), self.num_ranks))
        for c, (option, ranks) in enumerate(found):
            if len(ranks) == 1:
                delta[:, c, ranks[0]] = option.loads[:, 0]
            elif len(set(ranks)) == len(ranks):
                delta[:, c, ranks] = option.loads
            else:
                np.add.at(delta[:, c], (slice(None), list(ranks)), option.loads)
        return found, delta

    def _assignments(self, option: Option, busy: Array, room: Array) -> list[tuple[int, ...]]:
        if option.proposal.assignments is not None:
            return list(option.proposal.assignments)
        usable, count = option.usable, option.num_rects
        need = option.loads[MEMORY:].sum(axis=0)
        if count == 1:
            open_to = usable[room[usable] >= need[0]]
            if len(open_to) > MOST_SINGLE:
                open_to = open_to[np.argsort(busy[open_to], kind="stable")[:MOST_SINGLE]]
            return [(int(rank),) for rank in open_to]
        heavy_first = np.argsort(-(option.loads[LOOKUP] + option.loads[UPDATE]), kind="stable")
        found = []
        groups = [usable]
        top = self.model.topology
        if top.num_nodes > 1:
            groups += self._quiet_nodes(usable, busy, count)
        for group in groups:
            for key in (busy, -room):
                order = group[np.argsort(key[group], kind="stable")]
                fits = order[room[order] >= need.max()]
                order = fits if len(fits) >= min(count, len(order)) else order
                ranks = np.empty(count, dtype=int)
                ranks[heavy_first] = np.resize(order, count)
                found.append(tuple(ranks.tolist()))
        return list(dict.fromkeys(found))

    def _quiet_nodes(self, usable: Array, busy: Array, count: int) -> list[Array]:
        nodes = usable // self.model.topology.local_world_size
        groups = [usable[nodes == node] for node in np.unique(nodes)]
        groups = [group for group in groups if len(group) >= count]
        return sorted(groups, key=lambda group: float(busy[group].mean()))[:2]

    def _best(self, table: int, fair: Array | None, memory_first: bool = False) -> Placement:
        found, delta = self.candidates(table)
        if not found:
            raise DoesNotFit(table)
        loads = self.base[:, None, :] + delta
        needed = self.model.memory_total(loads).max(axis=-1)
        score = self.score(loads, fair)
        if memory_first:
            score = score + 1e6 * needed / max(1.0, self.model.capacity)
        score = np.where(needed <= self.model.capacity, score, np.inf)
        c = int(score.argmin())
        if not np.isfinite(score[c]):
            raise DoesNotFit(table)
        return Placement(*found[c], delta[:, c])

    def _put(self, table: int, placement: Placement) -> None:
        self.placed[table] = placement
        self.base = self.base + placement.delta

    def _take(self, table: int) -> Placement:
        placement = self.placed[table]
        assert placement is not None
        self.placed[table] = None
        self.base = self.base - placement.delta
        return placement

    # -- local search -------------------------------------------------------------------------------------------

    def _search(self) -> None:
        order = np.argsort(-self.work, kind="stable").tolist()
        now = float(self.score(self.base))
        for _ in range(self.passes):
            before = now
            for table in order:
                was = self._take(table)
                try:
                    new = self._best(table, None)
                except DoesNotFit:  # rounding at the last byte of a full rank
                    new = was
                after = float(self.score(self.base + new.delta))
                self._put(table, new if after < now * (1 - 1e-9) else was)
                now = min(now, after)
            now = self._exchange(now)
            if now > before * (1 - 1e-4):
                break
        # sums of differences drift by rounding; start the next problem from the placements themselves
        self.base = sum((p.delta for p in self.placed if p is not None), np.zeros((K, self.num_ranks)))

    def _exchange(self, now: float) -> float:
        """Exchanges the ranks of two one-piece tables while that helps."""
        for _ in range(len(self.placed)):
            single = [
                t for t, p in enumerate(self.placed) if p is not None and len(p.ranks) == 1 and len(p.option.usable) > 1
            ]
            if len(single) < 2:
                return now
            rank_of = np.array([self.placed[t].ranks[0] for t in single])  # type: ignore[union-attr]
            worst = int(self.model.phases(self.base).sum(axis=0).argmax())
            mine, others = np.flatnonzero(rank_of == worst), np.flatnonzero(rank_of != worst)
            if not len(mine) or not len(others):
                return now
            i, j = (pairs.ravel()[:256] for pairs in np.meshgrid(mine, others, indexing="ij"))
            own = np.stack([self.placed[t].option.loads[:, 0] for t in single], axis=1)  # type: ignore[union-attr]
            gain, at = own[:, j] - own[:, i], np.arange(len(i))
            loads = np.repeat(self.base[:, None, :], len(i), axis=1)
            loads[:, at, worst] += gain
            loads[:, at, rank_of[j]] -= gain
            fits = self.model.memory_total(loads).max(axis=-1) <= self.model.capacity
            score = np.where(fits & self._may_swap(single, i, j, rank_of), self.score(loads), np.inf)
            c = int(score.argmin())
            if not score[c] < now * (1 - 1e-9):
                return now
            a, b = single[int(i[c])], single[int(j[c])]
            first, second = self._take(a), self._take(b)
            self._put(a, self._moved(first, second.ranks[0]))
            self._put(b, self._moved(second, first.ranks[0]))
            now = float(score[c])
        return now

    def _may_swap(self, single: list[int], i: Array, j: Array, rank_of: Array) -> Array:
        allowed = np.zeros((len(single), self.num_ranks), dtype=bool)
        for row, table in enumerate(single):
            placement = self.placed[table]
            assert placement is not None
            listed = placement.option.proposal.assignments
            allowed[row, placement.option.usable if listed is None else [ranks[0] for ranks in listed]] = True
        return np.asarray(allowed[i, rank_of[j]] & allowed[j, rank_of[i]])

    def _moved(self, placement: Placement, rank: int) -> Placement:
        delta = np.zeros((K, self.num_ranks))
        delta[:, rank] = placement.option.loads[:, 0]
        return Placement(placement.option, (rank,), delta)

    def _work_of(self, option: Option) -> float:
        loads = option.loads
        return float((loads[LOOKUP] + loads[UPDATE] + loads[[IN, OUT, BACK]].sum(axis=0) * self.byte_ms).sum())
