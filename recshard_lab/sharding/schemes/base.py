"""What a scheme is, and the registry. A scheme that you register in a notebook cell appears everywhere.

A scheme is only geometry. It proposes ways to split a table into rectangles and, if required, the ranks that may store
them. Costs, kernels and communication read the rectangles.

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
from recshard_lab.sharding.plan.cache_params import CacheParams
from recshard_lab.sharding.plan.constraints import ParameterConstraints
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.types import HBM, PlanError, Shard, nearest


@dataclass(frozen=True)
class Proposal:
    """One way to split a table.

    Args:
        scheme: the scheme's name.
        rects: the rectangles (a tuple or an `EvenTiling`), not empty. They tile the table; for a replicated scheme
            they are the whole table once per rank.
        assignments: allowed placements, each with one rank per rectangle. None: any ranks, distinct if there are
            enough.
        tiers: the memory of each rectangle, "hbm" or "ddr". Default: "hbm" for all.
        together: equal numbers above 0 for proposals of several tables that were made together. The search starts from
            all of them.
    """

    scheme: str
    rects: Sequence[Rect]
    assignments: tuple[tuple[int, ...], ...] | None = None
    tiers: tuple[str, ...] | None = None
    together: int = 0

    def placed(
        self,
        ranks: Sequence[int],
        compute_kernel: str = "fused",
        route: str = "direct",
        cache_params: CacheParams | None = None,
    ) -> ParameterSharding:
        """This proposal with its i-th rectangle on ``ranks[i]``."""
        tiers = self.tiers or (HBM,) * len(self.rects)
        shards = [Shard(rank, *rect, tier) for rank, rect, tier in zip(ranks, self.rects, tiers, strict=True)]
        return ParameterSharding(self.scheme, compute_kernel, cache_params=cache_params, shards=shards, route=route)


class Scheme(Protocol):
    """Protocol of a scheme for `register_scheme`. `label` is the short name in charts.

    A scheme may also have `on_one_node`, the name of a scheme whose proposals on one node include its own. The planner
    then compares only those of the other scheme, if both are allowed.
    """

    name: str
    label: str
    replicated: bool

    def propose(
        self, table: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterable[Proposal]:
        """Ways to split `table`; empty if the scheme does not apply."""

    def default(
        self, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
    ) -> ParameterSharding:
        """The scheme's default sharding over `ranks`, or over all ranks; PlanError if impossible."""


_SCHEMES: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> Scheme:
    """Registers a scheme with the planner, `ShardingPlan.resolved` and the charts. It replaces one of the same name.

    Raises:
        PlanError: an attribute of `Scheme` is missing, or it is replicated and not named data_parallel.
    """
    if isinstance(scheme, type):
        raise PlanError(f"register_scheme takes an instance. Fix: register_scheme({scheme.__name__}())")
    for attribute in ("name", "label", "replicated", "propose", "default"):
        if not hasattr(scheme, attribute):
            raise PlanError(
                f"scheme {scheme!r} lacks {attribute!r}; a scheme has name, label, replicated, propose, default"
            )
    if scheme.replicated and scheme.name != "data_parallel":
        raise PlanError(f"scheme {scheme.name!r}: only data_parallel may be replicated; others must tile the table")
    _SCHEMES[scheme.name] = scheme
    return scheme


def unregister_scheme(name: str) -> None:
    """Removes a registered scheme.

    Raises:
        PlanError: an unknown name.
    """
    del _SCHEMES[scheme_named(name).name]


def scheme_named(name: str) -> Scheme:
    """The scheme of this name.

    Raises:
        PlanError: an unknown name.
    """
    if name not in _SCHEMES:
        raise PlanError(
            f"no scheme {name!r} is registered{nearest(name, _SCHEMES)}; known: {', '.join(_SCHEMES)}. "
            f"Fix: use one of these names, or call register_scheme(...)"
        )
    return _SCHEMES[name]


def scheme_names() -> tuple[str, ...]:
    """Names of the registered schemes, in order of registration."""
    return tuple(_SCHEMES)


def usable_ranks(topology: Topology, constraints: ParameterConstraints | None) -> tuple[int, ...]:
    """The ranks that may store a table: `ranks`, those of its device group, or all, without the forbidden ranks.

    Raises:
        PlanError: a rank or a device group that does not exist; all ranks are forbidden.
    """
    all_ranks = _all_ranks(topology.world_size)
    if constraints is None:
        return all_ranks
    group = _group(topology, constraints.device_group)
    if constraints.ranks is None and not constraints.forbidden_ranks:
        return all_ranks if group is None else group
    named = all_ranks if constraints.ranks is None else check_ranks(constraints.ranks, topology.world_size)
    if group is not None:
        outside, named = named, tuple(rank for rank in named if rank in group)
        if not named:
            raise PlanError(
                f"ranks {list(outside)} are outside device_group {constraints.device_group!r} (ranks {list(group)}). "
                f"Fix: remove ranks or device_group"
            )
    forbidden = set(constraints.forbidden_ranks or ())
    if forbidden:
        check_ranks(sorted(forbidden), topology.world_size, "forbidden_ranks")
    usable = tuple(rank for rank in named if rank not in forbidden)
    if not usable:
        raise PlanError(
            f"all of the ranks {list(named)} that may store a table are forbidden. Fix: remove one of them from "
            f"forbidden_ranks"
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
        f"device_group {name!r} does not exist{nearest(name, topology.device_groups)}: all ranks are "
        f"{topology.compute_device!r}{known}. Fix: omit device_group"
    )


@lru_cache(maxsize=32)
def _all_ranks(world_size: int) -> tuple[int, ...]:
    return tuple(range(world_size))


def allows_both_tiers(topology: Topology, constraints: ParameterConstraints | None) -> bool:
    """Whether a table may use both device and host memory: both exist, and both kernels are allowed."""
    allowed = (constraints.compute_kernels if constraints is not None else None) or ()
    kernels = {str(getattr(kernel, "value", kernel)) for kernel in allowed}
    return topology.has_tiers and kernels >= {"fused", "fused_uvm"}


def check_ranks(ranks: Sequence[int], world_size: int, name: str = "ranks") -> tuple[int, ...]:
    """`ranks` as a tuple.

    Args:
        ranks: numbers of ranks.
        world_size: how many ranks there are.
        name: of the argument, for the error.

    Raises:
        PlanError: no ranks, or a rank that does not exist.
    """
    if not ranks:
        raise PlanError("ranks is empty. Fix: pass at least one rank, or omit ranks")
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise PlanError(
                f"{name}={list(ranks)!r:.60}: rank {rank} does not exist with world_size {world_size}. Fix: use ranks "
                f"below {world_size}"
            )
    return tuple(ranks)


@lru_cache(maxsize=1024)
def halves(count: int) -> tuple[int, ...]:
    """`count`, a half, a quarter, ... of it, down to 2 or 3; 1 for 1.

    >>> halves(12), halves(1)
    ((12, 6, 3), (1,))
    """
    return tuple(count >> k for k in range(max(1, count.bit_length() - 1)))


def place_default(
    scheme: Scheme, table: BaseEmbeddingConfig, topology: Topology, ranks: Sequence[int] | None = None
) -> ParameterSharding:
    """The first proposal of `scheme` with its rectangles assigned to `ranks` round-robin."""
    constraints = None if ranks is None else ParameterConstraints(ranks=list(ranks))
    for proposal in scheme.propose(table, topology, constraints):
        if proposal.assignments:
            return proposal.placed(proposal.assignments[0])
        usable = usable_ranks(topology, constraints)
        return proposal.placed([usable[i % len(usable)] for i in range(len(proposal.rects))])
    raise PlanError(
        f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,}) cannot be sharded {scheme.name} "
        f"over {topology.world_size} ranks. Fix: use table_wise"
    )
