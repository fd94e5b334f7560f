"""A planning problem in the terms of its cost model, and every way to place one table in a plan.

All ways to place a table are scored in a few array operations. A shard adds at most the column ``own [R]`` of its
option to its rank. Under two hops, an option also adds ``on_node [R]`` to every rank of each node that it uses. The
ways come in five kinds, each with the ranks that it uses:

- one shard: any rank (beyond `EACH_RANK` ranks, the least busy rank of each node);
- several shards: the least busy ranks of all;
- several shards of one node, under two hops: the least busy ranks of any node;
- shards that fill nodes, under two hops: the least busy nodes;
- listed assignments: as they are.

Shape letters: R rows (P phases that ranks differ in, then M memories: the device's, and the host's if a shard may be
there), W ranks, N nodes, L ranks of a node, C ways, O options.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.search.bounds import Priced, price
from recshard_lab.planner.search.options import Option, Placement
from recshard_lab.planner.search.state import Choices, Groups, Index, Nodes, Put, State
from recshard_lab.planner.workload import Array

EACH_RANK = 256  # ranks up to which one shard is tried on each
MEMORY_FIRST = 1e6  # ms: a full memory, while memory counts more than the step
FILLING = {1: [[1.0]], 2: [[1.0, 1.0], [1e-3, 1.0], [1.0, 1e-3]]}
"""By the number of memories, how tables are placed by size: weights of the fullest rank's share of each."""


class _Ways(NamedTuple):
    """Ways to place a table: their options, their scores, and a function from a way's number to its ranks."""

    of: Index
    scores: Array
    ranks: Callable[[int], Index]


class _Beside(NamedTuple):
    """What a table is placed beside: what every score of its ways needs."""

    state: State
    nodes: Nodes
    top: Array
    squares: Array
    shared: Array
    held: Array
    room: Array
    memory_first: Array | None


class Problem:
    """Tables with their options, scored by the terms of a cost model.

    Attributes:
        phases: P; num_rows: R.
        capacity: ``[M]`` bytes of each memory that a rank has for tables.

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
        self.memory_first = MEMORY_FIRST * np.array(FILLING[len(self.capacity)])
        switches = self.terms.switches
        count = len(switches)
        bits = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
        self.paid: Array = bits @ np.array([switch.fixed[:-1].sum() for switch in switches])
        self.extra_on: Array = bits[:, self.priced.extra_switches].astype(float)  # [2 ** S, X]
        self.bit_values = 1 << np.arange(count)
        self.fixed_ms = float(self.terms.fixed[:-1].sum())
        self.own, self.on_node = self._own_and_on_node()
        self._groups: dict[tuple[int, ...], Groups] = {}
        self._listed: dict[int, tuple[Groups, bool]] = {}
        self.choices = [self._choices(table, range(len(choices))) for table, choices in enumerate(options)]
        least = np.minimum.reduceat(self.priced.cost, self.priced.starts)
        self.by_work: list[int] = np.argsort(-least, kind="stable").tolist()
        self.packs = any(choices.packed.size for choices in self.choices)
        need = np.minimum.reduceat(self.priced.total_bytes.sum(axis=0), self.priced.starts)
        self.by_bytes: list[int] = np.argsort(-need, kind="stable").tolist()

    def _own_and_on_node(self) -> tuple[Array, Array]:
        """``[O, R]`` each: what a shard adds to its rank, and what an option adds to every rank of each node it uses.

        Shards whose nodes are not known yet count as `Priced.heaviest`, which is the least that they add.
        """
        own, flat = self.priced.heaviest.copy(), [option for choices in self.options for option in choices]
        on_node = np.zeros_like(own)
        hops = [i for i, option in enumerate(flat) if option.route == "two_hop" and _by_node(option)]
        self.together = dict(zip(hops, (_shards_of_a_node(flat[i], self.local) for i in hops), strict=True))
        self.node_kinds: dict[int, Array] = {}
        if hops:
            kinds = np.concatenate([flat[i].kinds for i in hops], axis=1)
            first = np.cumsum([0, *(flat[i].kinds.shape[1] for i in hops)])
            node = self.priced.per_node @ kinds
            own[hops] = np.maximum.reduceat(self.priced.per_own @ kinds, first[:-1], axis=1).T
            on_node[hops] = (np.maximum.reduceat(node, first[:-1], axis=1) * list(self.together.values())).T
            self.node_kinds = {i: node[:, first[n] : first[n + 1]] for n, i in enumerate(hops)}
        return own, on_node

    def start(self, allowed: NDArray[np.bool_] | None = None, floor: Array | None = None) -> State:
        """A plan with nothing placed."""
        width = len(self.priced.extra_switches)
        used: Array = np.zeros((self.num_rows, self.num_ranks))
        none = np.zeros(len(self.terms.switches), dtype=np.intp)
        nbytes = np.zeros(len(self.capacity))
        return State([None] * len(self.options), used, np.zeros(width), none, nbytes, allowed=allowed, floor=floor)

    def score(self, state: State) -> float:
        """Milliseconds of a plan, plus a little for imbalance and total work."""
        return self.step_ms(state) + state.balance * float(self._spread(self._squares(state)).sum())

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
        option, index = self.options[table][at], self.choices[table].first + at
        chosen = np.asarray(ranks, dtype=np.intp)
        priced = self.priced
        placement = Placement(option, tuple(chosen.tolist()))
        if option.route != "two_hop":
            own = priced.own_of(index)[:, option.of]
            shared = priced.shared_ms[index], priced.shared_bytes[:, index]
            return Put(
                placement, at, chosen, own, None, option.distinct, *shared, priced.extra[index], self._flags(index)
            )
        nodes, of_shard, counts = np.unique(chosen // self.local, return_inverse=True, return_counts=True)
        shared_ms, shared_bytes = float(priced.shared_ms[index]), priced.shared_bytes[:, index]
        if (counts == self.together.get(index, 0)).all():  # as many shards on each node as `Option.kinds` assumes
            own, by_shard = priced.own_of(index)[:, option.of], self.node_kinds[index][:, option.of]
        else:
            loads = option.placed_loads(chosen.tolist(), self.model.topology)
            own, by_shard = priced.per_own @ loads, priced.per_node @ loads
            everyone = self.terms.everyone @ loads.sum(axis=1)
            shared_ms, shared_bytes = float(everyone[:-1].sum()), np.zeros(len(self.capacity))
            shared_bytes[0] = everyone[-1]
        added: Array = np.zeros((len(own), len(nodes)))
        np.add.at(added.T, of_shard, by_shard.T)
        return Put(
            placement,
            at,
            chosen,
            own,
            (nodes, added),
            option.distinct,
            shared_ms,
            shared_bytes,
            priced.extra[index],
            self._flags(index),
        )

    def best(
        self, state: State, table: int, memory_first: Array | None = None, allowed: NDArray[np.bool_] | None = None
    ) -> tuple[float, Put] | None:
        """The best way to place `table` beside what is placed, and its score; None where it does not fit.

        Args:
            memory_first: ``[M]`` weights of the fullest rank's share of each memory, before the step counts.
        """
        choices, priced = self.choices[table], self.priced
        span = slice(choices.first, choices.first + len(self.options[table]))
        nodes = self.nodes_of(state)
        most = nodes.peak.max(axis=1)
        top = most[: self.phases] if state.floor is None else np.maximum(most[: self.phases], state.floor)
        bits = int(self.bit_values @ (state.on > 0)) | priced.flags[span]
        shared = state.ms + priced.shared_ms[span] + self.paid[bits] + self.fixed_ms
        if state.extra.size:
            shared = shared + (self.extra_on[bits] * (state.extra + priced.extra[span])).sum(axis=1)
        if state.floor is not None:
            shared = shared + priced.over[span]
        room = (self.capacity - state.nbytes)[:, None] - priced.shared_bytes[:, span]
        allowed = state.allowed if allowed is None else allowed
        if allowed is not None:
            mine = allowed[span]
            room = np.where(mine, room, -np.inf) if mine.any() else room
        held = most[self.phases :]
        beside = _Beside(state, nodes, top, nodes.squares.sum(axis=1), shared, held, room, memory_first)
        ways = self._ways(choices, beside)
        flat = np.concatenate([kind.scores for kind in ways])
        best, best_score = None, np.inf
        while flat[c := int(flat.argmin())] < best_score:  # scores of two hops may be optimistic: others may be better
            put = self._put(table, ways, c)
            over = 0.0 if state.floor is None else float(priced.over[choices.first + put.at])
            score = float(flat[c]) if put.node is None else self._score_with(put, beside, over)
            if score < best_score:
                best, best_score = put, score
            flat[c] = np.inf
        return None if best is None else (best_score, best)

    def _score_with(self, put: Put, beside: _Beside, over: float) -> float:
        """The exact score of a plan with `put` added; infinite if it does not fit."""
        state, nodes = beside.state, beside.nodes
        assert put.node is not None
        at, added = put.node
        block = state.used.reshape(len(added), self.num_nodes, self.local)[:, at] + added[:, :, None]
        place = np.searchsorted(at, put.ranks // self.local), put.ranks % self.local
        if put.distinct:
            block[:, *place] += put.own
        else:
            np.add.at(block.transpose(1, 2, 0), place, put.own.T)
        peak = nodes.peak.copy()
        peak[:, at] = block.max(axis=2)
        most, phases = peak.max(axis=1), block[: self.phases]
        squares = beside.squares - nodes.squares[:, at].sum(axis=1) + np.einsum("rnl,rnl->r", phases, phases)
        bits = int(self.bit_values @ (state.on > 0)) | put.flags
        shared = state.ms + put.ms + self.paid[bits] + self.fixed_ms + over
        shared += float(self.extra_on[bits] @ (state.extra + put.extra))
        score = np.maximum(most[: self.phases], beside.top).sum() + shared
        score += state.balance * self._spread(squares).sum()
        room = self.capacity - state.nbytes - put.nbytes
        return float(self._in_room(score[None], most[self.phases :, None], room[:, None], beside)[0])

    def _in_room(self, scores: Array, held: Array, room: Array, beside: _Beside) -> Array:
        """Scores ``[...]`` with what memory costs, changed in place; infinite where it is short.

        Args:
            held: ``[M, ...]`` bytes of the ranks that get a shard; room: those that each rank has.
        """
        for at, most in enumerate(beside.held):
            fullest = np.maximum(held[at], most)
            if beside.memory_first is not None:
                scores += beside.memory_first[at] * fullest / max(1.0, float(self.capacity[at]))
            scores[fullest > room[at]] = np.inf
        return scores

    def _ways(self, choices: Choices, beside: _Beside) -> list[_Ways]:
        """All ways to place a table, by kind."""
        found: list[_Ways] = []
        used = beside.state.used
        if choices.single.size:
            found.append(self._one_shard(choices, beside))
        if choices.spread.size:
            found.append(self._spread_out(choices, beside))
        if not (choices.packed.size or choices.wide.size or choices.nodes is not None or choices.ranks is not None):
            return found
        nodes = beside.nodes
        if choices.packed.size:
            found.append(self._on_one_node(choices, beside, nodes))
        if choices.wide.size:
            found.append(self._on_whole_nodes(choices, beside, nodes))
        for groups, by_rank in ((choices.nodes, False), (choices.ranks, True)):
            if groups is None:
                continue
            peaks = np.maximum.reduceat(nodes.peak[:, groups.nodes], groups.node_starts, axis=1)[:, groups.way]
            sums = np.add.reduceat(nodes.total[:, groups.nodes], groups.node_starts, axis=1)[:, groups.way]
            rest = peaks, sums
            if by_rank:
                gathered = used[:, groups.ranks]
                peaks = np.maximum.reduceat(gathered, groups.starts, axis=1)[:, groups.way]
                sums = np.add.reduceat(gathered[: self.phases], groups.starts, axis=1)[:, groups.way]
            sizes, counts = groups.sizes[groups.way], groups.num_nodes[groups.way]
            scores = self._scored(choices, beside, groups.of, peaks, sums, sizes, (*rest, counts))
            found.append(_Ways(groups.of, scores, groups.ranks_of))
        return found

    def nodes_of(self, state: State) -> Nodes:
        """The nodes of a plan, brought up to date."""
        if state.nodes is None:
            state.nodes, state.changed = self._nodes(state.used), []
        elif state.changed:
            at = np.unique(np.concatenate(state.changed))
            by_node = state.used.reshape(len(state.used), self.num_nodes, self.local)
            state.nodes.replace(at, self._nodes(by_node[:, at], at))
            state.changed = []
        return state.nodes

    def _nodes(self, used: Array, at: Index | None = None, barred: Array | None = None) -> Nodes:
        """Nodes number `at`, or all, whose ranks have `used`; `barred` ``[N, L]``: infinite for ranks to come last."""
        by_node = used.reshape(len(used), -1, self.local)
        phases = by_node[: self.phases]
        peak, total, squares = by_node.max(axis=2), phases.sum(axis=2), np.einsum("rnl,rnl->rn", phases, phases)
        if not self.packs:
            none = np.zeros((0, 0, 0))
            return Nodes(peak, total, squares, np.zeros((0, 0), dtype=np.intp), none, none)
        work = phases.sum(axis=0)
        order = (work if barred is None else work + barred).argsort(axis=1, kind="stable")
        in_order = np.take_along_axis(by_node, order[None], axis=2)
        first = self.local * (np.arange(self.num_nodes) if at is None else at)[:, None]
        peaks, totals = np.maximum.accumulate(in_order, axis=2), np.cumsum(in_order[: self.phases], axis=2)
        return Nodes(peak, total, squares, order + first, peaks, totals)

    def _one_shard(self, choices: Choices, beside: _Beside) -> _Ways:
        """One shard on every rank."""
        used, of, count = beside.state.used, choices.single, self.phases
        mine = self.own[choices.first + of][:, :, None]
        new = used + mine  # [singles, R, W]
        score = np.maximum(new[:, :count], beside.top[:, None]).sum(axis=1) + beside.shared[of][:, None]
        gained = mine[:, :count] * (2 * used[:count] + mine[:, :count])
        score += beside.state.balance * np.sqrt((beside.squares[:, None] + gained) / self.num_ranks).sum(axis=1)
        self._in_room(score, new[:, count:].swapaxes(0, 1), beside.room[:, of, None], beside)
        if choices.usable is not None:
            outside = np.ones(self.num_ranks, dtype=bool)
            outside[choices.usable] = False
            score[:, outside] = np.inf
        ranks = self.num_ranks
        return _Ways(np.repeat(of, ranks), score.ravel(), lambda c: np.array([c % ranks]))

    def _spread_out(self, choices: Choices, beside: _Beside) -> _Ways:
        """Several shards on the least busy ranks; where memory is short, on those with room, and on the emptiest."""
        used, pieces, room = beside.state.used, choices.pieces, beside.room[:, choices.spread]
        order = used[: self.phases].sum(axis=0).argsort(kind="stable")
        if choices.usable is not None:
            order = order[np.isin(order, choices.usable)]
        at = np.minimum(pieces, len(order)) - 1
        in_order = used[:, order]
        peaks, sums = np.maximum.accumulate(in_order, axis=1)[:, at], np.cumsum(in_order[: self.phases], axis=1)[:, at]
        orders, of = [order] * len(at), choices.spread
        added = self.own[choices.first + of, self.phases :].T * -(-pieces // len(order))
        full = (peaks[self.phases :] + added > room) & (room > 0)
        if full.any():
            held = in_order[self.phases :]
            emptiest = [order[one.argsort(kind="stable")] for one in held]
            tried = [
                (i, other)
                for memory, i in zip(*(places.tolist() for places in full.nonzero()), strict=True)
                for other in (order[(held + added[:, i, None] <= room[:, i, None]).all(axis=0)], emptiest[memory])
                if len(other) > at[i]
            ]
            chosen = [used[:, other[: pieces[i]]] for i, other in tried]
            peaks = np.concatenate([peaks, *(one.max(axis=1, keepdims=True) for one in chosen)], axis=1)
            sums = np.concatenate([sums, *(one[: self.phases].sum(axis=1, keepdims=True) for one in chosen)], axis=1)
            numbers = np.array([i for i, _ in tried], dtype=np.intp)
            of, pieces = np.append(of, of[numbers]), np.append(pieces, pieces[numbers])
            orders += [other for _, other in tried]
        scores = self._scored(choices, beside, of, peaks, sums, pieces.astype(float))
        return _Ways(of, scores, lambda c: orders[c])

    def _on_one_node(self, choices: Choices, beside: _Beside, nodes: Nodes) -> _Ways:
        """Several shards, or one, on the least busy ranks of every node."""
        if choices.usable is not None:
            barred = np.full(self.num_ranks, np.inf)
            barred[choices.usable] = 0.0
            nodes = self._nodes(beside.state.used, barred=barred.reshape(self.num_nodes, self.local))
        last, count = choices.packed_pieces - 1, len(choices.packed)
        of, pieces = np.tile(choices.packed, self.num_nodes), np.tile(choices.packed_pieces, self.num_nodes)
        rows = len(nodes.peak)
        peaks, sums = nodes.peaks[:, :, last].reshape(rows, -1), nodes.totals[:, :, last].reshape(self.phases, -1)
        rest = np.repeat(nodes.peak, count, axis=1), np.repeat(nodes.total, count, axis=1), np.ones(1)
        scores = self._scored(choices, beside, of, peaks, sums, pieces.astype(float), rest)
        if choices.usable is not None:
            many = np.bincount(choices.usable // self.local, minlength=self.num_nodes)
            scores[np.repeat(many, count) < pieces] = np.inf
        return _Ways(of, scores, lambda c: nodes.order[c // count, : pieces[c]])

    def _on_whole_nodes(self, choices: Choices, beside: _Beside, nodes: Nodes) -> _Ways:
        """Shards that fill the least busy nodes; and, where memory is short, the emptiest."""
        of, pieces, counts = choices.wide, choices.wide_pieces, -(-choices.wide_pieces // self.local)
        orders = [nodes.total.sum(axis=0).argsort(kind="stable")]
        short = np.flatnonzero(beside.held > 0.5 * self.capacity).tolist()
        orders += [nodes.peak[self.phases + at].argsort(kind="stable") for at in short]
        every, scores = np.arange(self.num_ranks).reshape(self.num_nodes, self.local), []
        for order in orders:
            peaks = np.maximum.accumulate(nodes.peak[:, order], axis=1)[:, counts - 1]
            sums = np.cumsum(nodes.total[:, order], axis=1)[:, counts - 1]
            scores.append(self._scored(choices, beside, of, peaks, sums, pieces.astype(float), (peaks, sums, counts)))
        many = len(of)
        return _Ways(np.tile(of, len(orders)), np.concatenate(scores), lambda c: every[orders[c // many]].ravel())

    def _scored(
        self,
        choices: Choices,
        beside: _Beside,
        of: Index,
        peaks: Array,
        sums: Array,
        pieces: Array,
        rest: tuple[Array, Array, Array | Index] | None = None,
    ) -> Array:
        """``[C]`` scores of ways of several shards.

        Args:
            of: ``[C]`` options.
            peaks, sums: ``[R, C]`` and ``[P, C]`` of the ranks that get a shard; pieces: ``[C]`` the shards.
            rest: `peaks` and `sums` of all ranks of their nodes, and how many nodes these are.
        """
        mine = self.own[choices.first + of].T  # [R, C]
        if pieces.max() > self.num_ranks:
            mine = mine * np.maximum(1.0, np.ceil(pieces / self.num_ranks))
        new, phases = peaks + mine, mine[: self.phases]
        gained = phases * (2 * sums + pieces * phases)
        if rest is not None:
            on_node = self.on_node[choices.first + of].T
            new = np.maximum(new, rest[0]) + on_node
            on_node = on_node[: self.phases]
            gained += on_node * (2 * rest[1] + (self.local * rest[2]) * on_node + (2 * pieces) * phases)
        score = np.maximum(new[: self.phases], beside.top[:, None]).sum(axis=0) + beside.shared[of]
        score += beside.state.balance * np.sqrt((beside.squares[:, None] + gained) / self.num_ranks).sum(axis=0)
        return self._in_room(score, new[self.phases :], beside.room[:, of], beside)

    def _put(self, table: int, ways: list[_Ways], c: int) -> Put:
        """Way number `c` of all."""
        for kind in ways:
            if c < len(kind.scores):
                break
            c -= len(kind.scores)
        at, order = int(kind.of[c]), kind.ranks(c)
        option = self.options[table][at]
        if option.proposal.assignments is not None:
            return self.made(table, at, order)
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
        listed = [i for i in kept if options[i].proposal.assignments is not None]
        usable = options[0].usable
        limited = len(usable) < self.num_ranks
        single, spread, packed, wide = list[int](), list[int](), list[int](), list[int]()
        for i in free:
            option = options[i]
            count, hops = len(option.of), option.route == "two_hop" and _by_node(option)
            if count == 1 and not hops:
                (single if self.num_ranks <= EACH_RANK else packed).append(i)
            elif hops and count <= self.local:
                packed.append(i)
            elif hops and not limited and count <= self.num_ranks:
                wide.append(i)
            if count > 1 and (not hops or limited):
                spread.append(i)

        def of(chosen: list[int]) -> tuple[Index, Index]:
            return np.array(chosen, dtype=np.intp), np.array([len(options[i].of) for i in chosen], dtype=np.intp)

        first = int(self.priced.starts[table])
        where = np.array(sorted(usable), dtype=np.intp) if limited else None
        return Choices(first, of(single)[0], *of(spread), *of(packed), *of(wide), *self._grouped(table, listed), where)

    def _grouped(self, table: int, listed: list[int]) -> tuple[Groups | None, Groups | None]:
        """Listed assignments end to end: those that fill their nodes, and the others."""
        found: list[Groups | None] = []
        flat = [(i, *self._flat(self.options[table][i].proposal.assignments or ())) for i in listed]
        for whole in (True, False):
            chosen = [(i, groups) for i, groups, fills in flat if fills == whole]
            key = (int(whole), *(x for i, groups in chosen for x in (i, id(groups))))
            if chosen and key not in self._groups:
                self._groups[key] = _joined(chosen)
            found.append(self._groups[key] if chosen else None)
        return found[0], found[1]

    def _flat(self, ways: tuple[tuple[int, ...], ...]) -> tuple[Groups, bool]:
        """Listed assignments, and whether they fill their nodes; schemes give all tables the same ones."""
        if id(ways) not in self._listed:
            nodes = [sorted({rank // self.local for rank in ranks}) for ranks in ways]
            whole = all(
                len(ranks) == len(set(ranks)) == len(at) * self.local for ranks, at in zip(ways, nodes, strict=True)
            )
            groups = Groups.of_lists(ways, nodes)
            self._listed[id(ways)] = groups, whole
        return self._listed[id(ways)]

    def _flags(self, index: int) -> int:
        return int(self.priced.flags[index])

    def _change(self, state: State, put: Put, sign: int) -> None:
        own = put.own if sign > 0 else -put.own
        state.changed.append(put.ranks // self.local)
        if put.distinct:
            state.used[:, put.ranks] += own
        else:  # a rank holds several rectangles
            for i, rank in enumerate(put.ranks):
                state.used[:, rank] += own[:, i]
        if put.node is not None:
            nodes, added = put.node
            state.used.reshape(len(added), self.num_nodes, self.local)[:, nodes] += sign * added[:, :, None]
        state.ms += sign * put.ms
        state.nbytes += sign * put.nbytes
        state.extra += sign * put.extra
        state.on += sign * ((put.flags & self.bit_values) > 0)

    def _squares(self, state: State) -> Array:
        return np.asarray(np.einsum("rw,rw->r", state.used[: self.phases], state.used[: self.phases]))

    def _spread(self, squares: Array) -> Array:
        return np.asarray(np.sqrt(np.maximum(squares, 0.0) / self.num_ranks))


def _by_node(option: Option) -> bool:
    """Whether what an option adds to the nodes that it uses is known before it is placed: it is cut by rows alone."""
    rects = option.proposal.rects
    return option.proposal.assignments is not None or rects[0][1] == rects[-1][1]


def _shards_of_a_node(option: Option, local: int) -> int:
    listed = option.proposal.assignments
    if listed is None:
        return min(len(option.of), local)
    return int(np.bincount(np.asarray(listed[0]) // local).max())


def _joined(chosen: Sequence[tuple[int, Groups]]) -> Groups:
    """The assignments of several options, each list once."""
    lists = {id(groups): groups for _, groups in chosen}
    before = dict(zip(lists, accumulate((len(each.starts) for each in lists.values()), initial=0), strict=False))
    joined = Groups.joined(list(lists.values()))
    of = np.concatenate([np.full(len(groups.starts), i, dtype=np.intp) for i, groups in chosen])
    way = np.concatenate([before[id(groups)] + np.arange(len(groups.starts)) for _, groups in chosen])
    return replace(joined, of=of, way=way)
