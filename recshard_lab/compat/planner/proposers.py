"""Proposes one option per table: greedily, one scheme for all, all combinations, or by dynamic programming."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import ceil, inf, prod

from recshard_lab.compat.planner.base import Enumerator, Proposer
from recshard_lab.compat.planner.costs import Storage
from recshard_lab.compat.planner.options import ShardingOption
from recshard_lab.compat.planner.topology import Topology

MAX_PROPOSALS = 10_000


def sorted_options(search_space: Sequence[ShardingOption], use_depth: bool) -> dict[str, list[ShardingOption]]:
    """Path of each table -> its options, the fastest first.

    Args:
        use_depth: whether an option's time is its slowest shard's, otherwise the sum over its shards.
    """

    def time(option: ShardingOption) -> float:
        times = [0.0 if shard.perf is None else shard.perf.total for shard in option.shards]
        return max(times, default=0.0) if use_depth else sum(times)

    grouped: dict[str, list[ShardingOption]] = {}
    for option in search_space:
        grouped.setdefault(option.fqn, []).append(option)
    return {fqn: sorted(options, key=time) for fqn, options in grouped.items()}


class GreedyProposer(Proposer):
    """Starts with the fastest option of every table, then moves the table with the largest shard to its next option.

    Args:
        use_depth: whether an option's time is its slowest shard's, otherwise the sum over its shards.
        threshold: stop after more than this many consecutive ratings above the best one. Default, and 0: never.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold
        self.load([])

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes the options."""
        self._options = sorted_options(search_space, self._use_depth)
        self._at: dict[str, int] | None = dict.fromkeys(self._options, 0)
        self._best, self._worse = inf, 0

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None at the end."""
        if self._at is None:
            return None
        return [self._options[fqn][index] for fqn, index in self._at.items()]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Moves to the next proposal."""
        if self._at is None:
            return
        if self._threshold and perf_rating:
            better = perf_rating < self._best
            self._best, self._worse = min(self._best, perf_rating), 0 if better else self._worse + 1
            if self._worse > self._threshold:
                self._at = None
                return
        movable = [fqn for fqn, index in self._at.items() if index + 1 < len(self._options[fqn])]
        if not movable:
            self._at = None
            return
        at = self._at
        largest = max(movable, key=lambda fqn: _largest_shard(self._options[fqn][at[fqn]]))
        self._at[largest] += 1


def _largest_shard(option: ShardingOption) -> Storage:
    return max((shard.storage or Storage(0, 0) for shard in option.shards), default=Storage(0, 0))


class UniformProposer(Proposer):
    """Proposes one plan for each scheme that every table has, with the fastest option of each table.

    Args:
        use_depth: as of `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth
        self.load([])

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes the options."""
        options = sorted_options(search_space, self._use_depth)
        self._proposals: list[list[ShardingOption]] = []
        self._index = 0
        for scheme in dict.fromkeys(option.sharding_type for option in search_space):
            first = [next((o for o in own if o.sharding_type == scheme), None) for own in options.values()]
            plan = [option for option in first if option is not None]
            if len(plan) == len(options):
                self._proposals.append(plan)

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None at the end."""
        return self._proposals[self._index] if self._index < len(self._proposals) else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Moves to the next scheme."""
        self._index += 1


class GridSearchProposer(Proposer):
    """Proposes all combinations of options, if there are few enough; otherwise none.

    Args:
        max_proposals: combinations at most.
    """

    def __init__(self, max_proposals: int = MAX_PROPOSALS) -> None:
        self._max_proposals = max_proposals
        self.load([])

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes the options."""
        options = list(sorted_options(search_space, use_depth=True).values())
        few = bool(options) and prod(map(len, options)) <= self._max_proposals
        self._combinations: Iterator[tuple[ShardingOption, ...]] = itertools.product(*options) if few else iter(())
        self._current = next(self._combinations, None)

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None at the end."""
        return None if self._current is None else list(self._current)

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Moves to the next combination."""
        self._current = next(self._combinations, None)


class DynamicProgrammingProposer(Proposer):
    """Proposes the fastest options for every amount of device memory in total, from the largest amount down.

    The memory is divided into bins. For T tables, N options and M bins it takes ``O(T N M)`` steps: the fastest choice
    for the first t tables in exactly m bins follows from those for t - 1 tables. The first proposal needs the least
    memory; its feedback has the capacity.

    Args:
        hbm_bins_per_device: bins for each device.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins_per_device = max(hbm_bins_per_device, 1)
        self.load([])

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes the options."""
        grouped: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            grouped.setdefault(option.fqn, []).append(option)
        self._options = sorted(grouped.values(), key=lambda own: min(o.total_storage.hbm for o in own))
        self._proposals: list[list[ShardingOption]] = []
        if self._options:
            self._proposals.append([min(own, key=lambda o: o.total_storage.hbm) for own in self._options])
        self._index, self._planned = 0, False

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None at the end."""
        return self._proposals[self._index] if self._index < len(self._proposals) else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Moves to the next proposal. The first feedback needs `storage_constraint`, the free devices.

        Raises:
            AssertionError: the first feedback lacks it.
        """
        self._index += 1
        if not self._planned:
            if storage_constraint is None:
                raise AssertionError("feedback has no storage_constraint. Fix: pass the topology of the free devices")
            self._planned = True
            self._proposals += self._by_memory(storage_constraint)

    def _by_memory(self, topology: Topology) -> list[list[ShardingOption]]:
        bins = self._bins_per_device * len(topology.devices)
        width = sum(device.storage.hbm for device in topology.devices) / bins
        if width <= 0:
            return []
        least: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for own in self._options:
            grown: dict[int, tuple[float, tuple[int, ...]]] = {}
            for used, (total, chosen) in least.items():
                for number, option in enumerate(own):
                    filled = used + ceil(option.total_storage.hbm / width)
                    time = total + option.total_perf
                    if filled <= bins and time < grown.get(filled, (inf,))[0]:
                        grown[filled] = (time, (*chosen, number))
            least = grown
        return [
            [own[number] for own, number in zip(self._options, least[used][1], strict=True)]
            for used in sorted(least, reverse=True)
        ]


def proposers_to_proposals_list(
    proposers_list: list[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """All distinct proposals of proposers that do not depend on ratings.

    Args:
        proposers_list: each is loaded and asked until it proposes nothing. search_space: the options.
    """
    found: list[list[ShardingOption]] = []
    seen: set[tuple[int, ...]] = set()
    for proposer in proposers_list:
        proposer.load(search_space)
        while (proposal := proposer.propose()) is not None:
            key = tuple(sorted(map(hash, proposal)))
            if key not in seen:
                seen.add(key)
                found.append(proposal)
            proposer.feedback(partitionable=True, plan=proposal, perf_rating=0.0)
    return found
