"""Places the shards of a proposal on ranks: the largest tables first, each shard on the least busy rank with room."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering

from recshard_lab.compat.planner.base import Partitioner
from recshard_lab.compat.planner.costs import DeviceHardware, Perf, PlannerError, PlannerErrorType, Storage
from recshard_lab.compat.planner.options import PartitionByType, Shard, ShardingOption, reset_shard_rank
from recshard_lab.compat.planner.perf_models import NoopPerfModel
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.compat.planner.utils import BinarySearchPredicate
from recshard_lab.sharding import ShardingType


class SortBy(Enum):
    """Which options a partitioner places first: those with the most bytes, or with the most time."""

    STORAGE = "storage"
    PERF = "perf"


@dataclass
class ShardingOptionGroup:
    """Options that are placed together.

    Args:
        sharding_options: with the same `dependency`. storage_sum, perf_sum: their bytes and ms. param_count: tables of
            their module.
    """

    sharding_options: list[ShardingOption]
    storage_sum: Storage
    perf_sum: float
    param_count: int


@total_ordering
class OrderedDeviceHardware:
    """A device that compares by time, then by its number in its node, then by rank.

    Args:
        device: the device. local_world_size: ranks per node.
    """

    def __init__(self, device: DeviceHardware, local_world_size: int) -> None:
        self.device, self.local_world_size = device, local_world_size

    @property
    def _key(self) -> tuple[float, int, int]:
        return self.device.perf.total, self.device.rank % self.local_world_size, self.device.rank

    def __lt__(self, other: OrderedDeviceHardware) -> bool:
        return self._key < other._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrderedDeviceHardware) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class GreedyPerfPartitioner(Partitioner):
    """Places options one after another, each shard on the rank with the least time so far that has room.

    Uniform options come first. Then the options with the most bytes or time.

    Args:
        sort_by: the order. balance_modules: whether modules with fewer tables come first.

    >>> from recshard_lab.compat.planner.options import Shard
    >>> def table(name, ms):
    ...     shard = Shard([1, 1], [0, 0], Storage(1, 0), Perf(ms, 0, 0, 0))
    ...     empty = (torch.empty(0), ("", torch.nn.Module()), [1.0], 1, "table_wise", "device", "fused", [shard])
    ...     return ShardingOption(name, *empty, is_pooled=True)
    >>> import torch
    >>> placed = GreedyPerfPartitioner(SortBy.PERF).partition([table("a", 1.0), table("b", 3.0)], Topology(2, "cuda"))
    >>> [option.shards[0].rank for option in placed]
    [1, 0]
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by, self._balance_modules = sort_by, balance_modules

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> list[ShardingOption]:
        """The proposal with the rank of every shard set. The topology is not changed.

        Args:
            proposal: one option per table, with costs. storage_constraint: devices with free bytes.
            hbm_per_device: bytes of device memory that replace the devices' own.

        Raises:
            PlannerError: of type PARTITION, if a shard has room on no rank.
        """
        devices, local = deepcopy(storage_constraint.devices), storage_constraint.local_world_size
        if hbm_per_device is not None:
            for device in devices:
                device.storage.hbm = hbm_per_device
        nodes = [devices[start : start + local] for start in range(0, len(devices), local)]
        for option in proposal:
            if option.partition_by == PartitionByType.UNIFORM.value:
                _place_uniform(option, devices)
        for group in self._groups(proposal):
            where = group.sharding_options[0].partition_by
            if where == PartitionByType.HOST.value:
                _place_on_nodes(group.sharding_options, nodes, local, count=1)
            elif where == PartitionByType.MULTI_HOST.value:
                tall = group.sharding_options[0].num_shards
                _place_on_nodes(group.sharding_options, nodes, local, count=max(1, min(len(nodes), -(-tall // local))))
            elif where == PartitionByType.DEVICE.value:
                for option in group.sharding_options:
                    _place_each(option.shards, devices, local, option.name)
            else:
                raise PlannerError(
                    f"table {group.sharding_options[0].name!r} has partition_by={where!r}, which does not exist. Fix: "
                    f"use get_partition_by_type(sharding_type)"
                )
        return proposal

    def _groups(self, proposal: Sequence[ShardingOption]) -> list[ShardingOptionGroup]:
        """Options that are not uniform, grouped by dependency and sorted."""
        counts: dict[str, int] = {}
        for option in proposal:
            counts[option.path] = counts.get(option.path, 0) + 1
        grouped: dict[str, ShardingOptionGroup] = {}
        for option in proposal:
            if option.partition_by == PartitionByType.UNIFORM.value:
                continue
            key = option.dependency or option.fqn
            group = grouped.setdefault(key, ShardingOptionGroup([], Storage(0, 0), 0.0, counts[option.path]))
            group.sharding_options.append(option)
            group.storage_sum += option.total_storage
            group.perf_sum += option.total_perf
        listed = list(grouped.values())
        if self._sort_by is SortBy.STORAGE:
            listed.sort(key=lambda group: group.storage_sum, reverse=True)
        else:
            listed.sort(key=lambda group: group.perf_sum, reverse=True)
        if self._balance_modules:
            listed.sort(key=lambda group: group.param_count)
        return listed


def _costs(shard: Shard, table: str) -> tuple[Storage, Perf]:
    if shard.storage is None or shard.perf is None:
        raise PlannerError(f"table {table!r} has a shard without costs. Fix: enumerator.populate_estimates(options)")
    return shard.storage, shard.perf


def _put(shards: Sequence[Shard], devices: Sequence[DeviceHardware], table: str) -> None:
    """One shard on each device, in order."""
    for shard, device in zip(shards, devices, strict=True):
        storage, _ = _costs(shard, table)
        if not storage.fits_in(device.storage):
            raise _no_room(table, storage, devices)
        _take(device, shard, table)


def _take(device: DeviceHardware, shard: Shard, table: str) -> None:
    storage, perf = _costs(shard, table)
    shard.rank = device.rank
    device.storage, device.perf = device.storage - storage, device.perf + perf


def _no_room(table: str, storage: Storage, devices: Iterable[DeviceHardware]) -> PlannerError:
    free = max((device.storage for device in devices), default=Storage(0, 0))
    return PlannerError(
        f"table {table!r} has a shard of {storage}, and the largest free memory of a rank is {free}. Fix: allow "
        f"another scheme, or more ranks",
        PlannerErrorType.PARTITION,
    )


def _place_uniform(option: ShardingOption, devices: Sequence[DeviceHardware]) -> None:
    """One shard on each device, in order."""
    if len(devices) != option.num_shards:
        raise PlannerError(
            f"table {option.name!r} has {option.num_shards} shards for {len(devices)} ranks, expected one on each. "
            f"Fix: enumerate its options with the same topology",
            PlannerErrorType.PARTITION,
        )
    _put(option.shards, devices, option.name)


def _place_each(shards: Iterable[Shard], devices: Sequence[DeviceHardware], local: int, table: str) -> None:
    """Each shard on the least busy device that has room."""
    heap = [OrderedDeviceHardware(device, local) for device in devices]
    heapq.heapify(heap)
    for shard in shards:
        storage, _ = _costs(shard, table)
        full = []
        while heap and not storage.fits_in(heap[0].device.storage):
            full.append(heapq.heappop(heap))
        if not heap:
            raise _no_room(table, storage, devices)
        first = heapq.heappop(heap)
        _take(first.device, shard, table)
        for entry in (first, *full):
            heapq.heappush(heap, entry)


def _place_on_nodes(
    options: Sequence[ShardingOption], nodes: Sequence[list[DeviceHardware]], local: int, count: int
) -> None:
    """All shards of the options on the ranks of `count` nodes, the least busy ones first."""
    order = sorted(range(len(nodes)), key=lambda node: sum(device.perf.total for device in nodes[node]))
    for first in range(len(order) - count + 1):
        chosen = [device for node in order[first : first + count] for device in nodes[node]]
        trial = deepcopy(chosen)
        try:
            for option in options:
                _place_in_nodes(option, trial, local)
        except PlannerError:
            reset_shard_rank(options)
            continue
        for device, used in zip(chosen, trial, strict=True):
            device.storage, device.perf = used.storage, used.perf
        return
    names = ", ".join(option.name for option in options)
    needed = sum((option.total_storage for option in options), Storage(0, 0))
    raise PlannerError(
        f"tables {names} need {needed} on {count} node(s) of {local} ranks, which no node has. "
        f"Fix: allow another scheme",
        PlannerErrorType.PARTITION,
    )


def _place_in_nodes(option: ShardingOption, devices: Sequence[DeviceHardware], local: int) -> None:
    if option.sharding_type == ShardingType.TABLE_ROW_WISE:
        _place_uniform(option, devices)
    elif option.sharding_type == ShardingType.GRID_SHARD:
        nodes = [devices[start : start + local] for start in range(0, len(devices), local)]
        for number, start in enumerate(range(0, option.num_shards, local)):
            _put(option.shards[start : start + local], nodes[number % len(nodes)], option.name)
    else:
        _place_each(option.shards, devices, local, option.name)


class MemoryBalancedPartitioner(Partitioner):
    """Places options with as little device memory per rank as possible, for little more time.

    It repeats `GreedyPerfPartitioner` with less and less memory per rank, by binary search.

    Args:
        max_search_count: repetitions at most. tolerance: the accepted increase of the slowest shard's time, as a share.
        balance_modules: as of `GreedyPerfPartitioner`.
    """

    def __init__(self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False) -> None:
        self._max_search_count, self._tolerance, self._balance_modules = max_search_count, tolerance, balance_modules

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """The proposal with the rank of every shard set.

        Raises:
            PlannerError: it does not fit.
        """
        greedy = GreedyPerfPartitioner(SortBy.PERF, self._balance_modules)
        best = deepcopy(greedy.partition(proposal, storage_constraint))
        model = NoopPerfModel(storage_constraint)
        limit = model.rate(best) * (1 + self._tolerance)
        used = [0] * len(storage_constraint.devices)
        for option in best:
            for shard in option.shards:
                used[int(shard.rank or 0)] += _costs(shard, option.name)[0].hbm
        least = max(
            -(-sum(used) // max(1, len(used))),
            max((_costs(shard, option.name)[0].hbm for option in best for shard in option.shards), default=0),
        )
        search = BinarySearchPredicate(-max(used, default=0), -least, max(1, least // 100))
        memory, better = search.next(True), False
        for _ in range(self._max_search_count):
            if memory is None:
                break
            reset_shard_rank(proposal)
            try:
                placed = greedy.partition(proposal, storage_constraint, hbm_per_device=-memory)
                better = model.rate(placed) <= limit
            except PlannerError:
                better = False
            if better:
                best = deepcopy(proposal)
            memory = search.next(better)
        for option, chosen in zip(proposal, best, strict=True):
            option.shards = chosen.shards
        return proposal
