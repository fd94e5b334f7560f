"""Changes the number of replicas over the same ranks: R sharding groups become more, fewer, or one.

A move spans all ranks: every old replica is a source, every new one a target. Each target reads the nearest copy,
preferably on its own rank. ::

    2 replicas on 2 ranks, row-wise          1 replica on 4 ranks, row-wise
    rank 0 and 1: rows 0-50                  rank 0: rows 0-25     nothing is sent
    rank 2 and 3: rows 50-100                rank 1: rows 25-50    nothing is sent
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
    """Two layouts of the same ranks. All replicas of the first are equal.

    Args:
        before: the current layout.
        after: the new layout.
    """

    before: ReplicaGrid
    after: ReplicaGrid

    def over_all_ranks(self, move: Move) -> Move:
        """A move from an old sharding group to a new one, extended to all ranks."""
        return Move(
            move.dtype,
            _everywhere(move.sources, self.before),
            _everywhere(move.targets, self.after),
            _local(move.source_tensors, len(move.sources), self.before),
            _local(move.target_tensors, len(move.targets), self.after),
        )


def by_rank(amounts: Sequence[int], grid: ReplicaGrid) -> list[int]:
    """Amounts per position in a sharding group as amounts per rank."""
    totals = [0] * grid.world.world_size
    for group in grid.sharding_groups:
        for rank, amount in zip(group, amounts, strict=True):
            totals[rank] = amount
    return totals


def _everywhere(shards: Sequence[Shard], grid: ReplicaGrid) -> list[Shard]:
    """A group's shards in each replica, replica after replica."""
    return [
        Shard(ranks[shard.rank], shard.rows, shard.cols, shard.tier)
        for ranks in grid.sharding_groups
        for shard in shards
    ]


def _local(tensors: Mapping[int, Tensor], count: int, grid: ReplicaGrid) -> dict[int, Tensor]:
    """This rank's tensors, with the positions of `_everywhere`."""
    return {grid.group * count + position: tensor for position, tensor in tensors.items()}
