"""What the node-aware schemes share: which usable ranks live on which node.

Ranks fill nodes in order: ``[k * local_world_size, (k + 1) * local_world_size)`` live on node k. On one node the
node-aware schemes have the geometry of the schemes they refine (table-row-wise and grid: row-wise; table-column-wise:
column-wise), so there they propose nothing of their own unless they are asked for by name.
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


def adds_nothing(name: str, topology: Topology, constraints: ParameterConstraints | None) -> bool:
    """Whether the nodes are such that other schemes propose the same, and nobody asks for this one by name."""
    return (topology.num_nodes == 1 or topology.local_world_size == 1) and not asked_for(name, constraints)


def asked_for(name: str, constraints: ParameterConstraints | None) -> bool:
    """Whether the constraints allow only some schemes, this one among them."""
    return name in [str(getattr(n, "value", n)) for n in (constraints.sharding_types if constraints else None) or ()]


def usable_by_node(topology: Topology, constraints: ParameterConstraints | None) -> list[tuple[int, ...]]:
    """For every node that has any, its usable ranks in order.

    >>> usable_by_node(Topology(4, local_world_size=2), ParameterConstraints(ranks=[3, 0, 2]))
    [(0,), (2, 3)]
    """
    return list(_by_node(usable_ranks(topology, constraints), topology.local_world_size))


@lru_cache(maxsize=256)
def _by_node(ranks: tuple[int, ...], local: int) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(rank // local, []).append(rank)
    return tuple(tuple(members) for members in found.values())


@lru_cache(maxsize=1024)
def windows(nodes: tuple[tuple[int, ...], ...], nodes_each: int, ranks_each: int) -> tuple[tuple[int, ...], ...]:
    """The first ranks of `nodes_each` nodes next to one another, for all such groups of nodes one after the other.

    >>> windows(((0, 1, 2), (3, 4, 5)), 1, 2)
    ((0, 1), (3, 4))
    """
    starts = range(0, len(nodes) - nodes_each + 1, nodes_each)
    return tuple(tuple(r for ranks in nodes[at : at + nodes_each] for r in ranks[:ranks_each]) for at in starts)


def by_node(topology: Topology, ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """`ranks` node by node; nodes and the ranks of each in the order in which they are named."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(topology.node_of(rank), []).append(rank)
    return [tuple(members) for members in found.values()]


def ranks_of_one_node(
    name: str, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None
) -> tuple[int, ...]:
    """The named ranks; left out, all of a node that is drawn from the table's name, so that tables spread.

    Raises:
        PlanError: named ranks that live on several nodes.
    """
    if ranks is None:
        first = zlib.crc32(table.name.encode()) % topology.num_nodes * topology.local_world_size
        return tuple(range(first, first + topology.local_world_size))
    usable = check_ranks(ranks, topology.world_size)
    nodes = by_node(topology, usable)
    if len(nodes) > 1:
        raise PlanError(
            f"table {table.name!r}: {name} keeps a table on one node, but ranks={list(ranks)!r} live on "
            f"{len(nodes)} nodes of {topology.local_world_size} ranks. Fix: ranks={list(nodes[0])!r}"
        )
    return usable


def ranks_of_host(host_index: int, topology: Topology) -> tuple[int, ...]:
    """All ranks of node `host_index`.

    Raises:
        PlanError: there is no such node.
    """
    if isinstance(host_index, bool) or not isinstance(host_index, int) or not 0 <= host_index < topology.num_nodes:
        raise PlanError(
            f"host_index {host_index!r} does not exist: {topology.world_size} ranks in nodes of "
            f"{topology.local_world_size} are {topology.num_nodes} node(s). Fix: an index below "
            f"{topology.num_nodes}, or local_size= of the nodes there are"
        )
    return tuple(range(host_index * topology.local_world_size, (host_index + 1) * topology.local_world_size))


def merged(name: str, ways: Iterable[tuple[tuple[Rect, ...], tuple[int, ...]]]) -> Iterator[Proposal]:
    """One proposal for each cut, with all the ranks it may lie on."""
    found: dict[tuple[Rect, ...], list[tuple[int, ...]]] = {}
    for rects, ranks in ways:
        found.setdefault(rects, []).append(ranks)
    for rects, listed in found.items():
        yield Proposal(name, rects, tuple(dict.fromkeys(listed)))
