"""From one layout of replicas to another over the same ranks: R sharding groups become more, fewer, or one.

What moves is seen from all ranks: every old replica is a source, every new one a target, and a target takes the copy
that lies nearest, its own rank's first. ::

    2 replicas on 2 ranks, row-wise          1 replica on 4 ranks, row-wise
    rank 0 and 1: rows 0-50                  rank 0: rows 0-25     nothing travels
    rank 2 and 3: rows 50-100                rank 1: rows 25-50    nothing travels
                                             ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recshard_lab.comm import ReplicaGrid
from recshard_lab.distributed.state.moves import Move
from recshard_lab.sharding import Shard


@dataclass(frozen=True)
class Regrouping:
    """Two layouts of the same ranks; replicas of the first are alike.

    Args:
        before: where tensors lie.
        after: where they shall lie.
    """

    before: ReplicaGrid
    after: ReplicaGrid

    def over_all_ranks(self, move: Move) -> Move:
        """A move from an old sharding group to a new one, as all ranks must do it together."""
        return Move(
            move.dtype,
            _everywhere(move.sources, self.before),
            _everywhere(move.targets, self.after),
            _own(move.held, len(move.sources), self.before),
            _own(move.wanted, len(move.targets), self.after),
        )


def by_rank(amounts: Sequence[int], grid: ReplicaGrid) -> list[int]:
    """Amounts of the places in a sharding group as amounts of all ranks."""
    whole = [0] * grid.world.world_size
    for group in grid.sharding_groups:
        for rank, amount in zip(group, amounts, strict=True):
            whole[rank] = amount
    return whole


def _everywhere(shards: Sequence[Shard], grid: ReplicaGrid) -> list[Shard]:
    """A group's rectangles, replica after replica."""
    return [
        Shard(ranks[shard.rank], shard.rows, shard.cols, shard.tier)
        for ranks in grid.sharding_groups
        for shard in shards
    ]


def _own(tensors: Mapping[int, Tensor], count: int, grid: ReplicaGrid) -> dict[int, Tensor]:
    """This rank's tensors, numbered as `_everywhere` numbers their rectangles."""
    return {grid.group * count + position: tensor for position, tensor in tensors.items()}
