"""Says whether the shards of one table are a tiling of it, in words and a fix."""

from collections.abc import Iterable, Sequence
from numbers import Integral

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.replicas import check_whole_replicas, without_copies
from recshard_lab.sharding.shard import TIERS, PlanError, Shard, rect_text
from recshard_lab.sharding.tiling import Rect, find_fault
from recshard_lab.sharding.types import nearest as nearest


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
