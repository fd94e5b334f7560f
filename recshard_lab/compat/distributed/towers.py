"""``torchrec.distributed.embedding_tower_sharding``: sharded towers whose output is TorchRec's awaitable."""

from __future__ import annotations

from recshard_lab import distributed
from recshard_lab.distributed.awaitable import NoWait
from recshard_lab.distributed.eager import eager
from recshard_lab.distributed.towers import TowerLazyAwaitable
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.pytree import register


class ShardedEmbeddingTower(distributed.ShardedEmbeddingTower):
    """A sharded tower. Its output waits when it is first used."""

    @eager
    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor, optional_features: KeyedJaggedTensor | None = None
    ) -> TowerLazyAwaitable:
        """The local batch -> output of the interaction ``[B, ...]``."""
        return self._run(features, optional_features)


class ShardedEmbeddingTowerCollection(distributed.ShardedEmbeddingTowerCollection):
    """Sharded towers. Their output waits when it is first used."""

    @eager
    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> TowerLazyAwaitable:
        """The local batches of ids -> the towers' outputs side by side ``[B, ...]``."""
        return self._run(features, weighted_features)


class EmbeddingTowerSharder(distributed.EmbeddingTowerSharder):
    """Shards `EmbeddingTower`."""

    tower_type = ShardedEmbeddingTower


class EmbeddingTowerCollectionSharder(distributed.EmbeddingTowerCollectionSharder):
    """Shards `EmbeddingTowerCollection`."""

    towers_type = ShardedEmbeddingTowerCollection


register(  # a model may return the output, which DistributedDataParallel traverses
    TowerLazyAwaitable,
    lambda node: ([node.wait()], None),
    lambda leaves, _: TowerLazyAwaitable(NoWait(next(iter(leaves)))),
    lambda _: ["output"],
)
