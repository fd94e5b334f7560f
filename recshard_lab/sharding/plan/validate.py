"""Checks that the shards of one table tile it; errors name the fault and a fix.

Identical rectangles on every rank are replicas. A replicated rectangle is stored on each rank exactly once and has all
columns. All rows of a table may be replicated (data-parallel), or some of them (the hottest, as in FlexShard).

Shape letters: W ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.plan.tiling import Rect, find_fault
from recshard_lab.sharding.plan.types import TIERS, PlanError, Shard, rect_text


def check_shards(table: BaseEmbeddingConfig, shards: Sequence[Shard], replicated: bool, world_size: int) -> None:
    """Checks one table.

    Args:
        replicated: the plan calls it data-parallel: every rank holds all of it.

    Raises:
        PlanError: no shards, a rank that does not exist, a hole, an overlap, a rectangle outside the table,
            or a rank without its one copy of what is replicated.
    """
    where = f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,})"
    if not shards:
        raise PlanError(f"{where} has no shards. Fix: give its rectangles, or use plan.resolved(tables, world_size)")
    try:
        _check_tiling(where, table, shards, replicated, world_size)
    except (TypeError, LookupError, RuntimeError):
        for shard in shards:
            check_spans(shard)
        raise


def check_spans(shard: Shard) -> None:
    """Refuses a shard whose rank is no integer, or whose rows or columns are no two of them."""
    spans = (shard.rows, shard.cols)
    two = all(isinstance(span, tuple) and len(span) == 2 for span in spans)
    if not two or not all(isinstance(number, Integral) for number in (shard.rank, *spans[0], *spans[1])):
        raise PlanError(
            f"a Shard is a rank, rows=(r0, r1) and cols=(c0, c1), all integers; got rank={shard.rank!r}, "
            f"rows={shard.rows!r}, cols={shard.cols!r}"
        )


def shards_in(given: Iterable[Shard]) -> tuple[Shard, ...]:
    """What was given for a list of shards.

    Raises:
        PlanError: something else among them.
    """
    try:
        shards = tuple(given)
    except TypeError:
        raise PlanError(f"shards must be a list of Shard, got {given!r}") from None
    for shard in shards:
        if not isinstance(shard, Shard):
            raise PlanError(f"shards must be a list of Shard, but {shard!r} is among them")
        if shard.tier not in TIERS:
            raise PlanError(f"the shard {shard} lies in tier {shard.tier!r}. Fix: one of {', '.join(TIERS)}")
    return shards


def _check_tiling(
    where: str, table: BaseEmbeddingConfig, shards: Sequence[Shard], replicated: bool, world_size: int
) -> None:
    for shard in shards:
        if not 0 <= shard.rank < world_size:
            raise PlanError(
                f"{where}: {shard}, but world_size is {world_size}. Fix: move the shard to a rank "
                f"below {world_size}, or launch {shard.rank + 1} ranks"
            )
    if replicated:
        check_whole_replicas(where, table, shards, world_size)
        return
    shards = [shards[position] for position in without_copies(where, table, shards, world_size)]
    fault = find_fault([shard.rect for shard in shards], table.num_embeddings, table.embedding_dim)
    if fault is None:
        return
    rect, fix = (
        rect_text(fault.rect),
        f"Fix: {_fix_text(shards, fault.pieces, fault.fix, fault.rect)}",
    )
    if fault.kind == "empty":
        raise PlanError(f"{where}: the shard {shards[fault.pieces[0]]} is empty. Fix: leave it out")
    if fault.kind == "outside":
        raise PlanError(f"{where}: the shard {shards[fault.pieces[0]]} sticks out of the table. {fix}")
    if fault.kind == "overlap":
        ranks = " and ".join(str(rank) for rank in sorted(shards[k].rank for k in fault.pieces))
        raise PlanError(f"{where}: shards on ranks {ranks} overlap in {rect}. {fix}")
    raise PlanError(f"{where}: no shard covers {rect}. {fix}")


def _fix_text(shards: Sequence[Shard], pieces: tuple[int, ...], fix: Rect | None, rect: Rect) -> str:
    if fix is not None and pieces:
        rank, was = shards[pieces[0]].rank, shards[pieces[0]].rect
        side, span, old = ("rows", fix[0], was[0]) if fix[0] != was[0] else ("cols", fix[1], was[1])
        if fix[0] != was[0] and fix[1] != was[1]:
            return f"make the shard on rank {rank} {rect_text(fix)}"
        return f"make the shard on rank {rank} {side}=({span[0]}, {span[1]}) instead of ({old[0]}, {old[1]})"
    if len(pieces) == 2:
        return f"cut one of {shards[pieces[0]]} and {shards[pieces[1]]} so that they share nothing"
    if pieces:
        return f"remove the shard {shards[pieces[0]]}"
    (r0, r1), (c0, c1) = rect
    return f"add Shard(rank=..., rows=({r0}, {r1}), cols=({c0}, {c1}))"


def replica_flags(rects: Sequence[Rect]) -> tuple[bool, ...]:
    """For each rectangle whether another one is equal to it.

    >>> replica_flags([((0, 5), (0, 4)), ((0, 5), (0, 4)), ((5, 10), (0, 4))])
    (True, True, False)
    """
    times = Counter(rects)
    if len(times) == len(rects):
        return (False,) * len(rects)
    return tuple(times[rect] > 1 for rect in rects)


def replicas_of(table: BaseEmbeddingConfig, world_size: int) -> list[Shard]:
    """The whole table on every rank."""
    return [Shard(rank, (0, table.num_embeddings), (0, table.embedding_dim)) for rank in range(world_size)]


def check_whole_replicas(where: str, table: BaseEmbeddingConfig, shards: Sequence[Shard], world_size: int) -> None:
    """Refuses a data-parallel table that is not whole on every rank."""
    whole: Rect = ((0, table.num_embeddings), (0, table.embedding_dim))
    for shard in shards:
        if shard.rect != whole:
            raise PlanError(
                f"{where} is data_parallel, but rank {shard.rank} holds only {rect_text(shard.rect)}. "
                f"Fix: make it {rect_text(whole)}, or name another sharding_type"
            )
    what = _fault(shards, world_size)
    if what is not None:
        raise PlanError(
            f"{where} is data_parallel over {world_size} ranks, but {what}. Fix: exactly one shard "
            f"{rect_text(whole)} on each of ranks 0 to {world_size - 1}"
        )


def without_copies(where: str, table: BaseEmbeddingConfig, shards: Sequence[Shard], world_size: int) -> list[int]:
    """Positions of the shards that must tile the table: of a replica only the first.

    Raises:
        PlanError: a replica that does not lie on every rank once, or has not all columns.
    """
    flags = replica_flags([shard.rect for shard in shards])
    if not any(flags):
        return list(range(len(shards)))
    first: dict[Rect, list[int]] = {}
    for position, shard in enumerate(shards):
        first.setdefault(shard.rect, []).append(position)
    for rect, members in first.items():
        if len(members) == 1:
            continue
        text = rect_text(rect)
        what = _fault([shards[position] for position in members], world_size)
        if what is not None:
            ranks = " and ".join(str(shards[position].rank) for position in members[:2])
            raise PlanError(
                f"{where}: shards on ranks {ranks} overlap in {text}, and replicas they are not: {what}. Fix: "
                f"remove the shard {shards[members[1]]}, or put {text} on each of ranks 0 to {world_size - 1} once"
            )
        if rect[1] != (0, table.embedding_dim):
            raise PlanError(
                f"{where}: {text} lies on every rank, but replicas are whole rows. Fix: make them cols "
                f"[0, {table.embedding_dim})"
            )
    return sorted(members[0] for members in first.values())


def _fault(replicas: Sequence[Shard], world_size: int) -> str | None:
    holders = sorted(shard.rank for shard in replicas)
    if holders == list(range(world_size)):
        return None
    twice = [rank for rank in holders if holders.count(rank) > 1]
    missing = [rank for rank in range(world_size) if rank not in holders]
    return f"rank {twice[0]} holds it twice" if twice else f"rank {missing[0]} holds no replica"
