"""A planning problem in the terms of its cost model, and the plans that are being made of it.

Every way to place one table in a plan is scored in a few array operations. What a rectangle adds to its rank is the
column ``v [R]`` of its option (the heaviest of its sizes); of ranks that may be chosen freely the quietest are taken,
so all numbers of pieces are scored from one running maximum over the ranks, quietest first; of listed assignments the
busiest rank decides, whatever the table is.

Shape letters: R rows (phases that ranks differ in, and memory), W ranks, C ways, O options of one table.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.search.bounds import Priced, price
from recshard_lab.planner.search.options import Option, Placement
from recshard_lab.planner.search.state import Choices, Groups, Index, Put, State
from recshard_lab.planner.workload import Array

Weights: TypeAlias = tuple[Array, Array, float, bool, float]


class Problem:
    """Tables with their options, scored by the terms of a cost model.

    Args:
        model: costs.
        options: per table, what to choose from.
    """

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]]) -> None:
        self.model, self.options, self.terms = model, options, model.terms
        self.num_ranks, self.num_nodes = model.topology.world_size, model.topology.num_nodes
        self.local = model.topology.local_world_size
        self.priced: Priced = price(model, options)
        self.rows = self.priced.rows
        self.capacity = model.usable_bytes * (1 - 1e-9) - float(self.terms.fixed[-1])  # sums of differences round
        switches = self.terms.switches
        count = len(switches)
        bits = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
        self.paid: Array = bits @ np.array([switch.fixed[:-1].sum() for switch in switches])
        self.extra_on: Array = bits[:, self.priced.extra_switches].astype(float)  # [2 ** S, X]
        self.bit_values = 1 << np.arange(count)
        self.fixed_ms = float(self.terms.fixed[:-1].sum())
        self._groups: dict[tuple[int, ...], Groups] = {}
        self._listed: dict[int, tuple[Index, Index]] = {}
        self.choices = [self._choices(table, range(len(choices))) for table, choices in enumerate(options)]
        least = np.minimum.reduceat(self.priced.cost, self.priced.starts)
        self.by_work: list[int] = np.argsort(-least, kind="stable").tolist()
        need = np.minimum.reduceat(self.priced.total_bytes, self.priced.starts)
        self.by_bytes: list[int] = np.argsort(-need, kind="stable").tolist()

    def start(self, allowed: NDArray[np.bool_] | None = None, floor: Array | None = None) -> State:
        """A plan with nothing placed."""
        width = len(self.priced.extra_switches)
        used: Array = np.zeros((len(self.rows) + 1, self.num_ranks))
        none = np.zeros(len(self.terms.switches), dtype=np.intp)
        return State([None] * len(self.options), used, np.zeros(width), none, allowed=allowed, floor=floor)

    def score(self, state: State) -> float:
        """Milliseconds of a plan, plus a little for imbalance and total work."""
        return self.step_ms(state) + state.balance * float(self._spread(self._squares(state)).sum())

    def step_ms(self, state: State) -> float:
        """Milliseconds of a plan by the terms."""
        bits = int(self.bit_values @ (state.on > 0))
        shared = state.ms + self.paid[bits] + float(self.extra_on[bits] @ state.extra) + self.fixed_ms
        return float(state.used[:-1].max(axis=1).sum() + shared)

    def fits(self, state: State) -> bool:
        """Whether every rank has room."""
        return bool(state.used[-1].max() + state.nbytes <= self.capacity)

    def put(self, state: State, table: int, put: Put) -> None:
        """Places `table`."""
        self._change(state, put, 1)
        state.placed[table] = put

    def take(self, state: State, table: int) -> Put:
        """Takes `table` out and gives its placement."""
        put = state.placed[table]
        assert put is not None
        self._change(state, put, -1)
        state.placed[table] = None
        return put

    def add_up(self, state: State) -> None:
        """Sums of differences drift by rounding: adds up afresh."""
        state.used[:], state.extra[:], state.on[:] = 0.0, 0.0, 0
        state.ms = state.nbytes = 0.0
        for put in state.placed:
            if put is not None:
                self._change(state, put, 1)

    def made(self, table: int, at: int, ranks: Sequence[int] | Index) -> Put:
        """Option number `at` of `table` with its rectangles on `ranks`, exactly."""
        option, index = self.options[table][at], self.choices[table].first + at
        chosen = np.asarray(ranks, dtype=np.intp)
        priced = self.priced
        placement = Placement(option, tuple(chosen.tolist()))
        if option.route != "two_hop":
            own = priced.own_of(index)[:, option.of]
            shared = priced.shared_ms[index], priced.shared_bytes[index]
            return Put(
                placement, at, chosen, own, None, option.distinct, *shared, priced.extra[index], self._flags(index)
            )
        loads = option.placed_loads(chosen.tolist(), self.model.topology)
        rows = [*self.rows, -1]
        by_rect = self.terms.node[rows] @ loads
        nodes = chosen // self.local
        by_node: Array = np.stack([np.bincount(nodes, weights=row, minlength=self.num_nodes) for row in by_rect])
        everyone = self.terms.everyone @ loads.sum(axis=1)
        node: Array = np.repeat(by_node, self.local, axis=1)
        ms, nbytes = float(everyone[:-1].sum()), float(everyone[-1])
        own = self.terms.own[rows] @ loads
        return Put(
            placement, at, chosen, own, node, option.distinct, ms, nbytes, priced.extra[index], self._flags(index)
        )

    def best(
        self, state: State, table: int, memory_first: bool = False, allowed: NDArray[np.bool_] | None = None
    ) -> tuple[float, Put] | None:
        """The best way to place `table` beside what is placed, and its score; None where it does not fit."""
        choices, priced = self.choices[table], self.priced
        span = slice(choices.first, choices.first + len(self.options[table]))
        v = priced.heaviest[span]  # [O, R]
        used = state.used
        most, squares = used.max(axis=1), self._squares(state)
        top = most[:-1] if state.floor is None else np.maximum(most[:-1], state.floor)
        bits = int(self.bit_values @ (state.on > 0)) | priced.flags[span]
        shared = state.ms + priced.shared_ms[span] + self.paid[bits] + self.fixed_ms
        if state.extra.size:
            shared = shared + (self.extra_on[bits] * (state.extra + priced.extra[span])).sum(axis=1)
        if state.floor is not None:
            shared = shared + priced.over[span]
        room = self.capacity - state.nbytes - priced.shared_bytes[span]
        allowed = state.allowed if allowed is None else allowed
        if allowed is not None:
            mine = allowed[span]
            room = np.where(mine, room, -np.inf) if mine.any() else room
        weights = (top, squares, state.balance, memory_first, most[-1])
        scores: list[Array] = []
        if choices.single.size:
            scores.append(self._singles(choices, v, used, shared, room, weights))
        ways = self._ways(choices, v, used, room)
        if ways is not None:
            scores.append(self._scored(v, shared, room, weights, *ways[:4]))
        flat = np.concatenate([score.ravel() for score in scores])
        best, best_score = None, np.inf
        while flat[c := int(flat.argmin())] < best_score:  # under two hops a score is optimistic: others may be better
            put = self._put(table, choices, c, ways)
            score = float(flat[c]) if put.node is None else self._score_with(state, put, choices.first, memory_first)
            if score < best_score:
                best, best_score = put, score
            flat[c] = np.inf
        return None if best is None else (best_score, best)

    def _score_with(self, state: State, put: Put, first: int, memory_first: bool) -> float:
        """The exact score of a plan with `put` added; infinite if it does not fit."""
        self._change(state, put, 1)
        score, held = self.score(state), float(state.used[-1].max() + state.nbytes)
        if state.floor is not None:
            most = state.used[:-1].max(axis=1)
            score += float((np.maximum(most, state.floor) - most).sum() + self.priced.over[first + put.at])
        if memory_first:
            score += 1e6 * held / max(1.0, self.capacity)
        self._change(state, put, -1)
        return score if held <= self.capacity else np.inf

    def _singles(self, choices: Choices, v: Array, used: Array, shared: Array, room: Array, weights: Weights) -> Array:
        """``[singles, W]`` scores of one piece on every rank."""
        top, squares, balance, memory_first, full = weights
        mine = v[choices.single][:, :, None]
        new = used + mine  # [singles, R, W]
        score = np.maximum(new[:, :-1], top[:, None]).sum(axis=1) + shared[choices.single][:, None]
        gained = mine[:, :-1] * (2 * used[:-1] + mine[:, :-1])
        score += balance * np.sqrt((squares[:, None] + gained) / self.num_ranks).sum(axis=1)
        held = np.maximum(new[:, -1], full)
        if memory_first:
            score += 1e6 * held / max(1.0, self.capacity)
        score[held > room[choices.single][:, None]] = np.inf
        if choices.usable is not None:
            outside = np.ones(self.num_ranks, dtype=bool)
            outside[choices.usable] = False
            score[:, outside] = np.inf
        return np.asarray(score)

    def _ways(
        self, choices: Choices, v: Array, used: Array, room: Array
    ) -> tuple[Index, Array, Array, Array, list[Index]] | None:
        """Several pieces: the option of each way, the busiest of its ranks, their sums, the pieces; and the orders."""
        of: list[Index] = []
        peaks: list[Array] = []
        sums: list[Array] = []
        pieces: list[Array] = []
        orders: list[Index] = []

        def add(i: int, order: Index) -> None:
            ranks = order[: choices.pieces[i]]
            of.append(choices.many[i : i + 1])
            pieces.append(choices.pieces[i : i + 1].astype(float))
            peaks.append(used[:, ranks].max(axis=1, keepdims=True))
            sums.append(used[:-1, ranks].sum(axis=1, keepdims=True))
            orders.append(order)

        if choices.many.size:
            work = used[:-1].sum(axis=0)
            order = work.argsort(kind="stable")
            if choices.usable is not None:
                order = order[np.isin(order, choices.usable)]
            at = np.minimum(choices.pieces, len(order)) - 1
            turns = -(-choices.pieces // len(order))
            sorted_by = used[:, order]
            peak, total = np.maximum.accumulate(sorted_by, axis=1)[:, at], np.cumsum(sorted_by[:-1], axis=1)[:, at]
            for_many = v[choices.many]
            full = (peak[-1] + for_many[:, -1] * turns > room[choices.many]) & (room[choices.many] > 0)
            of.append(choices.many)
            peaks.append(peak)
            sums.append(total)
            pieces.append(choices.pieces.astype(float))
            orders += [order] * len(choices.many)
            if choices.hops.size:  # the ranks of the quietest node, then those of the next
                nodes = work.reshape(self.num_nodes, self.local).sum(axis=1)
                near = order[np.argsort(nodes[order // self.local], kind="stable")]
                sorted_by, at = used[:, near], at[choices.hops]
                of.append(choices.many[choices.hops])
                peaks.append(np.maximum.accumulate(sorted_by, axis=1)[:, at])
                sums.append(np.cumsum(sorted_by[:-1], axis=1)[:, at])
                pieces.append(choices.pieces[choices.hops].astype(float))
                orders += [near] * len(choices.hops)
            for i in full.nonzero()[0]:  # memory is tight: the quietest ranks with room, and the emptiest
                option = choices.many[i]
                fitting = order[used[-1, order] + for_many[i, -1] * turns[i] <= room[option]]
                emptiest = order[np.argsort(used[-1, order], kind="stable")]
                for other in (fitting, emptiest):
                    if len(other) >= min(choices.pieces[i], len(order)):
                        add(i, other)
        if choices.groups is not None:
            groups = choices.groups
            gathered = used[:, groups.ranks]
            of.append(choices.listed_of)
            pieces.append(groups.sizes)
            peaks.append(np.maximum.reduceat(gathered, groups.starts, axis=1))
            sums.append(np.add.reduceat(gathered[:-1], groups.starts, axis=1))
        if not of:
            return None
        joined = np.concatenate(peaks, axis=1), np.concatenate(sums, axis=1), np.concatenate(pieces)
        return np.concatenate(of), *joined, orders

    def _scored(
        self,
        v: Array,
        shared: Array,
        room: Array,
        weights: Weights,
        of: Index,
        peaks: Array,
        sums: Array,
        pieces: Array,
    ) -> Array:
        """``[C]`` scores of ways of several pieces."""
        top, squares, balance, memory_first, full = weights
        turns = np.maximum(1.0, np.ceil(pieces / self.num_ranks))
        mine = v[of].T * turns  # [R, C]
        new = peaks + mine
        score = np.maximum(new[:-1], top[:, None]).sum(axis=0) + shared[of]
        gained = mine[:-1] * (2 * sums + pieces * mine[:-1])
        score += balance * np.sqrt((squares[:, None] + gained) / self.num_ranks).sum(axis=0)
        held = np.maximum(new[-1], full)
        if memory_first:
            score += 1e6 * held / max(1.0, self.capacity)
        score[held > room[of]] = np.inf
        return np.asarray(score)

    def _put(
        self, table: int, choices: Choices, c: int, ways: tuple[Index, Array, Array, Array, list[Index]] | None
    ) -> Put:
        """Way number `c` of those that were scored."""
        singles = len(choices.single) * self.num_ranks
        if c < singles:
            return self.made(table, int(choices.single[c // self.num_ranks]), [c % self.num_ranks])
        assert ways is not None
        c -= singles
        at, orders = int(ways[0][c]), ways[4]
        if c >= len(orders):
            groups, c = choices.groups, c - len(orders)
            assert groups is not None
            start = groups.starts[c]
            return self.made(table, at, groups.ranks[start : start + len(self.options[table][at].of)])
        option, order = self.options[table][at], orders[c]
        ranks = np.empty(len(option.of), dtype=np.intp)
        ranks[option.heavy_first] = order[np.arange(len(option.of)) % len(order)]
        return self.made(table, at, ranks)

    def keep_only(self, worth: NDArray[np.bool_]) -> None:
        """Leaves all but these options out; a table of which none is worth it keeps its own."""
        for table, (start, options) in enumerate(zip(self.priced.starts.tolist(), self.options, strict=True)):
            kept = np.flatnonzero(worth[start : start + len(options)]).tolist()
            self.choices[table] = self._choices(table, kept or range(len(options)))

    def _choices(self, table: int, kept: Sequence[int]) -> Choices:
        options = self.options[table]
        free = [i for i in kept if options[i].proposal.assignments is None]
        single = [i for i in free if len(options[i].of) == 1]
        many = [i for i in free if len(options[i].of) > 1]
        listed = [i for i in kept if options[i].proposal.assignments is not None]
        lists = [options[i].proposal.assignments or () for i in listed]
        usable = options[0].usable
        return Choices(
            int(self.priced.starts[table]),
            np.array(single, dtype=np.intp),
            np.array(many, dtype=np.intp),
            np.array([len(options[i].of) for i in many], dtype=np.intp),
            np.array([i for i, option in enumerate(many) if options[option].route == "two_hop"], dtype=np.intp),
            self._grouped(lists) if listed else None,
            np.repeat(np.array(listed, dtype=np.intp), [len(ways) for ways in lists]),
            None if len(usable) == self.num_ranks else np.array(sorted(usable), dtype=np.intp),
        )

    def _grouped(self, lists: list[tuple[tuple[int, ...], ...]]) -> Groups:
        """Listed assignments end to end; schemes give all tables the same ones, so they are joined once."""
        key = tuple(id(ways) for ways in lists)
        if key not in self._groups:
            flat = [self._flat(ways) for ways in lists]
            sizes = np.concatenate([sizes for _, sizes in flat])
            starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
            self._groups[key] = Groups(np.concatenate([ranks for ranks, _ in flat]), starts, sizes.astype(float))
        return self._groups[key]

    def _flat(self, ways: tuple[tuple[int, ...], ...]) -> tuple[Index, Index]:
        """The ranks of listed assignments end to end, and how many each has."""
        if id(ways) not in self._listed:
            sizes = np.array([len(ranks) for ranks in ways], dtype=np.intp)
            self._listed[id(ways)] = np.concatenate([np.array(ranks, dtype=np.intp) for ranks in ways]), sizes
        return self._listed[id(ways)]

    def _flags(self, index: int) -> int:
        return int(self.priced.flags[index])

    def _change(self, state: State, put: Put, sign: int) -> None:
        own = put.own if sign > 0 else -put.own
        if put.distinct:
            state.used[:, put.ranks] += own
        else:  # a rank holds several rectangles
            for i, rank in enumerate(put.ranks):
                state.used[:, rank] += own[:, i]
        if put.node is not None:
            state.used += sign * put.node
        state.ms += sign * put.ms
        state.nbytes += sign * put.nbytes
        state.extra += sign * put.extra
        state.on += sign * ((put.flags & self.bit_values) > 0)

    def _squares(self, state: State) -> Array:
        return np.asarray(np.einsum("rw,rw->r", state.used[:-1], state.used[:-1]))

    def _spread(self, squares: Array) -> Array:
        return np.asarray(np.sqrt(np.maximum(squares, 0.0) / self.num_ranks))
