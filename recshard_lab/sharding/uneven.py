"""Stripes of rows whose sizes a reader gives: by sizes, by boundaries, or by buckets that must not be cut."""

from collections.abc import Sequence
from itertools import pairwise

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.shard import PlanError, Shard


def stripes_of(table: BaseEmbeddingConfig, sizes: Sequence[int], ranks: Sequence[int], named: bool) -> list[Shard]:
    """Stripes of `sizes` rows from the top down on `ranks`; a size of 0 leaves its rank without one.

    Args:
        named: the reader named the ranks, so each must have its size.

    Raises:
        PlanError: sizes that are not the whole table, or not one for each rank.
    """
    sums_to("rows", sizes, table.num_embeddings, table)
    if len(sizes) > len(ranks) or (named and len(sizes) != len(ranks)):
        raise PlanError(f"table {table.name!r}: {len(sizes)} sizes for {len(ranks)} ranks. Fix: one size per rank")
    shards, at = [], 0
    for rank, size in zip(ranks, sizes, strict=False):
        if size:
            shards.append(Shard(rank, (at, at + size), (0, table.embedding_dim)))
        at += size
    return shards


def sizes_between(table: BaseEmbeddingConfig, boundaries: Sequence[int]) -> list[int]:
    """Sizes of the stripes that begin at row 0 and at each boundary.

    Raises:
        PlanError: boundaries that do not ascend from 0 to the last row.

    >>> sizes_between(BaseEmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4), [2, 7])
    [2, 5, 3]
    """
    rows = table.num_embeddings
    cuts = [0, *(int(at) for at in boundaries if at not in (0, rows)), rows]
    sizes = [after - before for before, after in pairwise(cuts)]
    if min(sizes) <= 0 or len(set(boundaries)) != len(boundaries):
        raise PlanError(
            f"table {table.name!r} has {rows:,} rows, which cannot be cut at boundaries={list(boundaries)!r}. "
            f"Fix: rows between 1 and {rows - 1:,}, ascending, each once"
        )
    return sizes


def bucket_sizes(table: BaseEmbeddingConfig, num_buckets: int, count: int) -> list[int]:
    """Rows of `count` stripes of whole buckets; the first stripes have one bucket more where it does not come out even.

    Raises:
        PlanError: buckets that do not divide the rows, or fewer buckets than stripes.

    >>> bucket_sizes(BaseEmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4), 5, 4)
    [4, 2, 2, 2]
    """
    if num_buckets < count or table.num_embeddings % num_buckets:
        raise PlanError(
            f"table {table.name!r} has {table.num_embeddings:,} rows for {count} ranks, but num_buckets={num_buckets}. "
            f"Fix: a divisor of the rows that is at least {count}"
        )
    each, more = divmod(num_buckets, count)
    return [table.num_embeddings // num_buckets * (each + (i < more)) for i in range(count)]


def sums_to(what: str, sizes: Sequence[int], total: int, table: BaseEmbeddingConfig) -> None:
    """Refuses sizes that are not the whole table."""
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise PlanError(
            f"table {table.name!r} has {total:,} {what}, but the sizes {list(sizes)} sum to {sum(sizes):,}. "
            f"Fix: sizes that sum to {total:,}"
        )
