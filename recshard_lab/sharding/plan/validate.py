"""Checks that the shards of one table tile it; errors name the fault and a fix.

Identical rectangles on every rank are replicas. A replicated rectangle is stored once on each rank and has all columns.
All rows of a table may be replicated (data-parallel), or some of them (the hottest, as in FlexShard).

Shape letters: W ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.plan.tiling import Fault, Rect, find_fault
from recshard_lab.sharding.plan.types import TIERS, PlanError, Shard, rect_text


def check_shards(table: BaseEmbeddingConfig, shards: Sequence[Shard], replicated: bool, world_size: int) -> None:
    """Checks one table.

    Args:
        replicated: whether the table is data-parallel: every rank stores all of it.

    Raises:
        PlanError: no shards, a rank that does not exist, a hole, an overlap, a shard outside the table, a replica
            that is not stored once on each rank, or a part of a dynamic table's partition.
    """
    where = f"table {table.name!r} ({table.num_embeddings:,} x {table.embedding_dim:,})"
    if not shards:
        raise PlanError(f"{where} has no shards. Fix: pass its shards, or use plan.resolved(tables, world_size)")
    try:
        _check_tiling(where, table, shards, replicated, world_size)
    except (TypeError, LookupError, RuntimeError):
        for shard in shards:
            check_spans(shard)
        raise


def check_spans(shard: Shard) -> None:
    """Raises a `PlanError` unless the shard's rank is an integer, and its rows and columns are two integers each."""
    spans = (shard.rows, shard.cols)
    pairs = all(isinstance(span, tuple) and len(span) == 2 for span in spans)
    if not pairs or not all(isinstance(number, Integral) for number in (shard.rank, *spans[0], *spans[1])):
        raise PlanError(
            f"a Shard is a rank, rows=(r0, r1) and cols=(c0, c1), all integers; got rank={shard.rank!r}, "
            f"rows={shard.rows!r}, cols={shard.cols!r}. Fix: Shard(0, (0, 100), (0, 64))"
        )


def as_shards(values: Iterable[Shard]) -> tuple[Shard, ...]:
    """`values` as a tuple of shards.

    Raises:
        PlanError: not iterable, a value that is not a `Shard`, or an unknown tier.
    """
    try:
        shards = tuple(values)
    except TypeError:
        raise PlanError(f"shards must be a list of Shard, got {values!r}. Fix: [Shard(0, (0, 100), (0, 64))]") from None
    for shard in shards:
        if not isinstance(shard, Shard):
            raise PlanError(
                f"shards must be a list of Shard, but it contains {shard!r}. Fix: Shard(0, (0, 100), (0, 64))"
            )
        if shard.tier not in TIERS:
            raise PlanError(f"the shard {shard} has the unknown tier {shard.tier!r}. Fix: use {' or '.join(TIERS)}")
    return shards


def replica_flags(rects: Sequence[Rect]) -> tuple[bool, ...]:
    """For each rectangle, whether another one is equal to it.

    >>> replica_flags([((0, 5), (0, 4)), ((0, 5), (0, 4)), ((5, 10), (0, 4))])
    (True, True, False)
    """
    counts = Counter(rects)
    if len(counts) == len(rects):
        return (False,) * len(rects)
    return tuple(counts[rect] > 1 for rect in rects)


def _check_tiling(
    where: str, table: BaseEmbeddingConfig, shards: Sequence[Shard], replicated: bool, world_size: int
) -> None:
    for shard in shards:
        if not 0 <= shard.rank < world_size:
            raise PlanError(
                f"{where}: {shard}, but world_size is {world_size}. Fix: move the shard to a rank "
                f"below {world_size}, or launch {shard.rank + 1} ranks"
            )
    if table.dynamic:
        _check_partitions(table, shards, replicated)
    if replicated:
        _check_data_parallel(where, table, shards, world_size)
        return
    shards = [shards[position] for position in _first_copies(where, table, shards, world_size)]
    fault = find_fault([shard.rect for shard in shards], table.num_embeddings, table.embedding_dim)
    if fault is None:
        return
    first = shards[fault.positions[0]] if fault.positions else None
    if fault.kind == "empty":
        raise PlanError(f"{where}: the shard {first} is empty. Fix: remove it")
    if fault.kind == "outside":
        problem = f"the shard {first} is partly outside the table"
    elif fault.kind == "overlap":
        ranks = " and ".join(str(rank) for rank in sorted(shards[k].rank for k in fault.positions))
        problem = f"shards on ranks {ranks} overlap in {rect_text(fault.rect)}"
    else:
        problem = f"no shard covers {rect_text(fault.rect)}"
    raise PlanError(f"{where}: {problem}. Fix: {_fix_text(shards, fault)}")


def _fix_text(shards: Sequence[Shard], fault: Fault) -> str:
    positions, fix = fault.positions, fault.fix
    if fix is not None and positions:
        rank, current = shards[positions[0]].rank, shards[positions[0]].rect
        if fix[0] != current[0] and fix[1] != current[1]:
            return f"make the shard on rank {rank} {rect_text(fix)}"
        side, new, old = ("rows", fix[0], current[0]) if fix[0] != current[0] else ("cols", fix[1], current[1])
        return f"make the shard on rank {rank} {side}=({new[0]}, {new[1]}) instead of ({old[0]}, {old[1]})"
    if len(positions) == 2:
        return f"shrink {shards[positions[0]]} or {shards[positions[1]]} so that they are disjoint"
    if positions:
        return f"remove the shard {shards[positions[0]]}"
    (r0, r1), (c0, c1) = fault.rect
    return f"add Shard(rank=..., rows=({r0}, {r1}), cols=({c0}, {c1}))"


def _check_data_parallel(where: str, table: BaseEmbeddingConfig, shards: Sequence[Shard], world_size: int) -> None:
    """Raises a `PlanError` unless each rank stores the whole table once."""
    whole: Rect = ((0, table.num_embeddings), (0, table.embedding_dim))
    for shard in shards:
        if shard.rect != whole:
            raise PlanError(
                f"{where} is data_parallel, but rank {shard.rank} holds only {rect_text(shard.rect)}. "
                f"Fix: make it {rect_text(whole)}, or use another sharding_type"
            )
    problem = _wrong_copies(shards, world_size)
    if problem is not None:
        raise PlanError(
            f"{where} is data_parallel over {world_size} ranks, but {problem}. Fix: exactly one shard "
            f"{rect_text(whole)} on each of ranks 0 to {world_size - 1}"
        )


def _check_partitions(table: BaseEmbeddingConfig, shards: Sequence[Shard], replicated: bool) -> None:
    """Raises a `PlanError` unless the shards of a dynamic table have whole partitions, each once."""
    if replicated or any(replica_flags([shard.rect for shard in shards])):
        raise PlanError(
            f"table {table.name!r} is dynamic: its rows cannot be replicated. Fix: use row_wise, table_wise or "
            f"column_wise"
        )
    for shard in shards:
        if shard.rows[0] % table.row_unit or shard.rows[1] % table.row_unit:
            raise PlanError(
                f"table {table.name!r}: rows {shard.rows} of a shard are not whole partitions of {table.row_unit:,} "
                f"rows. Fix: use multiples of {table.row_unit}, as row_wise() does"
            )
    least, sizes = table.least_equal_rows, sorted({shard.rows[1] - shard.rows[0] for shard in shards})
    if least and (len(sizes) > 1 or sizes[0] < least):
        raise PlanError(
            f"table {table.name!r} has row shards of {', '.join(f'{size:,}' for size in sizes)} rows: they become the "
            f"buckets of its module, which have equal sizes of at least {least} rows. Fix: use row_wise()"
        )


def _first_copies(where: str, table: BaseEmbeddingConfig, shards: Sequence[Shard], world_size: int) -> list[int]:
    """Positions of the shards that must tile the table: of each replica, only the first copy.

    Raises:
        PlanError: a replica that is not stored once on every rank, or does not have all columns.
    """
    if not any(replica_flags([shard.rect for shard in shards])):
        return list(range(len(shards)))
    copies: dict[Rect, list[int]] = {}
    for position, shard in enumerate(shards):
        copies.setdefault(shard.rect, []).append(position)
    for rect, positions in copies.items():
        if len(positions) == 1:
            continue
        text = rect_text(rect)
        problem = _wrong_copies([shards[position] for position in positions], world_size)
        if problem is not None:
            ranks = " and ".join(str(shards[position].rank) for position in positions[:2])
            raise PlanError(
                f"{where}: shards on ranks {ranks} overlap in {text}, and they are not replicas because {problem}. "
                f"Fix: remove the shard {shards[positions[1]]}, or put {text} once on each of ranks 0 to "
                f"{world_size - 1}"
            )
        if rect[1] != (0, table.embedding_dim):
            raise PlanError(
                f"{where}: {text} is on every rank, but replicas are whole rows. Fix: make them cols "
                f"[0, {table.embedding_dim})"
            )
    return sorted(positions[0] for positions in copies.values())


def _wrong_copies(replicas: Sequence[Shard], world_size: int) -> str | None:
    """Why `replicas` are not exactly one per rank, or None."""
    ranks = sorted(shard.rank for shard in replicas)
    if ranks == list(range(world_size)):
        return None
    duplicates = [rank for rank in ranks if ranks.count(rank) > 1]
    missing = [rank for rank in range(world_size) if rank not in ranks]
    return f"rank {duplicates[0]} holds it twice" if duplicates else f"rank {missing[0]} holds no replica"
