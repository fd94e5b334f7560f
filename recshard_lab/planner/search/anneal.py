"""Annealing of many plans at once: each array operation moves one table in all of them.

A table is taken out of every plan and put back by the heat bath: way c with score ``s_c`` (the step, and a little for
imbalance) is drawn with a probability proportional to ``exp(-s_c / temperature)``, as the least of
``s_c - temperature * Gumbel``. The first sweep places the tables, each plan under its own set of options and without
heat; then the temperature falls from sweep to sweep, and late in the search the worst plans give way to copies of the
best ("go with the winners": Aldous and Vazirani, FOCS 1994). The draws come from a generator with a fixed seed, so the
same problem gives the same plan.

What a way adds is kept by position in an order of the ranks (`ways.py`), so that only the orders depend on the plan.

Shape letters: R rows (P phases that ranks differ in, then M memories), W ranks, B plans, T tables, C ways, S switches,
X extras, Y = 1 + M + X. Plans come last, so that array operations run along them.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.planner.search.bounds import Bound
from recshard_lab.planner.search.candidates import dealt
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import TIE, Index, Put, State
from recshard_lab.planner.search.ways import Orders, ways_of
from recshard_lab.planner.workload import Array

if TYPE_CHECKING:
    from recshard_lab.planner.search.record import Recorder

HOT, COLD = 0.1, 1e-4  # temperatures: as a share of a table's mean share of the step, and of the step
BALANCE = (0.05, 0.5)  # weights of imbalance at first, from plan to plan
WINNERS = 0.7  # share of the sweeps after which the worst half of the plans is replaced
SEED = 20
POOL, STRIDE = 1 << 14, 7919  # Gumbel draws, reused from different offsets
FINALISTS = 1  # starts whose best plans are returned at the end
COOLING = 4  # least number of sweeps under a time limit
JUDGED = 4  # plans of a sweep that the judge rates
LATE = 1e3  # steps that memory beyond the capacity costs


class Anneal:
    """B plans of one problem, at first empty.

    Args:
        problem: options that no better plan can hold may have been left out of it.
        starts: sets of options, dealt to the plans in turn, under which they are placed.
        copies: B.
    """

    def __init__(self, problem: Problem, starts: Sequence[Bound], copies: int) -> None:
        self.problem, self.copies = problem, copies
        ranks, count, rows = problem.num_ranks, len(problem.options), problem.num_rows
        self.orders = Orders(problem, copies)
        self.ways = [ways_of(problem, table, self.orders) for table in range(count)]
        self.draws = np.random.default_rng(SEED)
        self.pool: Array = self.draws.gumbel(size=POOL)
        self.start_of = np.arange(copies) % len(starts)
        self.barred: Array = np.stack([np.where(start.allowed, 0.0, np.inf) for start in starts], axis=1)
        self.floor: Array = np.stack([start.floor for start in starts], axis=1)[:, None, self.start_of]
        switches = len(problem.terms.switches)
        self.bit_rows = (np.arange(1 << switches) >> np.arange(switches)[:, None]) & 1  # [S, 2 ** S]
        self.delta = np.zeros((count, rows, ranks, copies))
        self.extras = slice(1 + len(problem.capacity), None)
        self.added = np.zeros((count, self.extras.start + len(problem.priced.extra_switches), copies))
        self.flags = np.zeros((count, copies), dtype=np.intp)
        self.way = np.zeros((count, copies), dtype=np.intp)
        self.order = np.zeros((count, ranks, copies), dtype=np.intp)
        self.each = np.arange(copies)
        self.scale, self.per_rank, self.turn = 1.0, ranks**-0.5, 0
        self.balance: Array = np.geomspace(*BALANCE, copies)[self.draws.permutation(copies)]
        self._add_up()  # nothing is placed: all is zero
        self.on[:] = 0
        self._placed: list[list[Put | None]] = []  # of each plan, where they are recorded

    def run(
        self,
        sweeps: int,
        enough_ms: float = 0.0,
        judge: Callable[[State], float] | None = None,
        heat: float = 1.0,
        seconds: float = np.inf,
        record: "Recorder | None" = None,
    ) -> list[State]:
        """The best plan of all sweeps, then the best of each start at the end. Empty if no plan fits.

        Args:
            sweeps: number of passes over all tables. The first places them.
            enough_ms: the search ends at a plan whose step is at most this.
            judge: returns the ms of a plan if the terms are not exact. It then rates several of the best plans.
            heat: factor on the first temperatures.
            seconds: time limit. The duration of the first sweep sets the number of sweeps.
            record: receives all plans after each move, once all tables are placed.
        """
        problem = self.problem
        begun = time.monotonic()
        for table in problem.by_work:
            self._move(table, 0.0, self.balance, placing=True)
        self._add_up()
        if record is not None:
            self._placed = [[None] * len(self.ways) for _ in self.each]
            self._tell(record, range(len(self.ways)))
        best: State | None = None
        best_ms = np.inf
        judged = judge is not None and problem.model.workload.pipeline != "none"
        sweep = -1
        while (sweep := sweep + 1) < sweeps:
            if sweep == 1:  # as many as there is time for
                sweeps = min(sweeps, max(COOLING, int(min(1e9, seconds / max(1e-9, time.monotonic() - begun)))))
            if sweep:
                share = (sweep - 1) / max(1, sweeps - 2)
                hot = heat * HOT / len(self.ways)
                heat_now = self.scale * hot * (COLD / hot) ** share
                for table in self.draws.permutation(len(self.ways)).tolist():
                    self._move(table, heat_now, self.balance * (1 - share) + TIE * share)
                    if record is not None:
                        self._tell(record, [table])
                self._add_up()
            steps = self._steps()
            ranked = np.argsort(steps, kind="stable")
            first = int(ranked[0])
            for b in ranked[: JUDGED if judged else 1].tolist():
                if judged or steps[b] < best_ms * (1 - 1e-9):
                    state = self._state(b)
                    ms = judge(state) if judge else problem.step_ms(state)
                    if problem.fits(state) and ms < best_ms:
                        best, best_ms = state, ms
            if best_ms <= enough_ms:
                break
            self.scale = float(steps[first]) if np.isfinite(steps[first]) else float(self._steps(False).min())
            if WINNERS * sweeps <= sweep + 1 < sweeps:
                kept = (self.copies + 1) // 2
                self._replace(ranked[kept:], ranked[: self.copies - kept])
                if record is not None:
                    self._follow(ranked[kept:], ranked[: self.copies - kept])
        finalists = {int(self.start_of[b]): b for b in ranked[::-1].tolist() if np.isfinite(steps[b])}
        rest = sorted(finalists.values(), key=lambda b: float(steps[b]))
        return [*([] if best is None else [best]), *(self._state(b) for b in rest[:FINALISTS])]

    def _move(self, table: int, heat: float, balance: Array, placing: bool = False) -> None:
        """Takes `table` out of every plan and puts it back by the heat bath."""
        problem, ways, used = self.problem, self.ways[table], self.used
        if not placing:
            used -= self.delta[table]
            self.shared -= self.added[table]
            self.on -= self.bit_rows.take(self.flags[table], axis=1)
        peaks, sums = self.orders.peaks(used, ways)
        peaks += ways.heaviest
        np.maximum(peaks, used.max(axis=1, keepdims=True), out=peaks)
        flags = problem.bit_values @ (self.on > 0) | ways.flags
        score = problem.paid.take(flags)
        score += ways.ms
        if len(problem.priced.extra_switches):
            extra = self.shared[self.extras].T + ways.extra  # [C, B, X]
            score += (problem.extra_on[flags] * extra).sum(axis=2)
        phases = peaks[: problem.phases]
        if placing:
            np.maximum(phases, self.floor, out=phases)
            score += ways.over
            barred = self.barred[int(problem.priced.starts[table]) + ways.option]
            barred[:, np.isinf(barred).all(axis=0)] = 0.0
            score += barred[:, self.start_of]
        score += phases.sum(axis=0)
        sums *= ways.twice
        sums += ways.square
        sums += np.square(self.orders.work).sum(axis=0)
        np.sqrt(np.abs(sums, out=sums), out=sums)
        sums *= balance * self.per_rank
        score += sums
        for at, capacity in enumerate(problem.capacity):
            over = peaks[problem.phases + at]
            over += ways.shared[1 + at, :, None]
            over += self.shared[1 + at]
            if over.max() > 0:
                late = over > 0
                score[late] += LATE * self.scale * (1 + over[late] / capacity)
        if heat:
            size = score.size
            self.turn += 1
            start = self.turn * STRIDE % max(1, POOL - size)
            noise = self.pool[start : start + size] if size < POOL else self.draws.gumbel(size=size)
            score -= heat * noise.reshape(score.shape)
        self._put_back(table, score.argmin(axis=0))

    def _put_back(self, table: int, way: Index) -> None:
        ways, rows = self.ways[table], len(self.used)
        order = self.orders.of[ways.order[way], :, self.each].T  # [W, B]
        gained = self.delta[table]
        places = (order * self.copies + self.each).ravel()
        gained.reshape(rows, -1)[:, places] = ways.pieces.take(ways.kind[way], axis=2).reshape(rows, -1)
        self.way[table], self.order[table] = way, order
        self.used += gained
        self.added[table], self.flags[table] = ways.shared.take(way, axis=1), ways.flags.ravel()[way]
        self.shared += self.added[table]
        self.on += self.bit_rows.take(self.flags[table], axis=1)

    def _steps(self, fitting: bool = True) -> Array:
        """``[B]`` ms of each plan; one that does not fit takes for ever."""
        problem = self.problem
        bits = problem.bit_values @ (self.on > 0)
        step = (
            self.used[: problem.phases].max(axis=1).sum(axis=0) + self.shared[0] + problem.paid[bits] + problem.fixed_ms
        )
        step += (problem.extra_on[bits] * self.shared[self.extras].T).sum(axis=1)
        return np.where((self._over() > 0).any(axis=0), np.inf, step) if fitting else step

    def _over(self) -> Array:
        """``[M, B]`` bytes of the fullest rank beyond the capacity."""
        return np.asarray(self.used[self.problem.phases :].max(axis=1) + self.shared[1 : self.extras.start])

    def _tell(self, record: "Recorder", moved: Sequence[int]) -> None:
        """Every plan as it stands after these tables moved, those that do not fit too."""
        steps, held = self._steps(fitting=False), self._over() + self.problem.capacity[:, None]
        for b, placed in enumerate(self._placed):
            before = [placed[table] for table in moved]
            for table in moved:
                placed[table] = self._placement(table, b, placed[table])
            if any(placed[table] is not put for table, put in zip(moved, before, strict=True)):
                record.offer("annealed", float(steps[b]), held[:, b], placed)

    def _follow(self, worst: Index, by: Index) -> None:
        for one, other in zip(worst.tolist(), by.tolist(), strict=True):
            self._placed[one] = list(self._placed[other])

    def _add_up(self) -> None:
        """Sums of differences drift by rounding: adds up afresh."""
        self.used: Array = self.delta.sum(axis=0)
        self.shared: Array = self.added.sum(axis=0)
        self.shared[1 : self.extras.start] -= self.problem.capacity[:, None]
        self.on: Index = self.bit_rows[:, self.flags].sum(axis=1)

    def _replace(self, worst: Index, by: Index) -> None:
        for held in (
            self.delta,
            self.added,
            self.flags,
            self.way,
            self.order,
            self.used,
            self.shared,
            self.on,
            self.start_of,
        ):
            held[..., worst] = held[..., by]

    def _state(self, b: int) -> State:
        state = self.problem.start()
        for table in range(len(self.ways)):
            self.problem.put(state, table, self._placement(table, b))
        return state

    def _placement(self, table: int, b: int, before: Put | None = None) -> Put:
        """The placement of a table in plan number `b`; the one before, if it is the same."""
        ways, way = self.ways[table], int(self.way[table, b])
        at, listed = int(ways.option[way]), ways.listed[way]
        option = self.problem.options[table][at]
        order = self.order[table, :, b][: len(option.usable)] if listed is None else np.array(listed)
        ranks = dealt(option, order)
        if before is not None and at == before.at and np.array_equal(ranks, before.ranks):
            return before
        return self.problem.made(table, at, ranks)
