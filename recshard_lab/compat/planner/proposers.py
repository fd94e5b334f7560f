"""Proposes one option per table: greedily, one scheme for all, all combinations, or by dynamic programming."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Any

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


@dataclass(frozen=True)
class Feedback:
    """The result of a proposal: whether it fits, its rating, and the free devices. Fields as of `Proposer.feedback`."""

    partitionable: bool
    perf_rating: float | None
    storage_constraint: Topology | None


Proposals = Generator[list[ShardingOption] | None, Feedback, None]


class SteppedProposer(Proposer):
    """A proposer whose proposals a generator yields; it receives the `Feedback` on each. A copy begins anew."""

    _loaded: tuple[list[ShardingOption], Enumerator | None] = ([], None)
    _run: Proposals | None = None
    _current: list[ShardingOption] | None = None

    @abstractmethod
    def _proposals(self, search_space: list[ShardingOption], enumerator: Enumerator | None) -> Proposals:
        """The proposals for these options."""

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes the options, and the enumerator that estimates changed ones."""
        self._loaded, self._run = (search_space, enumerator), None

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None at the end."""
        if self._run is None:
            self._run = self._proposals(*self._loaded)
            self._current = next(self._run, None)
        return self._current

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Moves to the next proposal."""
        if self.propose() is None or self._run is None:
            return
        self._current = None
        with suppress(StopIteration):
            self._current = self._run.send(Feedback(partitionable, perf_rating, storage_constraint))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}


class GreedyProposer(SteppedProposer):
    """Starts with the fastest option of every table, then moves the table with the largest shard to its next option.

    Args:
        use_depth: whether an option's time is its slowest shard's, otherwise the sum over its shards.
        threshold: stop after more than this many consecutive ratings above the best one. Default, and 0: never.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold

    def _proposals(self, search_space: list[ShardingOption], enumerator: Enumerator | None) -> Proposals:
        options = sorted_options(search_space, self._use_depth)
        at, best, worse = dict.fromkeys(options, 0), inf, 0
        while True:
            rating = (yield [options[fqn][index] for fqn, index in at.items()]).perf_rating
            if self._threshold and rating:
                best, worse = min(best, rating), 0 if rating < best else worse + 1
                if worse > self._threshold:
                    return
            movable = [fqn for fqn, index in at.items() if index + 1 < len(options[fqn])]
            if not movable:
                return
            at[max(movable, key=lambda fqn: _largest_shard(options[fqn][at[fqn]]))] += 1


def _largest_shard(option: ShardingOption) -> Storage:
    return max((shard.storage or Storage(0, 0) for shard in option.shards), default=Storage(0, 0))


class UniformProposer(SteppedProposer):
    """Proposes one plan for each scheme that every table has, with the fastest option of each table.

    Args:
        use_depth: as of `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def _proposals(self, search_space: list[ShardingOption], enumerator: Enumerator | None) -> Proposals:
        options = sorted_options(search_space, self._use_depth)
        for scheme in dict.fromkeys(option.sharding_type for option in search_space):
            first = [next((o for o in own if o.sharding_type == scheme), None) for own in options.values()]
            plan = [option for option in first if option is not None]
            if len(plan) == len(options):
                yield plan


class GridSearchProposer(SteppedProposer):
    """Proposes all combinations of options, if there are few enough; otherwise none.

    Args:
        max_proposals: combinations at most.
    """

    def __init__(self, max_proposals: int = MAX_PROPOSALS) -> None:
        self._max_proposals = max_proposals

    def _proposals(self, search_space: list[ShardingOption], enumerator: Enumerator | None) -> Proposals:
        options = list(sorted_options(search_space, use_depth=True).values())
        if options and prod(map(len, options)) <= self._max_proposals:
            for chosen in itertools.product(*options):
                yield list(chosen)


class DynamicProgrammingProposer(SteppedProposer):
    """Proposes the fastest options for every amount of device memory in total, from the largest amount down.

    The memory is divided into bins. For T tables, N options and M bins it takes ``O(T N M)`` steps: the fastest choice
    for the first t tables in exactly m bins follows from those for t - 1 tables. The first proposal needs the least
    memory; its feedback needs `storage_constraint`, the free devices, and raises an AssertionError without it.

    Args:
        hbm_bins_per_device: bins for each device.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins_per_device = max(hbm_bins_per_device, 1)

    def _proposals(self, search_space: list[ShardingOption], enumerator: Enumerator | None) -> Proposals:
        grouped: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            grouped.setdefault(option.fqn, []).append(option)
        if not grouped:
            return
        options = sorted(grouped.values(), key=lambda own: min(o.total_storage.hbm for o in own))
        topology = (yield [min(own, key=lambda o: o.total_storage.hbm) for own in options]).storage_constraint
        if topology is None:
            raise AssertionError("feedback has no storage_constraint. Fix: pass the topology of the free devices")
        bins = self._bins_per_device * len(topology.devices)
        width = sum(device.storage.hbm for device in topology.devices) / bins
        if width <= 0:
            return
        least: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for own in options:
            grown: dict[int, tuple[float, tuple[int, ...]]] = {}
            for used, (total, chosen) in least.items():
                for number, option in enumerate(own):
                    filled = used + ceil(option.total_storage.hbm / width)
                    time = total + option.total_perf
                    if filled <= bins and time < grown.get(filled, (inf,))[0]:
                        grown[filled] = (time, (*chosen, number))
            least = grown
        for used in sorted(least, reverse=True):
            yield [own[number] for own, number in zip(options, least[used][1], strict=True)]


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
