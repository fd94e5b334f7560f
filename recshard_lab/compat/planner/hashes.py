"""Hashes of what a plan depends on, equal in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from recshard_lab.compat.planner.constants import HUNDRED_GB

T = TypeVar("T")


def hash_sha256_str(hashable_list: list[Any]) -> str:
    """The SHA-256 of a list's text, in hexadecimal digits.

    >>> hash_sha256_str([1, "a"])[:8]
    '99258d93'
    """
    return hashlib.sha256(str(hashable_list).encode()).hexdigest()


def hash_sha256_to_int(hashable_list: list[Any]) -> int:
    """The SHA-256 of a list's text as an integer."""
    return int(hash_sha256_str(hashable_list), 16)


def round_to_nearest(x: int, unit: int) -> int:
    """`x` rounded to a multiple of `unit`; halves to the even multiple.

    >>> round_to_nearest(149, 100), round_to_nearest(250, 100)
    (100, 200)
    """
    return round(x / unit) * unit


def _of_topology(topology: Any) -> list[Any]:
    capacities = [
        [device.rank, *(round_to_nearest(size, HUNDRED_GB) for size in (s.hbm, s.ddr, s.ssd))]
        for device in topology.devices
        for s in (device.storage,)
    ]
    speeds = [topology.hbm_mem_bw, topology.ddr_mem_bw, topology.ssd_mem_bw, topology.hbm_to_ddr_mem_bw]
    links = [topology.intra_host_bw, topology.inter_host_bw, topology.local_world_size, topology.intra_group_size]
    factors = [
        topology.bwd_compute_multiplier,
        topology.weighted_feature_bwd_compute_multiplier,
        topology.uneven_sharding_perf_multiplier,
    ]
    return [topology.world_size, topology.compute_device, capacities, speeds, links, factors]


def hash_planner_context_inputs_str(
    topology: Any,
    batch_size: int,
    enumerator: Any,
    storage_reservation: Any,
    constraints: Mapping[str, Any] | None,
    hash_function: Callable[[list[Any]], Any] = hash_sha256_str,
) -> Any:
    """A hash of everything that determines which plans are valid: equal for equal inputs.

    Args:
        topology: its capacities are rounded to 100 GiB.
        batch_size: samples per rank.
        enumerator: after ``enumerate``, with its options in ``last_stored_search_space``.
        storage_reservation: after ``reserve``, with ``last_reserved_topology``.
        constraints: table name -> constraints.
        hash_function: of a list. Default: SHA-256 in hexadecimal digits.

    Raises:
        AssertionError: before ``enumerate`` or ``reserve``.
    """
    space = getattr(enumerator, "last_stored_search_space", None)
    reserved = storage_reservation.last_reserved_topology
    if space is None or reserved is None:
        missing = "enumerator.enumerate(module, sharders)" if space is None else "storage_reservation.reserve(...)"
        raise AssertionError(f"the planner's context has no hash before a plan. Fix: call {missing} first")
    options = [
        [
            option.fqn,
            option.sharding_type,
            option.compute_kernel,
            [(shard.size, shard.offset, shard.rank, repr(shard.storage)) for shard in option.shards],
            str(option.cache_params),
        ]
        for option in space
    ]
    limits = None if not constraints else sorted((name, repr(value)) for name, value in constraints.items())
    kind = type(storage_reservation).__name__
    return hash_function([_of_topology(topology), batch_size, options, kind, _of_topology(reserved), limits])


def hash_planner_context_inputs(
    topology: Any,
    batch_size: int,
    enumerator: Any,
    storage_reservation: Any,
    constraints: Mapping[str, Any] | None,
    hash_function: Callable[[list[Any]], int] = hash_sha256_to_int,
) -> int:
    """`hash_planner_context_inputs_str` as an integer."""
    found: int = hash_planner_context_inputs_str(
        topology, batch_size, enumerator, storage_reservation, constraints, hash_function
    )
    return found
