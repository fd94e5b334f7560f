"""Who takes part: the ranks that share one sharded model."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class ShardingEnv:
    """The ranks over which a model is sharded.

    Args:
        world_size: number of ranks W.
        rank: this rank's number in the group.
        pg: the process group; None means one process on its own, which needs no collective.
    """

    world_size: int
    rank: int
    pg: Any = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size} ranks")
        if self.pg is None and self.world_size > 1:
            raise ValueError(
                f"a world of {self.world_size} ranks needs a process group: use "
                f"ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
            )

    @property
    def process_group(self) -> Any:
        """TorchRec's name for ``pg``."""
        return self.pg

    @classmethod
    def from_process_group(cls, pg: Any) -> "ShardingEnv":
        """The environment of an initialised process group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":
        """One process on its own.

        >>> ShardingEnv.from_local(world_size=1, rank=0).world_size
        1
        """
        return cls(world_size, rank)

    @classmethod
    def default(cls) -> "ShardingEnv":
        """The default process group when there is one, else this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls.from_process_group(dist.group.WORLD)
        return cls.from_local(1, 0)
