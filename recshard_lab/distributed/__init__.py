"""Sharded collections and models: one executor that runs any tiling."""

from recshard_lab.comm import ShardingEnv as ShardingEnv
from recshard_lab.distributed.exchange import Executor as Executor
from recshard_lab.distributed.migrate import Resharded as Resharded
from recshard_lab.distributed.model_parallel import DistributedModelParallel as DistributedModelParallel
from recshard_lab.distributed.sharded_collections import (
    ShardedEmbeddingBagCollection as ShardedEmbeddingBagCollection,
)
from recshard_lab.distributed.sharded_collections import (
    ShardedEmbeddingCollection as ShardedEmbeddingCollection,
)
from recshard_lab.distributed.sharders import CollectionSharder as CollectionSharder
from recshard_lab.distributed.sharders import EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder
from recshard_lab.distributed.sharders import EmbeddingCollectionSharder as EmbeddingCollectionSharder
