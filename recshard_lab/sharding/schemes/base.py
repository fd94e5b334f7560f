"""What a scheme is, and the registry that lets one defined in a notebook cell appear everywhere.

A scheme is only geometry: it proposes ways to cut a table into rectangles and, where that matters, on which ranks
they may lie. It knows no costs, no kernels and no communication; those read the rectangles.

::

    class Halves:
        name, label, replicated = "halves", "HALF", False

        def propose(self, table, topology, constraints=None):
            middle = table.num_embeddings // 2
            if middle:
                top, bottom = (0, middle), (middle, table.num_embeddings)
                whole = (0, table.embedding_dim)
                yield Proposal(self.name, ((top, whole), (bottom, whole)), None)

        def default(self, table, topology, ranks=None):
            return place_default(self, table, topology, ranks)

    register_scheme(Halves())
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import HBM, PlanError, Shard, nearest


@dataclass(frozen=True)
class Proposal:
    """One way to cut a table.

    Args:
        scheme: the scheme's name.
        rects: the rectangles (a tuple, or an even `EvenTiling`), none empty;
            a tiling, or of a replicated scheme the whole table once per rank.
        assignments: where they may go. None: each to any rank (distinct ones where there are enough), otherwise
            alternatives, each with one rank per rectangle.
        tiers: the memory of each rectangle, "hbm" or "ddr"; all the device's own when left out.
    """

    scheme: str
    rects: Sequence[Rect]
    assignments: tuple[tuple[int, ...], ...] | None = None
    tiers: tuple[str, ...] | None = None

    def placed(self, ranks: Sequence[int], compute_kernel: str = "fused", route: str = "direct") -> ParameterSharding:
        """This cut with its i-th rectangle on ``ranks[i]``."""
        tiers = self.tiers or (HBM,) * len(self.rects)
        shards = [Shard(rank, *rect, tier) for rank, rect, tier in zip(ranks, self.rects, tiers, strict=True)]
        return ParameterSharding(self.scheme, compute_kernel, shards=shards, route=route)


class Scheme(Protocol):
    """What `register_scheme` takes. `label` is the short name that charts print."""

    name: str
    label: str
    replicated: bool

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterable[Proposal]:
        """Ways to cut `table`; none where the scheme does not apply."""

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """The cut a reader means who just names the scheme; over `ranks` where given. PlanError if it cannot."""


_SCHEMES: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> Scheme:
    """Makes a scheme known to the planner, the executor's defaults and the charts; the same name replaces.

    Raises:
        PlanError: it lacks a part of `Scheme`, or claims to be replicated under another name than data_parallel.
    """
    if isinstance(scheme, type):
        raise PlanError(f"register_scheme takes an instance. Fix: register_scheme({scheme.__name__}())")
    for part in ("name", "label", "replicated", "propose", "default"):
        if not hasattr(scheme, part):
            raise PlanError(f"scheme {scheme!r} lacks {part!r}; a scheme has name, label, replicated, propose, default")
    if scheme.replicated and scheme.name != "data_parallel":
        raise PlanError(f"scheme {scheme.name!r}: only data_parallel may be replicated; others must tile the table")
    _SCHEMES[scheme.name] = scheme
    return scheme


def unregister_scheme(name: str) -> None:
    """Forgets a scheme that a reader registered."""
    del _SCHEMES[scheme_named(name).name]


def scheme_named(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        PlanError: there is none.
    """
    if name not in _SCHEMES:
        raise PlanError(
            f"no scheme {name!r} is registered{nearest(name, _SCHEMES)}; known: {', '.join(_SCHEMES)}. "
            f"Fix: one of these names, or register_scheme(...)"
        )
    return _SCHEMES[name]


def scheme_names() -> tuple[str, ...]:
    """Registered schemes in the order of their registration."""
    return tuple(_SCHEMES)


def usable_ranks(topology: Topology, constraints: ParameterConstraints | None) -> tuple[int, ...]:
    """The ranks a table may lie on: those named, or those of its device group, or all, without the forbidden ones.

    Raises:
        PlanError: a rank or a device group that does not exist; none that is not forbidden.
    """
    everywhere = _all_ranks(topology.world_size)
    if constraints is None:
        return everywhere
    group = _group(topology, constraints.device_group)
    if constraints.ranks is None and not constraints.forbidden_ranks:
        return everywhere if group is None else group
    named = everywhere if constraints.ranks is None else check_ranks(constraints.ranks, topology.world_size)
    if group is not None:
        outside, named = named, tuple(rank for rank in named if rank in group)
        if not named:
            raise PlanError(
                f"none of the ranks {list(outside)} is in device_group {constraints.device_group!r} (ranks "
                f"{list(group)}). Fix: leave one of the two out"
            )
    forbidden = set(constraints.forbidden_ranks or ())
    if forbidden:
        check_ranks(sorted(forbidden), topology.world_size)
    usable = tuple(rank for rank in named if rank not in forbidden)
    if not usable:
        raise PlanError(
            f"all of the ranks {list(named)} that a table may lie on are forbidden. Fix: leave one of them "
            f"out of forbidden_ranks"
        )
    return usable


def _group(topology: Topology, name: str | None) -> tuple[int, ...] | None:
    """The ranks of a device group; None for all."""
    if name is None or name == topology.compute_device:
        return None
    if name in topology.device_groups:
        return tuple(topology.device_groups[name])
    known = f"; named groups: {', '.join(topology.device_groups)}" if topology.device_groups else ""
    raise PlanError(
        f"asks for device_group {name!r}{nearest(name, topology.device_groups)}, but all ranks are of kind "
        f"{topology.compute_device!r}{known}. Fix: leave device_group out"
    )


@lru_cache(maxsize=32)
def _all_ranks(world_size: int) -> tuple[int, ...]:
    return tuple(range(world_size))


def both_memories(topology: Topology, constraints: ParameterConstraints | None) -> bool:
    """Whether rows may lie in a device's own memory and in the host's: there are two, and both kernels are allowed."""
    allowed = (constraints.compute_kernels if constraints is not None else None) or ()
    kernels = {str(getattr(kernel, "value", kernel)) for kernel in allowed}
    return topology.has_tiers and kernels >= {"fused", "fused_uvm"}


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """`ranks` as a tuple, after refusing none at all and ones that do not exist."""
    if not ranks:
        raise PlanError("ranks is empty. Fix: name at least one rank, or leave ranks out")
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise PlanError(f"rank {rank} does not exist with world_size {world_size}. Fix: a rank below {world_size}")
    return tuple(ranks)


def place_default(
    scheme: Scheme, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
) -> ParameterSharding:
    """The first proposal of `scheme` with its rectangles dealt to `ranks` in turn."""
    wish = None if ranks is None else ParameterConstraints(ranks=list(ranks))
    for proposal in scheme.propose(table, topology, wish):
        if proposal.assignments:
            return proposal.placed(proposal.assignments[0])
        usable = usable_ranks(topology, wish)
        return proposal.placed([usable[i % len(usable)] for i in range(len(proposal.rects))])
    raise PlanError(
        f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,}) cannot be cut "
        f"{scheme.name} "
        f"over {topology.world_size} ranks. Fix: table_wise"
    )
