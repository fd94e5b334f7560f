"""Shared by the node-aware schemes: which usable ranks are on which node.

Ranks fill nodes in order: node k has ranks ``[k * local_world_size, (k + 1) * local_world_size)``. On one node,
table-row-wise and grid equal row-wise, and table-column-wise equals column-wise.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import PlanError
from recshard_lab.sharding.schemes.base import Proposal, check_ranks, usable_ranks


def usable_by_node(topology: Topology, constraints: ParameterConstraints | None) -> tuple[tuple[int, ...], ...]:
    """The usable ranks of each node that has any, in order.

    >>> usable_by_node(Topology(4, local_world_size=2), ParameterConstraints(ranks=[3, 0, 2]))
    ((0,), (2, 3))
    """
    return _by_node(usable_ranks(topology, constraints), topology.local_world_size)


@lru_cache(maxsize=256)
def _by_node(ranks: tuple[int, ...], local: int) -> tuple[tuple[int, ...], ...]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // local, []).append(rank)
    return tuple(tuple(members) for members in nodes.values())


@lru_cache(maxsize=1024)
def node_groups(nodes: tuple[tuple[int, ...], ...], num_nodes: int, ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive groups of `num_nodes` adjacent nodes, each as the first `ranks_per_node` ranks of its nodes.

    >>> node_groups(((0, 1, 2), (3, 4, 5)), 1, 2)
    ((0, 1), (3, 4))
    """
    starts = range(0, len(nodes) - num_nodes + 1, num_nodes)
    return tuple(tuple(r for ranks in nodes[at : at + num_nodes] for r in ranks[:ranks_per_node]) for at in starts)


@lru_cache(maxsize=1024)
def parts_of_nodes(nodes: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Groups of `count` adjacent ranks of a node, which do not overlap.

    >>> parts_of_nodes(((0, 1, 2, 3, 4), (5,), (6, 7)), 2)
    ((0, 1), (2, 3), (6, 7))
    """
    return tuple(ranks[at : at + count] for ranks in nodes for at in range(0, len(ranks) - count + 1, count))


def by_node(topology: Topology, ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """`ranks` grouped by node; nodes and ranks keep the order of `ranks`."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(topology.node_of(rank), []).append(rank)
    return [tuple(members) for members in nodes.values()]


def ranks_of_one_node(
    name: str, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None
) -> tuple[int, ...]:
    """`ranks`. Default: all ranks of a node chosen by a hash of the table's name, so that tables spread.

    Raises:
        PlanError: ranks on several nodes.
    """
    if ranks is None:
        first = zlib.crc32(table.name.encode()) % topology.num_nodes * topology.local_world_size
        return tuple(range(first, first + topology.local_world_size))
    usable = check_ranks(ranks, topology.world_size)
    nodes = by_node(topology, usable)
    if len(nodes) > 1:
        raise PlanError(
            f"table {table.name!r}: {name} keeps a table on one node, but ranks={list(ranks)!r} are on "
            f"{len(nodes)} nodes of {topology.local_world_size} ranks. Fix: ranks={list(nodes[0])!r}"
        )
    return usable


def ranks_of_host(host_index: int, topology: Topology) -> tuple[int, ...]:
    """All ranks of node `host_index`.

    Raises:
        PlanError: the node does not exist.
    """
    if isinstance(host_index, bool) or not isinstance(host_index, int) or not 0 <= host_index < topology.num_nodes:
        raise PlanError(
            f"host_index {host_index!r} does not exist: {topology.world_size} ranks in nodes of "
            f"{topology.local_world_size} are {topology.num_nodes} node(s). Fix: an index below "
            f"{topology.num_nodes}, or pass local_size= ranks per node"
        )
    return tuple(range(host_index * topology.local_world_size, (host_index + 1) * topology.local_world_size))


def grouped(name: str, placements: Iterable[tuple[tuple[Rect, ...], tuple[int, ...]]]) -> Iterator[Proposal]:
    """One proposal for each set of rectangles, with all assignments to ranks."""
    assignments: dict[tuple[Rect, ...], list[tuple[int, ...]]] = {}
    for rects, ranks in placements:
        assignments.setdefault(rects, []).append(ranks)
    for rects, ranks_of_rects in assignments.items():
        yield Proposal(name, rects, tuple(dict.fromkeys(ranks_of_rects)))
