"""Which rectangles of a tiling are replicas: those that lie on every rank.

A rectangle is a replica where the same one lies on several ranks; then it must lie on each of them, once, and have
whole rows. All rows of a table (data-parallel) or some (the hottest, as FlexShard keeps them) may be replicated; the
rest of the table is tiled as ever.

Shape letters: W ranks.
"""

from collections import Counter
from collections.abc import Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.shard import PlanError, Shard, rect_text
from recshard_lab.sharding.tiling import Rect


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
