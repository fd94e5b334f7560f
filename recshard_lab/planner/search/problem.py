"""A planning problem in the terms of its cost model, and the best way to place one table in a plan.

`candidates.py` enumerates the ways. All of a table are scored in a few array operations: from the peaks and sums of
each set of ranks in the plan, and from what an option adds. A shard adds at most the column ``own [R]`` of its option
to its rank. Under two hops, an option also adds ``on_node [R]`` to every rank of each node that it uses.

Shape letters: R rows (P phases that ranks differ in, then M memories: the device's, and the host's if a shard may be
there), W ranks, N nodes, L ranks of a node, Q sets of ranks, C candidates, O options.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.search.bounds import Priced, price
from recshard_lab.planner.search.candidates import Candidates, Kind, RankSets, adds_to_nodes, dealt
from recshard_lab.planner.search.options import Option, Placement
from recshard_lab.planner.search.state import Index, Nodes, Put, State
from recshard_lab.planner.workload import Array

FEW_NODES = 16  # nodes up to which all are added up again after a change, which is faster than finding the changed ones
OUTSIDE = 1e30  # ms and bytes of a rank that may not be used
"""By the number of memories, how tables are placed by size: weights of the fullest rank's share of each."""


class _View(NamedTuple):
    """What the candidates of a table are scored beside.

    Attributes:
        columns: ``[R + P, Q]`` peaks of each set of ranks, and the sums of its phases.
        used: ``[R, W]``, and `nodes`, of which ranks that the table may not use are busiest.
        order: the ranks by work; node_orders: the nodes by work, and by each memory; more: ranks of further columns.
        top: ``[P]`` ms of the slowest rank; held: ``[M]`` bytes of the fullest; squares: ``[P]`` sums over all ranks.
    """

    columns: Array
    used: Array
    order: Index
    nodes: Nodes
    node_orders: list[Index]
    top: Array
    held: Array
    squares: Array
    more: list[Index]


class Problem:
    """Tables with their options, scored by the terms of a cost model.

    Attributes:
        phases: P; num_rows: R.
        capacity: ``[M]`` bytes of each memory that a rank has for tables.
        worth: ``[all options]`` those that are looked at.
        by_share: the tables, the largest first: by its share of all work, or of all memory if that is more.
        by_work, by_bytes: the tables, the one with most work, or most bytes, first.

    Args:
        model: costs.
        options: per table, what to choose from.
    """

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]]) -> None:
        self.model, self.options, self.terms = model, options, model.terms
        self.num_ranks, self.num_nodes = model.topology.world_size, model.topology.num_nodes
        self.local = model.topology.local_world_size
        self.priced: Priced = price(model, options)
        self.phases, self.num_rows = len(self.priced.rows), len(self.priced.per_own)
        self.capacity = self.priced.room.copy()
        self.capacity[0] -= 1e-9 * model.usable_bytes  # sums of differences round; bytes in host memory are whole
        switches = self.terms.switches
        count = len(switches)
        bits = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
        self.paid: Array = bits @ np.array([switch.fixed[:-1].sum() for switch in switches])
        self.extra_on: Array = bits[:, self.priced.extra_switches].astype(float)  # [2 ** S, X]
        self.bit_values = 1 << np.arange(count)
        self.fixed_ms = float(self.terms.fixed[:-1].sum())
        self._gains()
        self.sets = RankSets(options, self.num_ranks, self.local, len(self.capacity))
        self.worth = np.ones(len(self.shards), dtype=bool)
        work = np.minimum.reduceat(self.priced.cost, self.priced.starts)
        need = np.minimum.reduceat(self.priced.total_bytes.sum(axis=0), self.priced.starts)
        self.by_work: list[int] = np.argsort(-work, kind="stable").tolist()
        self.by_bytes: list[int] = np.argsort(-need, kind="stable").tolist()
        room = max(1.0, self.capacity.sum() * self.num_ranks)
        share = np.maximum(work / max(1e-9, work.sum()), need / room)
        self.by_share: list[int] = np.argsort(-share, kind="stable").tolist()

    def _gains(self) -> None:
        """What options add, at most, to a rank of their shards, and to every rank of the nodes that they use.

        Shards whose nodes are not known yet count as `Priced.heaviest`, which is the least that they add.
        """
        flat = [option for choices in self.options for option in choices]
        own = self.priced.heaviest.T.copy()
        self.on_node: Array = np.zeros_like(own)  # [R, all options]
        hops = [i for i, option in enumerate(flat) if adds_to_nodes(option)]
        self.together = {i: _shards_of_a_node(flat[i], self.local) for i in hops}
        self.node_kinds: dict[int, Array] = {}
        if hops:
            kinds = np.concatenate([flat[i].kinds for i in hops], axis=1)
            first = np.cumsum([0, *(flat[i].kinds.shape[1] for i in hops)])
            node = self.priced.per_node @ kinds
            own[:, hops] = np.maximum.reduceat(self.priced.per_own @ kinds, first[:-1], axis=1)
            self.on_node[:, hops] = np.maximum.reduceat(node, first[:-1], axis=1) * list(self.together.values())
            self.node_kinds = {i: node[:, first[n] : first[n + 1]] for n, i in enumerate(hops)}
        counts, ranks = np.array([[len(option.of), len(option.usable)] for option in flat]).T
        self.shards: Index = np.minimum(counts, ranks)  # ranks that get a shard
        own *= np.ceil(counts / ranks)
        squares = 0.5 * self.shards * own[: self.phases] ** 2
        self.gained: Array = np.concatenate([own, squares])  # [R + P, all options]

    def shared_bytes(self, allowed: NDArray[np.bool_]) -> Array:
        """``[M, T]`` the least bytes that each table adds to every rank, under the allowed options."""
        shared = np.where(allowed, self.priced.shared_bytes, np.inf)
        return np.asarray(np.minimum.reduceat(shared, self.priced.starts, axis=1))

    def start(self, allowed: NDArray[np.bool_] | None = None, floor: Array | None = None) -> State:
        """A plan with nothing placed."""
        width = len(self.priced.extra_switches)
        used: Array = np.zeros((self.num_rows, self.num_ranks))
        none = np.zeros(len(self.terms.switches), dtype=np.intp)
        nbytes = np.zeros(len(self.capacity))
        return State([None] * len(self.options), used, np.zeros(width), none, nbytes, allowed=allowed, floor=floor)

    def score(self, state: State) -> float:
        """Milliseconds of a plan, plus a little for imbalance and total work."""
        return self.step_ms(state) + state.balance * float(self._spread(self._squares(state.used)).sum())

    def step_ms(self, state: State) -> float:
        """Milliseconds of a plan by the terms."""
        bits = int(self.bit_values @ (state.on > 0))
        shared = state.ms + self.paid[bits] + float(self.extra_on[bits] @ state.extra) + self.fixed_ms
        return float(state.used[: self.phases].max(axis=1).sum() + shared)

    def loads(self, state: State) -> Array:
        """``[K, W]`` the loads of all tables that are placed."""
        placed = [put.placement for put in state.placed if put is not None]
        loads = np.concatenate([one.option.placed_loads(one.ranks, self.model.topology) for one in placed], axis=1)
        ranks = np.concatenate([one.ranks for one in placed])
        return np.stack([np.bincount(ranks, weights=row, minlength=self.num_ranks) for row in loads])

    def fits(self, state: State) -> bool:
        """Whether every rank has room."""
        return bool((self.held(state) <= self.capacity).all())

    def held(self, state: State) -> Array:
        """``[M]`` bytes of the fullest rank in each memory."""
        return np.asarray(state.used[self.phases :].max(axis=1) + state.nbytes)

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
        state.used[:], state.extra[:], state.on[:], state.nbytes[:] = 0.0, 0.0, 0, 0.0
        state.ms = 0.0
        state.nodes = None
        for put in state.placed:
            if put is not None:
                self._change(state, put, 1)

    def made(self, table: int, at: int, ranks: Sequence[int] | Index) -> Put:
        """Option number `at` of `table` with its rectangles on `ranks`, exactly."""
        option, index, priced = self.options[table][at], int(self.priced.starts[table]) + at, self.priced
        chosen = np.asarray(ranks, dtype=np.intp)
        own, node, foreseen = priced.own_of(index), None, True
        shared_ms, shared_bytes = float(priced.shared_ms[index]), priced.shared_bytes[:, index]
        if option.route == "two_hop":
            by_shard = chosen // self.local
            counts = np.bincount(by_shard, minlength=self.num_nodes)
            nodes = counts.nonzero()[0]
            counts = counts[nodes]
            foreseen = bool(
                (counts == self.together.get(index, 0)).all()
            )  # as many on each node as `Option.kinds` says
            if foreseen and len(option.counts) == 1:
                node = nodes, self.node_kinds[index] * counts
            else:
                if foreseen:
                    added = self.node_kinds[index][:, option.of]
                else:
                    loads = option.placed_loads(chosen.tolist(), self.model.topology)
                    own, added = priced.per_own @ loads, priced.per_node @ loads
                    everyone = self.terms.everyone @ loads.sum(axis=1)
                    shared_ms, shared_bytes = float(everyone[:-1].sum()), np.zeros(len(self.capacity))
                    shared_bytes[0] = everyone[-1]
                node = nodes, np.zeros((len(own), len(nodes)))
                np.add.at(node[1].T, np.searchsorted(nodes, by_shard), added.T)
        return Put(
            Placement(option, tuple(chosen.tolist())),
            at,
            chosen,
            own[:, option.of] if foreseen else own,
            node,
            option.distinct,
            shared_ms,
            shared_bytes,
            priced.extra[index],
            int(priced.flags[index]),
            foreseen and len(option.counts) == 1,
        )

    def best(self, state: State, table: int) -> tuple[float, Put] | None:
        """The best way to place `table` beside what is placed, and its score; None where it does not fit."""
        priced, first = self.priced, int(self.priced.starts[table])
        span = slice(first, first + len(self.options[table]))
        candidates = self.candidates(table, state.allowed)
        if not len(candidates.option):
            return None
        view = self._view(state, candidates)
        bits = int(self.bit_values @ (state.on > 0)) | priced.flags[span]
        shared = state.ms + priced.shared_ms[span] + self.paid[bits] + self.fixed_ms
        if state.extra.size:
            shared = shared + (self.extra_on[bits] * (state.extra + priced.extra[span])).sum(axis=1)
        if state.floor is not None:
            shared = shared + priced.over[span]
        room = (self.capacity - state.nbytes)[:, None] - priced.shared_bytes[:, span]
        option, column = candidates.option, candidates.column
        given = state.balance, first, shared, room
        scores = self._scores(view, option, column, candidates.node_column, *given)
        short = option[candidates.spread[np.isinf(scores[candidates.spread])]]
        if short.size:
            view, more, columns = self._with_room(view, short, first, room)
            scores = np.append(scores, self._scores(view, more, columns, columns[:0], *given))
            option, column = np.append(option, more), np.append(column, columns)
        best, best_score = None, np.inf
        while scores[c := int(scores.argmin())] < best_score:  # those of two hops may be too low: others may be better
            at = int(option[c])
            put = self.made(table, at, dealt(self.options[table][at], self._order(view, int(column[c]))))
            score = float(scores[c])
            if put.node is not None and not put.alike:
                over = 0.0 if state.floor is None else float(priced.over[first + at])
                score = self._score_with(state, put, view, over)
            if score < best_score:
                best, best_score = put, score
            scores[c] = np.inf
        return None if best is None else (best_score, best)

    def _scores(
        self,
        view: _View,
        option: Index,
        column: Index,
        node_column: Index,
        balance: float,
        first: int,
        shared: Array,
        room: Array,
    ) -> Array:
        """``[C]`` scores of candidates; infinite where memory is short.

        Args:
            option, column, node_column: see `Candidates`.
            first: position of the table's first option; shared: ``[O]`` ms of all ranks; room: ``[M, O]`` bytes left.
        """
        rows, phases, index = self.num_rows, self.phases, first + option
        both, mine = view.columns.take(column, axis=1), self.gained.take(index, axis=1)
        peaks, squares = both[:rows], both[rows:]
        squares *= mine[:phases]
        both += mine
        if node_column.size:
            start = len(option) - len(node_column)
            around, on_node = view.columns.take(node_column, axis=1), self.on_node.take(index[start:], axis=1)
            np.maximum(peaks[:, start:], around[:rows], out=peaks[:, start:])
            peaks[:, start:] += on_node
            on_node = on_node[:phases]
            around = around[rows:]
            around += (0.5 * self.local * self.sets.num_nodes[node_column]) * on_node
            around += self.shards[index[start:]] * mine[:phases, start:]
            around *= on_node
            squares[:, start:] += around
        squares += 0.5 * view.squares[:, None]
        np.sqrt(squares, out=squares)
        scores = np.maximum(peaks[:phases], view.top[:, None]).sum(axis=0)
        scores += shared.take(option)
        scores += balance * (2 / self.num_ranks) ** 0.5 * squares.sum(axis=0)
        return self._in_room(scores, peaks[phases:], room.take(option, axis=1), view.held)

    def _with_room(self, view: _View, option: Index, first: int, room: Array) -> tuple[_View, Index, Index]:
        """More candidates for options that are short of memory on the least busy ranks: their options and columns.

        They are placed on the least busy ranks that have room, and on the emptiest.
        """
        used, order, phases = view.used, view.order, self.phases
        held, added = used[phases:, order], self.gained[phases : self.num_rows, first + option]
        orders: list[Index] = []
        options: list[int] = []
        for i, at in enumerate(option.tolist()):
            fits = (held + added[:, i, None] <= room[:, at, None]).all(axis=0)
            for other in (order[fits], *(order[one.argsort(kind="stable")] for one in held)):
                if len(other) >= self.shards[first + at]:
                    orders.append(other[: int(self.shards[first + at])])
                    options.append(at)
        columns = [np.append(used[:, o].max(axis=1), used[:phases, o].sum(axis=1)) for o in orders]
        start = view.columns.shape[1]
        view = view._replace(columns=np.column_stack([view.columns, *columns]), more=orders)
        return view, np.array(options, dtype=np.intp), np.arange(start, start + len(orders))

    def _score_with(self, state: State, put: Put, view: _View, over: float) -> float:
        """The exact score of a plan with `put` added; infinite if it does not fit."""
        used = state.used.copy()
        self.add(used, put)
        most = used.max(axis=1)
        bits = int(self.bit_values @ (state.on > 0)) | put.flags
        shared = state.ms + put.ms + self.paid[bits] + self.fixed_ms + over
        shared += float(self.extra_on[bits] @ (state.extra + put.extra))
        score = np.maximum(most[: self.phases], view.top).sum() + shared
        score += state.balance * self._spread(self._squares(used)).sum()
        room = self.capacity - state.nbytes - put.nbytes
        return float(self._in_room(score[None], most[self.phases :, None], room[:, None], view.held)[0])

    def _in_room(self, scores: Array, held: Array, room: Array, most: Array) -> Array:
        """Scores ``[C]``, changed in place: infinite where memory is short.

        Args:
            held: ``[M, C]`` bytes of the ranks that get a shard; room: those that each rank has; most: ``[M]`` of the
                fullest rank.
        """
        for at, other in enumerate(most.tolist()):
            scores[np.maximum(held[at], other) > room[at]] = np.inf
        return scores

    def _view(self, state: State, candidates: Candidates) -> _View:
        """What the candidates of a table are scored beside."""
        rows, phases, used = self.num_rows, self.phases, state.used
        nodes, starts, last = self.nodes_of(state), self.sets.starts, self.sets.last
        within, sections = nodes, candidates.sections
        most = nodes.whole[:rows].max(axis=1)
        top = most[:phases] if state.floor is None else np.maximum(most[:phases], state.floor)
        if candidates.usable is not None:
            used = np.full_like(used, OUTSIDE)
            used[:, candidates.usable] = state.used[:, candidates.usable]
            within = self._nodes(used)
        columns = np.empty((rows + phases, starts[-1]))
        order, node_orders = candidates.option[:0], list[Index]()
        if 0 in sections:
            columns[:rows, : self.num_ranks] = used
            columns[rows:, : self.num_ranks] = used[:phases]
        if 1 in sections:
            order = used[:phases].sum(axis=0).argsort(kind="stable")
            columns[:, starts[1] : starts[2]] = self._first(used.take(order, axis=1)).take(last[Kind.SPREAD], axis=1)
        if 2 in sections:
            columns[:, starts[2] : starts[3]] = within.first.take(last[Kind.NODE], axis=1).reshape(len(columns), -1)
        if 3 in sections:
            count = len(last[Kind.NODES])
            measures = [nodes.whole[rows:].sum(axis=0), *nodes.whole[phases:rows]]
            for at, measure in zip(range(starts[3], starts[4], count), measures, strict=True):
                node_orders.append(measure.argsort(kind="stable"))
                here = nodes.whole.take(node_orders[-1], axis=1)
                np.maximum.accumulate(here[:rows], axis=1, out=here[:rows])
                np.cumsum(here[rows:], axis=1, out=here[rows:])
                columns[:, at : at + count] = here.take(last[Kind.NODES], axis=1)
        for section, into, members, begin in candidates.listed:
            here = (np.concatenate([used, used[:phases]]) if section == 5 else nodes.whole).take(members, axis=1)
            columns[:rows, into] = np.maximum.reduceat(here[:rows], begin, axis=1)
            columns[rows:, into] = np.add.reduceat(here[rows:], begin, axis=1)
        if 7 in sections:
            columns[:, starts[7] :] = nodes.whole
        return _View(columns, used, order, within, node_orders, top, most[phases:], nodes.squares.sum(axis=1), more=[])

    def _first(self, used: Array) -> Array:
        """``[R + P, W, ...]`` peaks, and sums of phases, of the first ranks of ``[R, W, ...]``."""
        found = np.empty((self.num_rows + self.phases, *used.shape[1:]))
        np.maximum.accumulate(used, axis=1, out=found[: self.num_rows])
        np.cumsum(used[: self.phases], axis=1, out=found[self.num_rows :])
        return found

    def _order(self, view: _View, column: int) -> Index:
        """The ranks of a column, in order."""
        if column >= self.sets.starts[-1]:
            return view.more[column - self.sets.starts[-1]]
        kind, at, count = self.sets.place_of(column)
        if kind == Kind.SPREAD:
            return view.order[:count]
        if kind == Kind.NODE:
            return view.nodes.order[at, :count]
        if kind == Kind.NODES:
            nodes = view.node_orders[at][:count, None]
            return np.asarray(nodes * self.local + np.arange(self.local)).ravel()
        return self.sets.listed(at) if kind == Kind.LISTED else np.array([at])

    def nodes_of(self, state: State) -> Nodes:
        """The nodes of a plan, brought up to date."""
        if state.nodes is None or (state.changed and self.num_nodes <= FEW_NODES):
            state.nodes, state.changed = self._nodes(state.used), []
        elif state.changed:
            at = np.unique(np.concatenate(state.changed))
            by_node = state.used.reshape(len(state.used), self.num_nodes, self.local)
            state.nodes.replace(at, self._nodes(by_node[:, at], at))
            state.changed = []
        return state.nodes

    def _nodes(self, used: Array, at: Index | None = None) -> Nodes:
        """Nodes number `at`, or all, whose ranks have `used`."""
        by_node = used.reshape(len(used), -1, self.local)
        phases = by_node[: self.phases]
        whole = np.concatenate([by_node.max(axis=2), phases.sum(axis=2)])
        squares = np.einsum("rnl,rnl->rn", phases, phases)
        if not self.sets.counts[Kind.NODE]:
            return Nodes(whole, squares, np.zeros((0, 0), dtype=np.intp), np.zeros((0, 0, 0)))
        order = phases.sum(axis=0).argsort(axis=1, kind="stable")
        here = self.local * np.arange(len(order))[:, None]
        first = self._first(by_node.reshape(len(used), -1).take((order + here).T, axis=1))  # of [R, L, N]
        return Nodes(whole, squares, order + (here if at is None else self.local * at[:, None]), first)

    def keep_only(self, worth: NDArray[np.bool_]) -> None:
        """Leaves all but these options out; a table of which none is worth it keeps its own."""
        starts = self.priced.starts
        per = np.diff(np.append(starts, len(worth)))
        self.worth = worth | ~np.repeat(np.logical_or.reduceat(worth, starts), per)

    def candidates(self, table: int, allowed: NDArray[np.bool_] | None = None) -> Candidates:
        """The candidates of a table: of its options that are worth it and allowed; of any if none of it is allowed."""
        first = int(self.priced.starts[table])
        span = slice(first, first + len(self.options[table]))
        kept = self.worth[span]
        return self.sets.candidates(
            table, kept & allowed[span] if allowed is not None and allowed[span].any() else kept
        )

    def _change(self, state: State, put: Put, sign: int) -> None:
        self.add(state.used, put, sign)
        state.changed.append(put.ranks // self.local)
        state.ms += sign * put.ms
        state.nbytes += sign * put.nbytes
        state.extra += sign * put.extra
        state.on += sign * ((put.flags & self.bit_values) > 0)

    def add(self, used: Array, put: Put, sign: int = 1) -> None:
        """Adds what a placement adds to the ranks, `sign` times."""
        own = put.own if sign > 0 else -put.own
        if put.distinct:
            used[:, put.ranks] += own
        else:  # a rank holds several rectangles
            np.add.at(used.T, put.ranks, own.T)
        self.add_to_nodes(used, put, sign)

    def add_to_nodes(self, used: Array, put: Put, sign: int = 1) -> None:
        """Adds what a placement adds to all ranks of its nodes, `sign` times."""
        if put.node is not None:
            nodes, added = put.node
            by_node = used.reshape(len(added), self.num_nodes, self.local)
            by_node[:, nodes if len(nodes) < self.num_nodes else slice(None)] += sign * added[:, :, None]

    def _squares(self, used: Array) -> Array:
        return np.asarray(np.einsum("rw,rw->r", used[: self.phases], used[: self.phases]))

    def _spread(self, squares: Array) -> Array:
        return np.asarray(np.sqrt(np.maximum(squares, 0.0) / self.num_ranks))


def _shards_of_a_node(option: Option, local: int) -> int:
    listed = option.proposal.assignments
    if listed is None:
        return min(len(option.of), local)
    return int(np.bincount(np.asarray(listed[0]) // local).max())
