"""Rectangles to and from torch's ``EnumerableShardingSpec``, which TorchRec's plans carry."""

from collections.abc import Sequence
from typing import Any

from recshard_lab.sharding.shard import PlanError, Shard


def shards_from_spec(spec: Any) -> tuple[Shard, ...]:
    """The rectangles of an ``EnumerableShardingSpec`` (anything with ``.shards`` of torch's ``ShardMetadata``).

    Raises:
        PlanError: another kind of spec, a shard that is not two-dimensional or has no rank.
    """
    pieces = getattr(spec, "shards", None)
    if pieces is None:
        raise PlanError(f"sharding_spec must be an EnumerableShardingSpec, got {type(spec).__name__}")
    found = []
    for piece in pieces:
        if len(piece.shard_offsets) != 2:
            raise PlanError(f"sharding_spec has a shard of {len(piece.shard_offsets)} dimensions, expected 2")
        rank = piece.placement.rank() if piece.placement is not None else None
        if rank is None:
            raise PlanError(f"sharding_spec places a shard on {piece.placement!r}, expected 'rank:k/device'")
        (r0, c0), (rows, cols) = piece.shard_offsets, piece.shard_sizes
        if rows and cols:  # TorchRec writes ranks without rows as empty shards
            found.append(Shard(int(rank), (int(r0), int(r0 + rows)), (int(c0), int(c0 + cols))))
    return tuple(found)


def spec_from_shards(shards: Sequence[Shard], device: str = "cpu") -> Any:
    """An ``EnumerableShardingSpec`` of these rectangles."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]],
                shard_sizes=[shard.num_rows, shard.num_cols],
                placement=f"rank:{shard.rank}/{device}",
            )
            for shard in shards
        ]
    )
