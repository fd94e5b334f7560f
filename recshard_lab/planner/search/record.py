"""Keeps what a search looks at while it runs, in bounded space. A search that is not recorded knows nothing of it.

Shape letters: K loads, W ranks, C candidates, B plans.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import HOST, K
from recshard_lab.planner.search.colocated import unbundled
from recshard_lab.planner.search.moves import improve
from recshard_lab.planner.search.options import Placement
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import TIE, Put, State
from recshard_lab.planner.search.trace import Candidate, SearchTrace, frontier_of
from recshard_lab.planner.workload import Array

MOST, MOST_PLACEMENTS = 2_000, 400_000  # plans kept, and placements of all of them, before they are thinned
IMPROVED = 4_000  # tables x ranks up to which plans of a single scheme are improved
AT_ONCE = 1 << 22  # loads of candidates that are estimated at once


@dataclass(frozen=True, eq=False)
class _Seen:
    number: int
    stage: str
    ms: float
    nbytes: float
    fits: bool
    placements: tuple[Placement, ...]


class Recorder:
    """Plans as a search finds them.

    Attributes:
        seen: how many there were; every: one in so many is kept.
    """

    def __init__(self) -> None:
        self.seen, self.every = 0, 1
        self.best_ms = np.inf
        self._kept: list[_Seen] = []
        self._groups: list[list[int]] = []
        self._whole: Problem | None = None
        self._known: dict[tuple[int, tuple[int, ...]], Placement] = {}

    @property
    def begun(self) -> bool:
        """Whether a search has begun: there are tables, and ways to cut them."""
        return self._whole is not None

    def begin(self, problem: Problem, groups: list[list[int]]) -> None:
        """A search of `problem` begins; an earlier one's plans are kept."""
        self._groups = groups
        self._whole = copy(problem)

    def watch(self, problem: Problem, stage: str) -> Callable[[State], None]:
        """A callback for local search that records each plan."""

        def looked_at(state: State) -> None:
            self.offer(stage, problem.step_ms(state), problem.held(state), state.placed)

        return looked_at

    def offer(self, stage: str, ms: float, held: Array, placed: Sequence[Put | None]) -> None:
        """A plan, and what the search thinks that it takes and the fullest rank holds in each memory."""
        assert self._whole is not None
        number, self.seen = self.seen, self.seen + 1
        nbytes, fits = float(held[0]), bool((held <= self._whole.capacity).all())
        first = fits and ms < self.best_ms
        if number % self.every and not first and not self._new(ms, nbytes, fits):
            return
        if first:
            self.best_ms = ms
        self._kept.append(_Seen(number, stage, ms, nbytes, fits, tuple(put.placement for put in placed if put)))
        if len(self._kept) > MOST or len(self._kept) * max(1, len(self._groups)) > MOST_PLACEMENTS:
            self._thin()

    def trace(
        self,
        model: CostModel,
        owners: Sequence[tuple[str, str]],
        chosen: Sequence[Placement] | None = None,
        bound_ms: float | None = None,
    ) -> SearchTrace:
        """What was kept, estimated by the cost model itself.

        Args:
            model: of all tables.
            owners: module path and name of each.
            chosen: their placements in the chosen plan; None if no plan fits.
            bound_ms: what the search proved in the end.
        """
        kept = self._kept
        last = tuple(chosen) if chosen is not None else None
        plans = [self._flat(one.placements) for one in kept]
        at = None if last is None else next((n for n, one in enumerate(plans) if _same(one, last)), None)
        if last is not None and at is None:
            kept = [*kept, _Seen(self.seen, "chosen", 0.0, 0.0, True, ())]
            plans, at = [*plans, last], len(plans)
            self.seen += 1
        numbers = self._estimated(model, plans)
        found = tuple(
            Candidate(one.number, one.stage, *each, placements)
            for one, each, placements in zip(kept, numbers, plans, strict=True)
        )
        return SearchTrace(
            found,
            None if at is None else found[at],
            self._single_schemes(model),
            bound_ms if at is not None else None,
            model.usable_bytes,
            self.seen,
            self.every,
            tuple(owners),
        )

    def _new(self, ms: float, nbytes: float, fits: bool) -> bool:
        """Whether no plan kept is as good in both."""
        return fits and not any(one.ms <= ms and one.nbytes <= nbytes for one in self._kept)

    def _thin(self) -> None:
        """Keeps every second plan, those that were the best so far, and the frontier."""
        assert self._whole is not None
        self.every *= 2
        values = np.array([(one.ms, one.nbytes) if one.fits else (np.inf, np.inf) for one in self._kept])
        keep, best = set(frontier_of(values)), np.inf
        for at, one in enumerate(self._kept):
            if values[at, 0] < best:
                best = one.ms
                keep.add(at)
        self._kept = [one for at, one in enumerate(self._kept) if one.number % self.every == 0 or at in keep]

    def _flat(self, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Of every table, one object for what is placed alike in many plans."""
        found = unbundled(list(placements), self._groups)
        return tuple(self._known.setdefault((id(one.option), one.ranks), one) for one in found)

    def _estimated(self, model: CostModel, plans: Sequence[tuple[Placement, ...]]) -> list[tuple[float, float, bool]]:
        """Step, bytes of the fullest rank, and whether it fits, of each plan."""
        top = model.topology
        each: dict[Placement, Array] = {}
        found: list[tuple[float, float, bool]] = []
        size = max(1, AT_ONCE // (K * top.world_size))
        total: Array = np.zeros((K, top.world_size))
        before: tuple[Placement, ...] = ()
        for start in range(0, len(plans), size):
            batch = []
            for plan in plans[start : start + size]:
                changed = [at for at, one in enumerate(plan) if not before or one is not before[at]]
                for placement in (plan[at] for at in changed):
                    if placement not in each:
                        each[placement] = placement.loads(top)
                if len(changed) * 2 >= len(plan):
                    total = np.sum([each[one] for one in plan], axis=0)
                else:
                    total = total + sum(each[plan[at]] - each[before[at]] for at in changed)
                batch.append(total)
                before = plan
            each = {one: each[one] for one in before}
            loads = np.stack(batch, axis=1)  # [K, C, W]
            held, host = model.memory_total(loads).max(axis=-1), loads[HOST].max(axis=-1)
            fits = (held <= model.usable_bytes) & (host <= model.host_room)
            found += zip(model.step_ms(loads).tolist(), held.tolist(), fits.tolist(), strict=True)
        return found

    def _single_schemes(self, model: CostModel) -> dict[str, Candidate]:
        """Every table under one scheme, where it can be cut by it."""
        problem = self._whole
        assert problem is not None
        flat = [option for choices in problem.options for option in choices]
        names = np.array([option.proposal.scheme for option in flat])
        starts, per = problem.priced.starts, np.diff(np.append(problem.priced.starts, len(flat)))
        plans: dict[str, tuple[Placement, ...]] = {}
        elsewhere: dict[str, int] = {}
        for scheme in dict.fromkeys(names.tolist()):
            mine = names == scheme
            cut = np.maximum.reduceat(mine, starts)
            own = copy(problem)
            own.keep_only(mine | ~np.repeat(cut, per))
            state = self._laid_out(own)
            if state is not None:
                plans[scheme] = self._flat(tuple(state.placements()))
                elsewhere[scheme] = sum(one.option.proposal.scheme != scheme for one in plans[scheme])
        numbers = self._estimated(model, list(plans.values()))
        return {
            scheme: Candidate(-1, "single scheme", *each, placements, elsewhere[scheme])
            for (scheme, placements), each in zip(plans.items(), numbers, strict=True)
        }

    def _laid_out(self, problem: Problem) -> State | None:
        """All tables placed; as if there were room for them, where there is none."""
        roomy = copy(problem)
        roomy.capacity = np.full(len(problem.capacity), np.inf)
        for room in (problem, roomy):
            state = room.start()
            for table in room.by_work:
                put = room.best(state, table)
                if put is None:
                    break
                room.put(state, table, put[1])
            else:
                state.balance = TIE
                if len(room.options) * room.num_ranks <= IMPROVED:
                    improve(room, state, 2 * len(room.options))
                return state
        return None


def _same(one: Sequence[Placement], other: Sequence[Placement]) -> bool:
    return all(a.option is b.option and a.ranks == b.ranks for a, b in zip(one, other, strict=True))
