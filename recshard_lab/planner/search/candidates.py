"""Every way to place a table, enumerated in one place for all solvers.

A candidate places the shards of an option on a set of ranks, the heaviest shard first, in turns (`dealt`). The option
decides the kind of set:

- `RANK`: one shard, on any rank (beyond `EACH_RANK` ranks, on the least busy rank of any node);
- `SPREAD`: several shards, on the least busy ranks of all;
- `NODE`: several shards of one node, under two hops, on the least busy ranks of any node;
- `NODES`: shards that fill nodes, under two hops, on the least busy nodes;
- `LISTED`: the assignments that the proposal lists.

A set is a column of an array: the peaks and sums of a plan over its ranks. The columns are laid out once per problem
(`RankSets` for one plan, `Orders` in `ways.py` for many), so that candidates are scored by taking columns.

Shape letters: W ranks, N nodes, L ranks of a node, Q columns, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.options import Option
from recshard_lab.planner.search.state import Index

EACH_RANK = 256  # ranks up to which one shard is tried on each


class Kind(IntEnum):
    """The kinds of sets of ranks."""

    RANK, SPREAD, NODE, NODES, LISTED = range(5)


def kinds_of(option: Option, num_ranks: int, local: int) -> tuple[Kind, ...]:
    """The kinds of sets that an option may be placed on.

    Args:
        num_ranks: ranks of all nodes; local: ranks of a node.
    """
    count, limited = len(option.of), len(option.usable) < num_ranks
    if option.proposal.assignments is not None:
        return (Kind.LISTED,)
    if not adds_to_nodes(option):
        return (Kind.RANK if count == 1 else Kind.SPREAD,)
    if count <= local:
        return (Kind.NODE, Kind.SPREAD) if limited and count > 1 else (Kind.NODE,)
    if limited:
        return (Kind.SPREAD,)
    return (Kind.NODES,) if count <= num_ranks else ()


def adds_to_nodes(option: Option) -> bool:
    """Whether an option adds to every rank of the nodes that it uses, by an amount known before it is placed.

    It does under two hops, if all shards have the same columns or the proposal lists the ranks.
    """
    rects = option.proposal.rects
    return option.route == "two_hop" and (option.proposal.assignments is not None or rects[0][1] == rects[-1][1])


def dealt(option: Option, order: Index) -> Index:
    """``[n]`` the rank of each shard: the heaviest on the first rank of `order`, and so on, in turns.

    A proposal that lists its ranks has them in the order of its shards.
    """
    if option.proposal.assignments is not None:
        return order
    ranks = np.empty(len(option.of), dtype=np.intp)
    ranks[option.heavy_first] = order[np.arange(len(option.of)) % len(order)]
    return ranks


@dataclass(frozen=True, eq=False)
class Candidates:
    """The ways to place one table.

    Attributes:
        option: ``[C]`` position among the table's options.
        column: ``[C]`` the set of ranks that get its shards.
        node_column: ``[H]`` the set of all ranks of their nodes, for the last H candidates, which add to all of them.
        spread: the candidates that are spread over the least busy ranks.
        sections: the sections of `RankSets.starts` that the columns are in.
        listed: for each such section of listed assignments: the section, the columns, their members (ranks, or nodes)
            end to end, and where those of each column begin.
        usable: the ranks allowed, None for all.
    """

    option: Index
    column: Index
    node_column: Index
    spread: Index
    sections: frozenset[int]
    listed: list[tuple[int, Index, Index, Index]]
    usable: Index | None


class RankSets:
    """The sets of ranks that the candidates of a problem use, for one plan at a time.

    Columns are, in this order: each rank; the first ranks by work; the first ranks of each node; the first nodes by
    work, and by each memory; listed assignments that fill nodes; other listed ones; the nodes of these; each node.

    Attributes:
        counts: of each kind, how many ranks (`NODES`: nodes) the sets in use have.
        last: these numbers less 1.
        starts: ``[9]`` the first column of each of these, and Q.
        num_nodes: ``[Q]`` how many nodes the ranks of a set cover, where that counts.
    """

    def __init__(self, options: Sequence[Sequence[Option]], num_ranks: int, local: int, memories: int) -> None:
        self.num_ranks, self.local = num_ranks, local
        nodes = num_ranks // local
        self.each_rank = num_ranks <= EACH_RANK
        self._types: dict[tuple[object, ...], int] = {}
        self._examples: list[Option] = []
        types = [tuple(self._type(option) for option in choices) for choices in options]
        self._kinds = list(dict.fromkeys(types))  # the types of the options of each kind of table
        number = {each: n for n, each in enumerate(self._kinds)}
        self._types_of = [number[each] for each in types]
        kinds = [kinds_of(option, num_ranks, local) for option in self._examples]
        sizes: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        for option, some in zip(self._examples, kinds, strict=True):
            for kind in some:
                sizes[kind].add(min(len(option.of), len(option.usable)))
        if not self.each_rank:
            sizes[Kind.NODE] |= sizes[Kind.RANK]
        self.counts = {kind: sorted(each) for kind, each in sizes.items()}
        self.counts[Kind.NODES] = sorted({-(-count // local) for count in sizes[Kind.NODES]})
        self.last = {kind: np.array(each, dtype=np.intp) - 1 for kind, each in self.counts.items()}
        lists = dict.fromkeys(ranks for option in self._examples for ranks in option.proposal.assignments or ())
        covered = {ranks: tuple(sorted({rank // local for rank in ranks})) for ranks in lists}
        whole = {ranks for ranks in lists if len(set(ranks)) == len(ranks) == len(covered[ranks]) * local}
        self._listed = sorted(lists, key=lambda ranks: ranks not in whole)
        other = self._listed[len(whole) :]
        self._members = (
            [covered[ranks] for ranks in self._listed[: len(whole)]],
            other,
            [covered[ranks] for ranks in other],
        )
        widths = [
            num_ranks if self.each_rank else 0,
            len(self.counts[Kind.SPREAD]),
            len(self.counts[Kind.NODE]) * nodes,
            len(self.counts[Kind.NODES]) * (1 + memories),
            *map(len, self._members),
            nodes,
        ]
        self.starts: list[int] = np.cumsum([0, *widths]).tolist()
        at = self.starts[4]
        self._column_of = {ranks: at + n for n, ranks in enumerate(self._listed)}
        self.num_nodes = np.ones(self.starts[-1])
        self.num_nodes[self.starts[3] : at] = np.tile(self.counts[Kind.NODES], 1 + memories)
        self.num_nodes[at : self.starts[7]] = [len(covered[ranks]) for ranks in (*self._listed, *other)]
        self._sets = [self._columns(option, some) for option, some in zip(self._examples, kinds, strict=True)]
        self._known: dict[tuple[int, bytes], Candidates] = {}

    def candidates(self, table: int, kept: NDArray[np.bool_]) -> Candidates:
        """The candidates of a table that keeps these options. Tables with alike options share them."""
        types = self._types_of[table]
        key = types, kept.tobytes()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._joined(
                [(at, self._kinds[types][at]) for at in np.flatnonzero(kept).tolist()]
            )
        return found

    def _joined(self, key: Sequence[tuple[int, int]]) -> Candidates:
        """The candidates of these options (position, type), those that add to their nodes last."""
        columns = [self._sets[kind][0] for _, kind in key] + [self._sets[kind][1] for _, kind in key]
        option = np.repeat([at for at, _ in key] * 2, [len(each) for each in columns])
        none = np.zeros(0, dtype=np.intp)
        nodes = np.concatenate([none, *(self._sets[kind][2] for _, kind in key)])
        usable = self._examples[key[0][1]].usable if key else ()
        limited = np.array(sorted(usable), dtype=np.intp) if 0 < len(usable) < self.num_ranks else None
        column = np.concatenate([none, *columns])
        spread = np.flatnonzero((column >= self.starts[1]) & (column < self.starts[2]))
        used = np.unique(np.append(column, nodes))
        section = np.searchsorted(self.starts, used, side="right") - 1
        listed = []
        for at in (4, 5, 6):
            mine = used[section == at]
            if mine.size:
                members = [self._members[at - 4][i] for i in (mine - self.starts[at]).tolist()]
                listed.append((at, mine, *_end_to_end(members)))
        return Candidates(option, column, nodes, spread, frozenset(section.tolist()), listed, limited)

    def _type(self, option: Option) -> int:
        """A number that options which are placed alike share."""
        key = len(option.of), adds_to_nodes(option), option.usable, id(option.proposal.assignments)
        found = self._types.setdefault(key, len(self._examples))
        if found == len(self._examples):
            self._examples.append(option)
        return found

    def _columns(self, option: Option, kinds: Sequence[Kind]) -> tuple[Index, Index, Index]:
        """The columns of an option's sets; of those whose nodes it adds to; and of these nodes."""
        none = np.zeros(0, dtype=np.intp)
        plain = around = within = none
        count, num_nodes = min(len(option.of), len(option.usable)), self.num_ranks // self.local
        for kind in kinds:
            if kind == Kind.RANK and self.each_rank:
                plain = np.array(sorted(option.usable))
            elif kind == Kind.SPREAD:
                plain = np.array([self.starts[1] + self.counts[kind].index(count)])
            elif kind == Kind.NODES:
                here = self.counts[kind].index(-(-count // self.local))
                within = around = np.arange(self.starts[3] + here, self.starts[4], len(self.counts[kind]))
            else:
                if kind == Kind.LISTED:
                    within = np.array([self._column_of[ranks] for ranks in option.proposal.assignments or ()])
                    around = within + (within >= self.starts[5]) * (self.starts[6] - self.starts[5])
                else:
                    first = self.starts[2] + self.counts[Kind.NODE].index(count) * num_nodes
                    within, around = np.arange(first, first + num_nodes), np.arange(self.starts[7], self.starts[8])
                if not adds_to_nodes(option):
                    plain, within, around = within, none, none
        return plain, within, around

    def place_of(self, column: int) -> tuple[Kind, int, int]:
        """What a column holds: its kind, the position in the order (rank, node, measure, assignment), and how many."""
        section = int(np.searchsorted(self.starts, column, side="right")) - 1
        kind = (Kind.RANK, Kind.SPREAD, Kind.NODE, Kind.NODES, Kind.LISTED, Kind.LISTED)[section]
        at = column - self.starts[4 if section == 5 else section]
        if kind == Kind.SPREAD:
            return kind, 0, self.counts[kind][at]
        if kind == Kind.NODE:
            count, node = divmod(at, self.num_ranks // self.local)
            return kind, node, self.counts[kind][count]
        if kind == Kind.NODES:
            measure, count = divmod(at, len(self.counts[kind]))
            return kind, measure, self.counts[kind][count]
        return kind, at, 1

    def listed(self, at: int) -> Index:
        """The ranks of listed assignment number `at`."""
        return np.array(self._listed[at], dtype=np.intp)


def _end_to_end(lists: Sequence[Sequence[int]]) -> tuple[Index, Index]:
    """The members of all lists, and where each list begins."""
    sizes = [0, *(len(each) for each in lists)]
    flat = [np.asarray(each, dtype=np.intp) for each in lists]
    return np.concatenate(flat), np.cumsum(sizes)[:-1].astype(np.intp)
